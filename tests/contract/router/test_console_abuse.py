"""Tests what those who look, or only connect, can do to the console and to the router."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from services.router.console import feed
from tests.support.cluster import read, request
from tests.support.console_client import client, looks_counted, running, until, viewing
from tests.support.patience import HANG_S

FACE = chr(0x1F600)


async def test_text_of_many_requests_blinds_nobody(model: str) -> None:
    """Requests that are refused are enough: their prompts are kept where prompts are logged."""
    async with running(model, log_prompts=True) as cluster, client(cluster) as http:
        await cluster.add("prefill")
        await cluster.add("decode")
        for _ in range(feed.MOST_FIRST_REQUESTS + 20):
            refused = request(FACE * 3000)
            refused.stopping.max_tokens = 1 << 30
            with pytest.raises(grpc.aio.AioRpcError):
                await read(cluster.inference.GenerateStream(refused))
        async with viewing(http) as events:
            assert (await until(events, "state"))["ready"]
            rows = (await until(events, "requests"))["requests"]
            assert len(rows) == feed.MOST_FIRST_REQUESTS
            assert not any(each["prompt"] for each in rows), "the text of one is asked for by its number"
        detail = (await http.get(f"/console/requests/{rows[-1]['number']}")).json()
        assert FACE in detail["row"]["prompt"]


async def test_whoever_comes_and_goes_is_given_what_was_made_for_others(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = looks_counted(monkeypatch)
    monkeypatch.setattr(feed, "EVERY_S", 30.0)
    async with running(model) as cluster, client(cluster) as http:
        for _ in range(20):
            async with viewing(http) as events:
                await until(events, "state")
        assert made() == 1


async def test_who_joins_between_two_ticks_misses_nothing(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.2)
    async with running(model) as cluster, client(cluster) as http:
        await cluster.add("prefill")
        await cluster.add("decode")
        async with viewing(http) as first:
            await until(first, "state")
            for number in range(10):
                await read(cluster.inference.GenerateStream(request(request_id=f"r{number}")))
                async with viewing(http) as late:
                    await until(late, "requests", lambda data, name=f"r{number}": _has(data, name))


def _has(data: dict[str, Any], request_id: str) -> bool:
    return any(each["id"] == request_id for each in data["requests"])


async def test_nobody_is_taken_in_once_it_has_closed(model: str) -> None:
    async with running(model) as cluster, client(cluster) as http:
        console = cluster.router._console
        assert console is not None
        await console.close()
        assert (await http.get("/console/events")).status_code == 503
        assert [each async for each in console.feed.events()] == []
        assert console.feed.num_viewers == 0


async def test_of_a_viewer_that_does_not_read_nothing_is_kept(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.01)
    monkeypatch.setattr(feed, "_MOST_WAITING_BYTES", 20_000)
    async with running(model) as cluster:
        console = cluster.router._console
        assert console is not None
        events = console.feed.events()
        await anext(events)
        (viewer,) = console.feed._viewers
        async with asyncio.timeout(HANG_S):
            while not viewer.is_over:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not viewer.waiting
        assert [each async for each in events] == []


@pytest.mark.parametrize("origin", [b"http://[", b"http://[::1", b"http://[x]", b"\xff\xfe", b"//", b"null"])
async def test_an_origin_that_is_none_is_refused(model: str, origin: bytes) -> None:
    async with running(model) as cluster, client(cluster) as http:
        for path in ("/console/events", "/console/requests/1"):
            assert (await http.get(path, headers=[(b"origin", origin)])).status_code == 403
        assert (await http.post("/console/login", headers=[(b"origin", origin)])).status_code == 403


@pytest.mark.parametrize("number", ["9" * 4301, "9" * 19, "-1", "1.0", "%D9%A1", "1e3", "0x1", "+1"])
async def test_a_number_that_is_none_is_not_found(model: str, number: str) -> None:
    async with running(model) as cluster, client(cluster) as http:
        for path in (f"/console/requests/{number}", f"/console/requests/{number}/otlp"):
            assert (await http.get(path)).status_code == 404
