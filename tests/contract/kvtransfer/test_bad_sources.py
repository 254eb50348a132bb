"""Sources that are of another kind, make no sense or say nothing: typed errors, bounded time, nothing left."""

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
    LayoutMismatch,
    MalformedMessage,
    Overloaded,
    ProtocolViolation,
    StaleIncarnation,
    TransferFailed,
)
from services.kvtransfer.client import FetchOrder, lease_may_live
from services.kvtransfer.servicer import KVTransferServicer
from tests.support.kv_harness import (
    LAYOUT,
    NIXL,
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


@pytest.mark.parametrize(
    ("field", "other"),
    [
        *((field, "other\n\x1b[2J" + "x" * 1000) for field in ("weights_digest", "config_digest", "model_id")),
        ("layout_version", 1),
        ("dtype", "bfloat16"),
        ("dtype", "int8"),
    ],
)
async def test_another_layout_never_pairs(field: str, other: str | int) -> None:
    source = Source(shared=False)
    destination = Destination(dataclasses.replace(LAYOUT, **{field: other}))
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        with pytest.raises(LayoutMismatch, match=f"^{field}: ") as refused:
            await destination.fetch(source, lease)
        assert lease_may_live(refused.value)
        assert str(refused.value).isprintable(), "what a peer says of itself reaches logs"
        assert len(str(refused.value)) < 200
        source.table.abort(lease.lease_id, 0.0)


async def test_another_incarnation_never_pairs() -> None:
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
    offers = [types_pb2.KVOffer(transport=types_pb2.TRANSPORT_GRPC)]
    source = types_pb2.KVSource(address=address, incarnation=1, offers=offers)
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


@pytest.mark.parametrize("transport", ["shm", "tcp", NIXL, "grpc"])
async def test_a_source_that_dies_under_the_fetch(transport: str) -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40)
        order = destination.order(source, lease, transport=transport)
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
    """A block of 5 MiB is sent alone; small blocks are sent together."""
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


async def test_parts_of_blocks_are_refused_by_name() -> None:
    whole = types_pb2.KVShard(num_layers=LAYOUT.num_layers, num_kv_heads=LAYOUT.num_kv_heads)
    part = types_pb2.KVShard(num_layers=LAYOUT.num_layers - 1, num_kv_heads=LAYOUT.num_kv_heads)
    source, destination = Source(), Destination()
    async with running(source, destination):
        lease = source.lease(40, sealed=True)
        for shards in ([part], [whole, part], [whole, whole]):
            order = destination.order(source, lease)
            for offer in order.source.offers:
                offer.shards.extend(shards)
            with pytest.raises(LayoutMismatch, match=r"shards: the source offers layers 0 \+"):
                await destination.fetcher.fetch(order)
            assert order.import_ in destination.freed
        order = destination.order(source, lease)
        for offer in order.source.offers:
            offer.shards.append(whole)
        assert (await destination.fetcher.fetch(order)).ready
