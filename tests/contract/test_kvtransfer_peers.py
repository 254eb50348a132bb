"""Bad peers on either side of a transfer: typed errors, bounded time, nothing left, others unharmed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import (
    BatonError,
    Draining,
    LayoutMismatch,
    LeaseInvalid,
    MalformedMessage,
    Overloaded,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
)
from services.kvtransfer.client import FetchOrder, lease_may_live
from services.kvtransfer.servicer import KVTransferServicer
from services.rpc.channels import dial
from services.rpc.status import from_call
from tests.contract.kv_harness import (
    LAYOUT,
    TOKEN,
    Destination,
    Source,
    opening,
    raw_stub,
    running,
    until,
)

Code = grpc.StatusCode
Response = kvtransfer_pb2.FetchResponse
BLOCK = bytes(LAYOUT.block_bytes)


def blocks(first_block: int, count: int = 1, **fields: Any) -> Response:
    return Response(blocks=kvtransfer_pb2.FetchBlocks(first_block=first_block, data=[BLOCK] * count, **fields))


def sealed(num_tokens: int = 40) -> Response:
    return Response(sealed=kvtransfer_pb2.FetchSealed(num_tokens=num_tokens, first_token=TOKEN))


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
    """Its window fills, and a send hangs; the send is bounded, whatever the lease's clocks say."""
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
            assert await release(bytes(20 << 20)).code() is Code.RESOURCE_EXHAUSTED


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
    """Of an aborted lease nobody can tell otherwise whether something went wrong."""
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


# What a source may do, and what the destination makes of it.


async def test_another_layout_or_another_incarnation_never_pairs() -> None:
    source = Source(shared=False)
    destination = Destination(dataclasses.replace(LAYOUT, weights_digest="other"))
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        with pytest.raises(LayoutMismatch, match="weights_digest") as refused:
            await destination.fetch(source, lease)
        assert lease_may_live(refused.value)
        source.table.abort(lease.lease_id, 0.0)
    source, destination = Source(shared=False), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        order = destination.order(source, lease)
        order.source.incarnation += 1
        with pytest.raises(StaleIncarnation) as stale:
            await destination.fetcher.fetch(order)
        assert not lease_may_live(stale.value)
        source.table.abort(lease.lease_id, 0.0)


SCRIPTS: list[tuple[list[Response], type[BatonError]]] = [
    ([], TransferFailed),
    ([blocks(0), blocks(1)], TransferFailed),  # ends before the seal
    ([blocks(0, 3), sealed(32)], ProtocolViolation),
    ([blocks(0, 2), sealed(40)], ProtocolViolation),
    ([sealed(40)], ProtocolViolation),
    ([blocks(1)], ProtocolViolation),
    ([blocks(0), blocks(0)], ProtocolViolation),
    ([blocks(0), blocks(2)], ProtocolViolation),
    ([blocks(0, 4)], ProtocolViolation),
    ([blocks(0, 0)], ProtocolViolation),
    ([blocks(0, checksums=[1])], ProtocolViolation),
    ([Response()], ProtocolViolation),
    ([Response(blocks=kvtransfer_pb2.FetchBlocks(data=[BLOCK[1:]]))], ProtocolViolation),
    ([Response(blocks=kvtransfer_pb2.FetchBlocks(pool_blocks=[0]))], ProtocolViolation),
]


@pytest.mark.parametrize("number", range(len(SCRIPTS)))
async def test_a_source_that_breaks_the_protocol(number: int) -> None:
    script, error = SCRIPTS[number]

    class Scripted(KVTransferServicer):
        async def Fetch(self, requests, context):  # type: ignore[no-untyped-def]
            await anext(requests)
            for response in script:
                await context.write(response)
            if error is not TransferFailed:
                await asyncio.Event().wait()

    source, destination = Source(shared=False, servicer=Scripted), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        order = destination.order(source, lease)
        with pytest.raises(error) as raised:
            await destination.fetcher.fetch(order)
        assert type(raised.value) is error
        assert lease_may_live(raised.value)
        assert destination.freed == [order.import_]
        source.table.abort(lease.lease_id, 0.0)


