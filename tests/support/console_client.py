"""Looks at the console of a router over scripted workers, as a page does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest

from services.router.console import feed
from tests.support.cluster import CONFIG, Cluster
from tests.support.patience import HANG_S

Events = AsyncIterator[tuple[str, dict[str, Any]]]


@contextlib.asynccontextmanager
async def running(model: str, **flags: Any) -> AsyncIterator[Cluster]:
    cluster = Cluster(dataclasses.replace(CONFIG, model=model, http_port=0, **flags))
    await cluster.start()
    try:
        yield cluster
    finally:
        async with asyncio.timeout(HANG_S):
            await cluster.stop()


def client(cluster: Cluster, **options: Any) -> httpx2.AsyncClient:
    base = f"http://127.0.0.1:{cluster.router.http_port}"
    return httpx2.AsyncClient(base_url=base, timeout=20.0, trust_env=False, **options)


@contextlib.asynccontextmanager
async def viewing(http: httpx2.AsyncClient) -> AsyncIterator[Events]:
    async with http.stream("GET", "/console/events") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        yield _events(answer.aiter_lines())


async def _events(lines: AsyncIterator[str]) -> Events:
    name = ""
    async for line in lines:
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


async def until(events: Events, wanted: str, holds: Any = lambda data: True) -> dict[str, Any]:
    async with asyncio.timeout(HANG_S):
        async for name, data in events:
            if name == wanted and holds(data):
                return data
    raise AssertionError(f"no such {wanted}")


def looks_counted(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Returns a function that says how often feeds have looked at their routers from now on."""
    looked, look = 0, feed.ConsoleFeed._look

    def counted(*arguments: Any) -> Any:
        nonlocal looked
        looked += 1
        return look(*arguments)

    monkeypatch.setattr(feed.ConsoleFeed, "_look", counted)
    return lambda: looked
