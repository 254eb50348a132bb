"""Tests the memory of a router that is sent large requests: in a real process, since only its resident memory tells.

Each shape is as many bytes as a request may have, and none can be served. Eight at once must not add half a gigabyte to
the peak, and two hundred one after the other leave nothing behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx2
import pytest

from baton.v1 import inference_pb2
from tests.support.protofuzz import tagged
from tests.support.real_cluster import Service, lone_router

pytestmark = [pytest.mark.clock, pytest.mark.long]

MIB = 1 << 20
SIZE = 16 * MIB - 1024
AT_ONCE = 8
ONE_BY_ONE = 200
MAX_PEAK_MIB = 500
MAX_LEFT_MIB = 100
_UNLIMITED = [("grpc.max_send_message_length", -1)]
GENERATE = "/baton.v1.InferenceService/Generate"
OTHER_METHODS = (
    "/baton.v1.InferenceService/ListModels",
    "/grpc.health.v1.Health/Check",
    "/grpc.health.v1.Health/Watch",
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
)
"""All that anyone may call, but for prompts."""


def _long_role() -> bytes:
    return inference_pb2.GenerateRequest(
        messages=inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="x" * SIZE)])
    ).SerializeToString()


GRPC_SHAPES: dict[str, Callable[[], bytes]] = {
    "empty messages": lambda: tagged(5, tagged(1, b"") * (SIZE // 2)),
    "a message": lambda: tagged(5, tagged(1, tagged(1, b"user") + tagged(2, b"x" * SIZE))),
    "a role": _long_role,
    "unknown fields": lambda: tagged(3, b"hi") + tagged(200, b"") * (SIZE // 3),
    "an unknown field": lambda: tagged(3, b"hi") + tagged(200, b"x" * SIZE),
    "unknown fields in a group of known ones": lambda: tagged(3, b"hi") + tagged(7, tagged(200, b"x") * (SIZE // 4)),
    "token ids": lambda: tagged(4, tagged(1, bytes([5]) * SIZE)),
    "token ids, one by one": lambda: tagged(4, bytes([8, 5]) * (SIZE // 2)),
    "token ids, to be truncated": lambda: tagged(4, tagged(1, bytes([5]) * SIZE)) + bytes([12 << 3, 1]),
    "a text": lambda: tagged(3, b"the baton " * (SIZE // 10)),
    "a text, to be truncated": lambda: tagged(3, b"the baton " * (SIZE // 10)) + bytes([12 << 3, 1]),
    "biases": lambda: tagged(3, b"hi") + tagged(6, tagged(8, b"") * (SIZE // 2)),
    "stop strings": lambda: tagged(3, b"hi") + tagged(7, tagged(3, b"") * (SIZE // 2)),
    "no message": lambda: b"\xff" * SIZE,
}


OTHER_SHAPES: dict[str, Callable[[], bytes]] = {
    "a long name": lambda: tagged(1, b"x" * SIZE),
    "unknown fields": lambda: tagged(200, b"") * (SIZE // 3),
    "an unknown field": lambda: tagged(200, b"x" * SIZE),
    "no message": lambda: b"\xff" * SIZE,
}


def _json(prompt: bytes) -> bytes:
    return b'{"max_tokens": 1, "prompt": ' + prompt + b"}"


HTTP_SHAPES: dict[str, Callable[[], bytes]] = {
    "objects": lambda: _json(b"[" + b"{}," * (SIZE // 3 - 30) + b"{}]"),
    "objects as messages": lambda: b'{"messages": [' + b"{}," * (SIZE // 3 - 30) + b"{}]}",
    "lists": lambda: _json(b"[" + b"[]," * (SIZE // 3 - 30) + b"[]]"),
    "nested": lambda: _json(b"[" * (SIZE // 2) + b"]" * (SIZE // 2)),
    "nested and open": lambda: _json(b'{"a":' * (SIZE // 5)),
    "token ids": lambda: _json(b"[" + b"5," * (SIZE // 2 - 30) + b"5]"),
    "strings": lambda: _json(b"[" + b'"ab",' * (SIZE // 5 - 30) + b'"ab"]'),
    "keys": lambda: b"{" + b",".join(b'"%07d":0' % index for index in range(SIZE // 12)) + b"}",
    "a text": lambda: _json(b'"' + b"the baton " * (SIZE // 10 - 10) + b'"'),
    "a text of escapes": lambda: _json(b'"' + b"\\u00e9" * (SIZE // 6 - 20) + b'"'),
    "a text of line ends": lambda: _json(b'"' + b"\\n" * (SIZE // 2 - 40) + b'"'),
    "a text that does not end": lambda: _json(b'"' + b"\\" * (SIZE - 100)),
    "no JSON": lambda: b"\xff" * SIZE,
}


async def refused_over_grpc(router: Service, data: bytes, times: int, at_once: int, method: str = GENERATE) -> None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", options=_UNLIMITED) as channel:
        call = channel.unary_unary(method)

        async def one() -> None:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(data, timeout=120)
            wanted = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert refused.value.code() in wanted, refused.value

        for _ in range(times // at_once):
            await asyncio.gather(*(one() for _ in range(at_once)))


async def refused_over_http(router: Service, data: bytes, times: int, at_once: int) -> None:
    path = "/v1/chat/completions" if data.startswith(b'{"messages"') else "/v1/completions"
    url = f"http://127.0.0.1:{router.http_port}{path}"
    async with httpx2.AsyncClient(timeout=120.0, trust_env=False) as client:

        async def one() -> None:
            answer = await client.post(url, content=data, headers={"content-type": "application/json"})
            assert answer.status_code in (400, 413, 429), answer.text

        for _ in range(times // at_once):
            await asyncio.gather(*(one() for _ in range(at_once)))


DOORS = [
    *(("grpc", name) for name in GRPC_SHAPES),
    *(("http", name) for name in HTTP_SHAPES),
]


@pytest.mark.timeout(600)
async def test_eight_at_once_of_any_shape(tmp_path: Path) -> None:
    grown = {}
    async with lone_router(tmp_path) as router:
        for door, name in DOORS:
            data = (GRPC_SHAPES if door == "grpc" else HTTP_SHAPES)[name]()
            assert SIZE - 4096 <= len(data) <= 16 * MIB, len(data)
            before = router.resident_mib()
            router.forget_peak()
            await (refused_over_grpc if door == "grpc" else refused_over_http)(router, data, AT_ONCE, AT_ONCE)
            grown[door, name] = router.peak_mib() - before
            print(f"{door} {name}: {before:.0f} MiB, peak +{grown[door, name]:.0f}")
    too_much = {what: round(mib) for what, mib in grown.items() if mib > MAX_PEAK_MIB}
    assert not too_much


@pytest.mark.timeout(600)
@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_two_hundred_leave_nothing_behind(tmp_path: Path, door: str) -> None:
    shapes = GRPC_SHAPES if door == "grpc" else HTTP_SHAPES
    refused = refused_over_grpc if door == "grpc" else refused_over_http
    async with lone_router(tmp_path) as router:
        before = router.resident_mib()
        share = -(-ONE_BY_ONE // len(shapes))
        for name, shape in shapes.items():
            await refused(router, shape(), share, 1)
            print(f"{door} {name}: {router.resident_mib() - before:+.0f} MiB")
        # What was freed is given back by a thread, a moment later.
        async with asyncio.timeout(5):
            while router.resident_mib() - before > MAX_LEFT_MIB:  # noqa: ASYNC110  # only looking tells
                await asyncio.sleep(0.05)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", OTHER_METHODS)
async def test_calls_without_prompts_leave_nothing_behind_either(tmp_path: Path, method: str) -> None:
    async with lone_router(tmp_path) as router:
        before = router.resident_mib()
        for name, shape in OTHER_SHAPES.items():
            data = shape()
            router.forget_peak()
            await refused_over_grpc(router, data, AT_ONCE, AT_ONCE, method)
            peak = router.peak_mib() - before
            await refused_over_grpc(router, data, ONE_BY_ONE // len(OTHER_SHAPES), 1, method)
            print(f"{method} {name}: peak +{peak:.0f} MiB, left {router.resident_mib() - before:+.0f} MiB")
            assert peak <= MAX_PEAK_MIB
        async with asyncio.timeout(5):
            while router.resident_mib() - before > MAX_LEFT_MIB:  # noqa: ASYNC110  # only looking tells
                await asyncio.sleep(0.05)
