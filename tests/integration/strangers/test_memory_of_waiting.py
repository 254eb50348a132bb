"""Tests the memory of a router while requests wait for a worker: in a real process, since only its resident memory
tells.

Each request is as large as it may be and has a prompt of a few tokens. Once it is tokenised nothing is kept but those:
neither the body as it was parsed, nor the payload and the fields that nobody knows.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import grpc
import httpx2
import pytest

from tests.support.patience import Patience
from tests.support.protofuzz import tagged
from tests.support.real_cluster import Service, lone_router

pytestmark = [pytest.mark.clock, pytest.mark.long]

MIB = 1 << 20
WAITING = 12
ONE_BY_ONE = 3
"""Few at once, so that the peak while they are read does not hide what is kept."""
MAX_KEPT_MIB = 3.0
"""For each request that waits: its tokens, its connection, and its share of what the allocator does not give back. The
smallest of these requests takes 8 MiB if it is kept."""
_UNLIMITED = [("grpc.max_send_message_length", -1)]
_NUMBERS = random.Random(1)


def _json(rest: bytes) -> bytes:
    return b'{"max_tokens": 1, "prompt": "hi", ' + rest + b"}"


def _numbers() -> bytes:
    """Returns a body of about 40 MB when parsed: numbers too large to be shared."""
    return _json(b'"metadata": [' + b",".join(b"%d" % _NUMBERS.randrange(10**6, 10**9) for _ in range(1 << 20)) + b"]")


def _conversation() -> bytes:
    """Returns a body of about 17 MB when parsed: parts beyond what is known of each."""
    part = b'{"type": "text", "text": "a", "more": "%s"}' % (b"x" * 80_000)
    parts = b",".join([part] * 190)
    return b'{"max_tokens": 1, "messages": [{"role": "user", "content": [' + parts + b"]}]}"


HTTP_SHAPES: dict[str, Callable[[], bytes]] = {
    "numbers": _numbers,
    "strings": lambda: _json(b'"metadata": [' + b",".join([b'"%s"' % (b"x" * 1000)] * 15_000) + b"]"),
    "objects": lambda: _json(b'"metadata": [' + b",".join([b'{"a": "%s"}' % (b"x" * 1900)] * 8_000) + b"]"),
    "a user": lambda: _json(b",".join(b'"f%d": "%s"' % (n, b"x" * (2 * MIB - 9)) for n in range(7))),
    "parts": _conversation,
}

# Prompts that are truncated to what the model can hold. Unknown fields are so few bytes (`MessageLimits`) that resident
# memory would not tell: for those see unit/router/test_incoming.py.
_TRUNCATED = bytes([12 << 3, 1]) + tagged(7, bytes([8, 1]))
GRPC_SHAPES: dict[str, Callable[[], bytes]] = {
    "token ids": lambda: tagged(4, tagged(1, bytes([5]) * (1 << 20))) + _TRUNCATED,
    "wide token ids": lambda: tagged(4, tagged(1, bytes([0x80 | 5, 0x80, 0x80, 0x80, 0]) * (1 << 20))) + _TRUNCATED,
}


async def _all_wait(router: Service, client: httpx2.AsyncClient, num: int, tasks: list[asyncio.Task[None]]) -> None:
    """Returns when so many requests are in the queue."""
    patience = Patience(30.0)
    while True:
        text = (await client.get(f"http://127.0.0.1:{router.http_port}/metrics")).text
        queued = [line for line in text.splitlines() if line.startswith("baton_requests_live{") and '"queued"' in line]
        if queued and float(queued[0].rpartition(" ")[2]) == num:
            return
        for task in tasks:
            assert not task.done(), f"it does not wait: {task.result()}"
        assert not patience.is_over(), queued
        await asyncio.sleep(0.02)


async def _kept_mib(folder: Path, door: str, shape: Callable[[], bytes]) -> float:
    """Returns how much more memory the router has for each request that waits, in MiB."""
    data = shape()
    assert len(data) <= 16 * MIB
    flags = ("--no-worker-timeout-s", "600", "--queue-timeout-s", "600")
    async with (
        lone_router(folder, *flags) as router,
        httpx2.AsyncClient(timeout=600.0, trust_env=False, limits=httpx2.Limits(max_connections=64)) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{router.port}", options=_UNLIMITED) as channel,
    ):
        path = "/v1/chat/completions" if b'"messages"' in data[:64] else "/v1/completions"

        async def ask() -> None:
            if door == "grpc":
                await channel.unary_unary("/baton.v1.InferenceService/Generate")(data, timeout=600)
            else:
                url, headers = f"http://127.0.0.1:{router.http_port}{path}", {"content-type": "application/json"}
                answer = await client.post(url, content=data, headers=headers)
                raise AssertionError(answer.text[:500])

        tasks: list[asyncio.Task[None]] = []

        async def add(num: int) -> None:
            for _ in range(num):
                tasks.append(asyncio.create_task(ask()))
                await _all_wait(router, client, len(tasks), tasks)

        await add(ONE_BY_ONE)  # what the first ones make the router load or reserve is not theirs
        before = router.resident_mib()
        await add(WAITING)
        kept, patience = (router.resident_mib() - before) / WAITING, Patience(5.0)
        while kept > MAX_KEPT_MIB and not patience.is_over():  # what is freed is given back by a thread, a moment later
            await asyncio.sleep(0.05)
            kept = min(kept, (router.resident_mib() - before) / WAITING)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return kept


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("door", "name"), [*(("http", name) for name in HTTP_SHAPES), *(("grpc", name) for name in GRPC_SHAPES)]
)
async def test_nothing_is_kept_but_tokens(tmp_path: Path, door: str, name: str) -> None:
    kept = await _kept_mib(tmp_path, door, (GRPC_SHAPES if door == "grpc" else HTTP_SHAPES)[name])
    print(f"{door} {name}: {kept:.2f} MiB for each that waits")
    assert kept <= MAX_KEPT_MIB