async def test_a_block_outside_the_sources_pool_is_not_read() -> None:
    class Scripted(KVTransferServicer):
        async def Fetch(self, requests, context):  # type: ignore[no-untyped-def]
            await anext(requests)
            await context.write(Response(blocks=kvtransfer_pb2.FetchBlocks(pool_blocks=[64])))

    source, destination = Source(servicer=Scripted), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        with pytest.raises(ProtocolViolation, match="outside"):
            await destination.fetch(source, lease)
        source.table.abort(lease.lease_id, 0.0)


@pytest.mark.parametrize("size", ["malformed", "oversize"])
async def test_a_source_that_answers_garbage(size: str) -> None:
    data = b"\xff\xff\xff" if size == "malformed" else bytes(65 << 20)

    async def fetch(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await anext(requests)
        await context.write(data)
        await asyncio.Event().wait()

    server = grpc.aio.server(options=[("grpc.max_send_message_length", -1)])
    handler = grpc.stream_stream_rpc_method_handler(fetch)
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("baton.v1.KVTransferService", {"Fetch": handler}),)
    )
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    destination = Destination()
    async with running(destination):
        order = elsewhere(destination, address)
        with pytest.raises(MalformedMessage if size == "malformed" else Overloaded):
            await destination.fetcher.fetch(order)
        assert destination.freed == [order.import_]
        await server.stop(0)


def elsewhere(destination: Destination, address: str) -> FetchOrder:
    import_ = destination.reserve(3)
    source = types_pb2.KVSource(address=address, incarnation=1)
    return FetchOrder(source, b"x" * 16, 1, import_, 0, import_.block_ids)


@contextlib.asynccontextmanager
async def mute_server() -> AsyncIterator[str]:
    """Takes connections and answers nothing, like a stopped process."""
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    try:
        yield "127.0.0.1:{1}".format(*server.sockets[0].getsockname())
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()


async def test_a_source_that_does_not_answer_is_given_up() -> None:
    destination = Destination(silence_s=0.2)
    async with mute_server() as address, running(destination):
        order = elsewhere(destination, address)
        with pytest.raises(TransferFailed, match="does not answer") as raised:
            await destination.fetcher.fetch(order)
        assert lease_may_live(raised.value)
        assert destination.freed == [order.import_]


async def test_an_address_where_nobody_listens() -> None:
    async with mute_server() as address:
        pass
    destination = Destination()
    async with running(destination):
        with pytest.raises(TransferFailed):
            await destination.fetcher.fetch(elsewhere(destination, address))


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_a_source_that_dies_under_the_fetch(transport: str) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40)
        order = destination.order(source, lease, transport=transport)  # type: ignore[arg-type]
        fetch = destination.start(order)
        source.publish(lease, 16)
        await until(lambda: lease.fetch is not None and lease.fetch.copied == 1)
        await source.server.stop(0)
        with pytest.raises(TransferFailed) as raised:
            await fetch
        assert isinstance(raised.value.__cause__, grpc.aio.AioRpcError)
        assert destination.freed == [order.import_]
        source.table.abort(lease.lease_id, 0.0)


async def test_a_source_that_never_answers_the_release() -> None:
    class Silent(KVTransferServicer):
        async def Release(self, request, context):  # type: ignore[no-untyped-def]
            await asyncio.Event().wait()

    source, destination = Source(servicer=Silent), Destination(silence_s=0.1)
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        order = destination.order(source, lease)
        with pytest.raises(TransferFailed):
            await destination.fetcher.fetch(order)
        assert destination.freed == [order.import_]
        source.table.abort(lease.lease_id, 0.0)


async def test_messages_are_about_a_mebibyte() -> None:
    """A block of 5 MiB travels alone; small blocks travel together."""
    for head_dim, per_message in ((20480, 1), (256, 16)):
        layout = dataclasses.replace(LAYOUT, head_dim=head_dim)
        source = Source(layout, shared=False)
        async with running(source), raw_stub(source) as stub:
            lease = source.lease(16 * 20, sealed=True)
            call = stub.Fetch()
            await call.write(opening(source, lease.lease_id))
            assert len((await call.read()).blocks.data) == per_message
            call.cancel()
            source.table.abort(lease.lease_id, 0.0)
