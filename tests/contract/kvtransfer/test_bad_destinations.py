"""Tests bad destinations of a transfer: typed errors, bounded time, nothing left, others unharmed."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import grpc
import pytest

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import (
    Draining,
    LeaseInvalid,
)
from services.kvtransfer.client import lease_may_live
from services.rpc.authentication import credentials
from services.rpc.status import from_call
from tests.support.kv_harness import LAYOUT, Destination, Source, opening, raw_stub, running, until
from tests.support.trusted import CLUSTER_TOKEN, dial

Code = grpc.StatusCode


async def code_of(call: Any) -> grpc.StatusCode:
    """The status comes after what was sent before it."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    return await call.code()


# What a destination may send, and how it is answered.


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"lease_id": b"x" * 16}, Code.ABORTED),
        ({"lease_id": b""}, Code.INVALID_ARGUMENT),
        ({"lease_id": b"x" * 17}, Code.INVALID_ARGUMENT),
        ({"first_block": -1}, Code.INVALID_ARGUMENT),
        ({"first_block": 4}, Code.INVALID_ARGUMENT),
        ({"transport": types_pb2.TRANSPORT_SHM}, Code.INVALID_ARGUMENT),
        ({"transport": types_pb2.TRANSPORT_LOCAL}, Code.INVALID_ARGUMENT),
        ({"transport": 99}, Code.INVALID_ARGUMENT),
        ({"source_incarnation": 1}, Code.ABORTED),
        ({"layout": types_pb2.KVLayout(block_size=32)}, Code.FAILED_PRECONDITION),
    ],
)
async def test_a_wrong_open_is_refused(fields: dict[str, Any], code: grpc.StatusCode) -> None:
    source = Source(shared=False)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(40)
        request = opening(source, lease.lease_id, **fields)
        if fields.get("lease_id") == b"":
            request.open.lease_id = b""
        call = stub.Fetch(iter([request]))
        assert await call.code() is code
        assert lease.fetch is None
        source.table.abort(lease.lease_id, 0.0)


@pytest.mark.parametrize(
    "first", [None, kvtransfer_pb2.FetchRequest(), kvtransfer_pb2.FetchRequest(ack=kvtransfer_pb2.FetchAck())]
)
async def test_a_fetch_starts_with_open(first: kvtransfer_pb2.FetchRequest | None) -> None:
    source = Source(shared=False)
    async with running(source), raw_stub(source) as stub:
        call = stub.Fetch(iter([first] if first else []))
        assert await call.code() is Code.FAILED_PRECONDITION


async def test_a_client_that_says_nothing_is_sent_away() -> None:
    source = Source(shared=False, silence_s=0.1)
    async with running(source), raw_stub(source) as stub:
        assert await stub.Fetch().code() is Code.DEADLINE_EXCEEDED


@pytest.mark.parametrize("copied", [-1, 2, 1 << 30])
async def test_an_impossible_acknowledgement_ends_the_fetch(copied: int) -> None:
    source = Source(shared=False)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(40)
        source.publish(lease, 16)
        ack = kvtransfer_pb2.FetchRequest(ack=kvtransfer_pb2.FetchAck(copied_blocks=copied))
        call = stub.Fetch(iter([opening(source, lease.lease_id), ack]))
        assert await code_of(call) is Code.FAILED_PRECONDITION
        await until(lambda: lease.fetch is None)
        source.table.abort(lease.lease_id, 0.0)


async def test_a_second_open_ends_the_fetch() -> None:
    source = Source(shared=False)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(40)
        call = stub.Fetch(iter([opening(source, lease.lease_id)] * 2))
        assert await code_of(call) is Code.FAILED_PRECONDITION
        await until(lambda: lease.fetch is None)
        source.table.abort(lease.lease_id, 0.0)


