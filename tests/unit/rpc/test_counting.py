"""Tests that what peers of the cluster send is counted before it is parsed, and what they may send is not refused."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.v1 import kvtransfer_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from services.core.errors import InvalidRequest, MessageTooLarge
from services.rpc.counting import FETCH_RESPONSE, RELEASE_RESPONSE, REQUESTS
from services.rpc.serving import GrpcServer
from tests.support.trusted import CLUSTER_TOKEN, dial

SESSION = REQUESTS["/baton.v1.WorkerService/Session"]
MANY = 1 << 20


def field(number: int, content: bytes) -> bytes:
    """Returns a field of bytes, or of a message."""
    size, head = len(content), b""
    while size > 127:
        head += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + head + bytes([size]) + content


EMPTY = b"\x0a\x00"
"""An empty message or text in field 1."""
BIASES = bytes([types_pb2.SamplingParams.DESCRIPTOR.fields_by_name["logit_bias"].number << 3 | 2, 0])
HUGE = {
    "empty biases": (SESSION, field(2, field(5, BIASES * MANY)), InvalidRequest),
    "empty leases": (SESSION, field(5, EMPTY * MANY), InvalidRequest),
    "tokens without end": (SESSION, field(2, field(3, b"\x01" * (5 << 20))), InvalidRequest),
    "unknown fields": (SESSION, b"\x7a\x00" * MANY, InvalidRequest),
    "a long salt": (SESSION, field(2, field(9, b"x" * (1 << 20))), InvalidRequest),
    "a request for a text": (REQUESTS["/baton.v1.WorkerService/GetModelText"], b"\x7a\x00" * MANY, MessageTooLarge),
    "a fetch": (REQUESTS["/baton.v1.KVTransferService/Fetch"], field(1, b"\x7a\x00" * MANY), MessageTooLarge),
    "a release": (REQUESTS["/baton.v1.KVTransferService/Release"], field(1, b"x" * MANY), MessageTooLarge),
    "empty blocks": (FETCH_RESPONSE, field(1, b"\x1a\x00" * MANY), InvalidRequest),
    "empty log-probabilities": (FETCH_RESPONSE, field(2, field(2, b"\x22\x00" * MANY)), InvalidRequest),
    "an answer to a release": (RELEASE_RESPONSE, b"\x7a\x00" * MANY, MessageTooLarge),
}


@pytest.mark.parametrize("name", HUGE)
def test_what_no_peer_sends_is_not_parsed(name: str) -> None:
    counted, data, error = HUGE[name]
    assert counted.kind.FromString(data).IsInitialized(), "it could be parsed"
    with pytest.raises(error):
        counted.parse(data)
    assert counted.parse_or_none(data) is None


ALLOWED = {
    "a prompt of a million tokens": (
        SESSION,
        worker_pb2.SessionRequest(prefill=worker_pb2.PrefillCommand(leg=1, token_ids=[150_000] * (1 << 20))),
    ),
    "many leases held": (
        SESSION,
        worker_pb2.SessionRequest(heartbeat=worker_pb2.RouterHeartbeat(held_leases=[bytes(16)] * 10_000)),
    ),
    "blocks": (
        FETCH_RESPONSE,
        kvtransfer_pb2.FetchResponse(blocks=kvtransfer_pb2.FetchBlocks(data=[bytes(1 << 20)] * 32)),
    ),
    "pool blocks": (
        FETCH_RESPONSE,
        kvtransfer_pb2.FetchResponse(blocks=kvtransfer_pb2.FetchBlocks(pool_blocks=range(65_536))),
    ),
}


@pytest.mark.parametrize("name", ALLOWED)
def test_what_peers_may_send_is_parsed(name: str) -> None:
    counted, message = ALLOWED[name]
    assert counted.parse(message.SerializeToString()) == message


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def Session(self, requests: Any, context: Any) -> AsyncIterator[worker_pb2.SessionResponse]:
        async for _ in requests:
            yield worker_pb2.SessionResponse()


async def test_a_server_ends_the_call() -> None:
    server = GrpcServer(token=CLUSTER_TOKEN)
    server.add("baton.v1.WorkerService", worker_pb2_grpc.add_WorkerServiceServicer_to_server, Worker())
    await server.start()
    async with dial(server.address) as channel:
        call: Any = channel.stream_stream("/baton.v1.WorkerService/Session")(iter([b"", HUGE["empty leases"][1]]))
        assert await call.read() == b""
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await server.stop()