async def test_a_client_that_sends_no_more_is_left_to_the_stall_clock() -> None:
    source = Source(shared=False)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(40)
        call = stub.Fetch(iter([opening(source, lease.lease_id)]))  # then half-closes
        source.publish(lease, 16)
        assert len((await call.read()).blocks.data) == 1
        assert lease.fetch is not None
        source.pass_time(5.0)
        assert await call.code() is Code.UNAVAILABLE
        source.table.abort(lease.lease_id, 0.0)


@pytest.mark.parametrize("clock", ["stall", "silence"])
async def test_a_client_that_never_reads_is_sent_away(clock: str) -> None:
    """The window is filled and a send hangs: it is bounded, whatever the lease's clocks say."""
    layout = dataclasses.replace(LAYOUT, head_dim=4096)  # 1 MiB a block
    source = Source(layout, shared=False, silence_s=0.2)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(16 * 40, sealed=True)
        call = stub.Fetch()
        await call.write(opening(source, lease.lease_id))
        await until(lambda: lease.fetch is not None)
        if clock == "stall":
            source.pass_time(5.0)
        await until(lambda: source.board.num_followers == 0)
        assert lease.fetch is None
        source.pass_time(10.0)
        call.cancel()
        # Others are served meanwhile and afterwards.
        other = source.lease(20, sealed=True)
        answer = await stub.Release(kvtransfer_pb2.ReleaseRequest(lease_id=other.lease_id, leg=1))
        assert answer.valid


async def test_malformed_and_oversize_requests_are_typed() -> None:
    source = Source(shared=False)
    async with running(source), dial(source.server.address) as channel:
        fetch = channel.stream_stream("/baton.v1.KVTransferService/Fetch")
        release = channel.unary_unary("/baton.v1.KVTransferService/Release")
        assert await fetch(iter([b"\xff\xff\xff"])).code() is Code.INVALID_ARGUMENT
        assert await release(b"\xff\xff\xff").code() is Code.INVALID_ARGUMENT
    options = [("grpc.max_send_message_length", -1)]
    async with running(source := Source(shared=False)):
        async with grpc.aio.insecure_channel(source.server.address, options=options) as channel:
            release = channel.unary_unary("/baton.v1.KVTransferService/Release")
            assert await release(bytes(20 << 20), metadata=credentials(CLUSTER_TOKEN)).code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(("state", "code"), [("open", Code.FAILED_PRECONDITION), ("short id", Code.INVALID_ARGUMENT)])
async def test_a_release_that_cannot_be(state: str, code: grpc.StatusCode) -> None:
    source = Source(shared=False)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(40)
        lease_id = lease.lease_id if state == "open" else b"short"
        assert await stub.Release(kvtransfer_pb2.ReleaseRequest(lease_id=lease_id, leg=1)).code() is code
        source.table.abort(lease.lease_id, 0.0)


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_source_that_leaves_says_so_to_whoever_fetches(leaves: bool) -> None:
    """The destination of an aborted lease cannot tell otherwise whether something went wrong."""
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40)
        order = destination.order(source, lease)
        fetching = destination.start(order)
        await until(lambda: lease.fetch is not None)
        if leaves:
            source.servicer.leave()
        source.table.abort(lease.lease_id, 0.0)
        with pytest.raises(Draining if leaves else LeaseInvalid) as caught:
            await fetching
        assert not lease_may_live(caught.value)
        async with raw_stub(source) as stub:
            late = stub.Release(kvtransfer_pb2.ReleaseRequest(lease_id=lease.lease_id, leg=order.leg))
            if leaves:
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await late
                assert isinstance(from_call(refused.value), Draining)
            else:
                assert not (await late).valid


async def test_a_replayed_lease_is_invalid() -> None:
    source, destination, replaying = Source(), Destination(), Destination()
    async with running(source, destination, replaying):
        lease = source.lease(40, sealed=True)
        assert (await destination.fetch(source, lease, leg=1)).ready
        for leg in (1, 2):
            with pytest.raises(LeaseInvalid, match="released"):
                await replaying.fetch(source, lease, leg=leg)
