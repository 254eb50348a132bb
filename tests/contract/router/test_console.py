"""Tests the console's routes over real HTTP: what viewers are told, who may look, and what pages of others may not."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path
from typing import Any

import httpx2
import pytest

from baton.v1 import control_pb2
from services.router.config import RouterConfig
from services.router.console import feed
from services.router.console.routes import COOKIE, POLICY
from services.rpc.plain import plain
from tests.support.certificates import written
from tests.support.cluster import read, request
from tests.support.console_client import client, looks_counted, running, until, viewing
from tests.support.patience import HANG_S
from tests.support.scripted_worker import TEXT

PAGE = "/console/waterfall.js"
KINDS = ("split", "unsplit")


async def test_a_viewer_is_told_of_all_that_is_there_and_then_of_what_changes(model: str) -> None:
    async with running(model) as cluster, client(cluster) as http:
        await cluster.add("prefill", worker_id="p")
        await cluster.add("decode", worker_id="d")
        assert (await read(cluster.inference.GenerateStream(request(request_id="early"))))[1] == TEXT
        async with viewing(http) as events:
            hello = await until(events, "hello")
            assert hello["router"]["grpc"] == cluster.router.address
            assert (hello["router"]["control"], hello["router"]["tls"]) == (cluster.router.control_address, False)
            assert hello["objectives"]["tpot_ms"] > 0
            state = await until(events, "state")
            assert state["ready"]
            workers = {each["id"]: each for each in state["workers"]}
            assert workers.keys() == {"p", "d"}
            assert workers["p"]["roles"] == ["prefill"]
            assert workers["d"]["state"] == "ready"
            assert sum(workers["d"]["blocks"].values()) > 0
            assert [(each["prefill"], each["decode"]) for each in state["pairs"]] == [("p", "d")]
            (model,) = state["models"]
            assert (model["ready"], model["queued"]) == (True, 0)
            (row,) = (await until(events, "requests"))["requests"]
            assert (row["id"], row["phase"], row["outcome"]) == ("early", "ended", "stop")
            assert (row["prefill_worker"], row["decode_worker"]) == ("p", "d")
            assert 0 < row["ttft_ms"] <= row["total_ms"]

            await read(cluster.inference.GenerateStream(request(request_id="late")))
            rows = (await until(events, "requests"))["requests"]
            assert [each["id"] for each in rows] == ["late"], "what has not changed is not told again"
            await cluster.scripted[1].stop()
            state = await until(events, "state", lambda data: any(each["id"] == "d" for each in data["workers"]))
            gone = next(each for each in state["workers"] if each["id"] == "d")
            assert gone["state"] != "ready"


async def test_it_says_what_the_control_port_says(model: str) -> None:
    async with running(model) as cluster, client(cluster) as http:
        await cluster.add("prefill", worker_id="p")
        await cluster.add("decode", worker_id="d")
        await read(cluster.inference.GenerateStream(request()))
        async with viewing(http) as events:
            state = await until(events, "state")
        told = plain(await cluster.control.GetStatus(control_pb2.GetStatusRequest()))
        assert state["ready"] == told["ready"]
        assert state["phases"] == {name: told[f"num_{name}"] for name in state["phases"]}
        for row, status in zip(state["workers"], told["workers"], strict=True):
            assert (row["id"], row["state"]) == (status["worker"]["worker_id"], status["state"])
            assert (row["reason"], row["requests"]) == (status["reason"], status["num_requests"])
        for row, status in zip(state["pairs"], told["pairs"], strict=True):
            assert {name: row[name] for name in ("prefill", "decode", "state", "reason")} == {
                name: status[name] for name in ("prefill", "decode", "state", "reason")
            }
        for row, status in zip(state["models"], told["models"], strict=True):
            assert (row["id"], row["ready"], row["queued"]) == (
                status["model_id"],
                status["ready"],
                status["num_queued"],
            )
            assert (row["live"], row["workers"]) == (status["num_live"], status["num_workers"])
            assert (row["policy"], row["context_tokens"]) == (status["policy"], status["context_tokens"])


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("mixed",)])
async def test_who_looks_later_is_told_of_the_times_between_tokens_before(
    model: str, monkeypatch: pytest.MonkeyPatch, roles: tuple[str, ...]
) -> None:
    monkeypatch.setattr(feed, "ITL_EVERY_S", 0.05)
    async with running(model) as cluster, client(cluster) as http:
        for role in roles:
            await cluster.add(role)

        async def told() -> list[int]:
            async with viewing(http) as events:
                before = (await until(events, "hello"))["itl_before"]
            assert all(
                len(each["itl"][kind]) == len(each["itl"]["buckets_ms"]) + 1 for each in before for kind in KINDS
            )
            assert [each["at"] for each in before] == sorted(each["at"] for each in before)
            return [sum(sum(each["itl"][kind]) for each in before) for kind in KINDS]

        assert await told() == [0, 0]
        responses, _ = await read(cluster.inference.GenerateStream(request()))
        num_tokens = sum(len(each.chunk.token_ids) for each in responses)
        assert num_tokens > 1
        expected = [num_tokens - 1, 0] if len(roles) > 1 else [0, num_tokens - 1]
        assert await told() == expected, "also what has not been noted yet"
        await asyncio.sleep(0.2)
        assert await told() == expected


async def test_a_workers_pace_counts_steps_that_are_in_no_average(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with too little to compute with, all of them may be."""
    monkeypatch.setattr(feed, "EVERY_S", 0.05)
    async with running(model) as cluster, client(cluster) as http:
        worker = await cluster.add("decode", worker_id="d")

        def pace(state: dict[str, Any]) -> float:
            return sum(each["tokens_per_s"] or 0.0 for each in state["workers"])

        async with viewing(http) as events:
            assert pace(await until(events, "state")) == 0.0
            worker.num_tokens = 1_000_000
            await until(events, "state", lambda state: pace(state) > 10_000)


async def test_of_many_that_end_at_once_each_end_is_told(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those would stay live on the page for ever."""
    monkeypatch.setattr(feed, "EVERY_S", 0.05)
    monkeypatch.setattr(feed, "MOST_REQUESTS", 5)
    async with running(model) as cluster, client(cluster) as http:
        await cluster.add("prefill")
        calls = [cluster.inference.GenerateStream(request(request_id=f"r{number}")) for number in range(20)]

        async def queued() -> bool:
            return cluster.router.coordinator.num_live == len(calls)

        await cluster.until(queued)
        async with viewing(http) as events:
            rows = {each["id"]: each for each in (await until(events, "requests"))["requests"]}
            assert {each["phase"] for each in rows.values()} <= {"queued", "prefilling", "parked"}
            assert len(rows) == len(calls)
            for call in calls:
                call.cancel()
            async with asyncio.timeout(HANG_S):
                while not all(each["phase"] == "ended" for each in rows.values()):
                    rows |= {each["id"]: each for each in (await until(events, "requests"))["requests"]}


async def test_nothing_is_looked_at_while_nobody_looks(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looked = looks_counted(monkeypatch)
    monkeypatch.setattr(feed, "EVERY_S", 0.05)
    async with running(model) as cluster, client(cluster) as http:
        console = cluster.router._console
        assert console is not None
        async with viewing(http) as first, viewing(http) as second:
            await until(first, "state")
            await until(second, "state")
            assert console.feed.num_viewers == 2
            before = looked()
            for _ in range(4):
                await until(first, "state")
                await until(second, "state")
            assert looked() - before <= 6, "once for all viewers"

        async def nobody() -> bool:
            return console.feed.num_viewers == 0

        await cluster.until(nobody)
        before = looked()
        await asyncio.sleep(0.3)
        assert looked() == before


async def test_a_viewer_that_does_not_read_is_let_go(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "EVERY_S", 0.01)
    monkeypatch.setattr(feed, "_MOST_WAITING_BYTES", 20_000)
    async with running(model) as cluster:
        console = cluster.router._console
        assert console is not None
        events = console.feed.events()
        await anext(events)
        async with asyncio.timeout(HANG_S):
            while not next(iter(console.feed._viewers)).is_over:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            assert [each async for each in events] == []
        assert console.feed.num_viewers == 0


async def test_one_request_with_its_bars_and_placements_and_as_otlp(model: str) -> None:
    async with running(model) as cluster, client(cluster) as http:
        await cluster.add("prefill", worker_id="p")
        await cluster.add("decode", worker_id="d")
        await read(cluster.inference.GenerateStream(request(request_id="r")))
        await read(cluster.inference.GenerateStream(request(request_id="r")))
        first = (await http.get("/console/requests/1")).json()
        assert first["row"]["id"] == "r"
        root, *bars = first["bars"]
        assert (root["name"], root["depth"], root["start_ms"]) == ("baton.request", 0, 0.0)
        assert {"tokenize", "queue", "prefill", "decode"} <= {bar["name"] for bar in bars}
        for bar in bars:
            assert -1 <= bar["start_ms"] <= bar["end_ms"] <= root["end_ms"] + 50
        assert [each["phase"] for each in first["placements"]] == ["prefill", "decode"]
        second = (await http.get("/console/requests/2")).json()
        legs = [each["leg"] for each in first["placements"]]
        assert [each["leg"] for each in second["placements"]] != legs, "an id may be used again"
        answer = await http.get("/console/requests/1/otlp")
        assert "attachment" in answer.headers["content-disposition"]
        (resource,) = answer.json()["resourceSpans"]
        (scope,) = resource["scopeSpans"]
        ids = {span["spanId"] for span in scope["spans"]}
        assert len(ids) == len(scope["spans"]) > 4
        assert len({span["traceId"] for span in scope["spans"]}) == 1
        assert sum("parentSpanId" not in span for span in scope["spans"]) == 1
        assert {span["parentSpanId"] for span in scope["spans"] if "parentSpanId" in span} <= ids
        assert (await http.get("/console/requests/99")).status_code == 404


async def test_the_page_says_what_it_may_load(model: str) -> None:
    async with running(model) as cluster, client(cluster) as http:
        for path in ("/", PAGE, "/console/nothing", "/console/requests/1"):
            answer = await http.get(path)
            assert answer.headers["content-security-policy"] == POLICY
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert "<title>Baton" in (await http.get("/")).text
        answer = await http.get(PAGE)
        assert answer.headers["content-type"].startswith("text/javascript")
        again = await http.get(PAGE, headers={"if-none-match": answer.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        for path in ("/console/../config.py", "/console/%2e%2e/routes.py", "/console//etc/passwd", "/console/"):
            assert (await http.get(path)).status_code == 404


async def test_pages_of_others_may_not_read_it(model: str) -> None:
    async with running(model, http_cors_origin=("https://app.example",)) as cluster, client(cluster) as http:
        for headers in ({"origin": "https://app.example"}, {"sec-fetch-site": "cross-site"}, {"origin": "null"}):
            for path in ("/console/events", "/console/requests/1"):
                assert (await http.get(path, headers=headers)).status_code == 403
        own = {"origin": f"http://127.0.0.1:{cluster.router.http_port}", "sec-fetch-site": "same-origin"}
        assert (await http.get("/console/requests/1", headers=own)).status_code == 404


async def test_with_a_token_one_logs_in(model: str, tmp_path: Path) -> None:
    file = tmp_path / "console-token"
    async with running(model, console_token_file=str(file)) as cluster, client(cluster) as http:
        token = file.read_text().strip()
        assert file.stat().st_mode & 0o077 == 0
        assert "password" in (await http.get("/")).text
        for path in ("/console/events", "/console/requests/1", "/console/requests/1/otlp"):
            assert (await http.get(path)).status_code == 401
        for wrong in ("", "no", token[:-1], token + "x", "\x00é"):
            answer = await http.post("/console/login", data={"token": wrong})
            assert (answer.status_code, answer.headers["location"]) == (303, "/?refused")
            assert "set-cookie" not in answer.headers
        huge = await http.post("/console/login", data={"token": "x" * 100_000})
        assert huge.headers["location"] == "/?refused"
        stranger = {"origin": "https://evil.example"}
        assert (await http.post("/console/login", data={"token": token}, headers=stranger)).status_code == 403
        answer = await http.post("/console/login", data={"token": token})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        cookie = answer.headers["set-cookie"]
        assert token not in cookie
        assert "HttpOnly" in cookie
        assert "samesite=strict" in cookie.lower()
        assert "secure" not in cookie.lower(), "it would not come back without TLS"
        assert (await http.get("/console/requests/1")).status_code == 404, "logged in; there is no such request"
    async with running(model, console_token_file=str(file)) as cluster, client(cluster) as http:
        assert file.read_text().strip() == token
        for wrong in (token, cookie.split(";")[0].partition("=")[2]):
            answer = await http.get("/console/requests/1", headers={"cookie": f"{COOKIE}={wrong}"})
            assert answer.status_code == 401, "another start is another login"


async def test_a_login_inside_tls_is_not_sent_outside_it(model: str, tmp_path: Path) -> None:
    tls, file = written(tmp_path / "tls"), tmp_path / "console-token"
    shown = {"public_tls_cert": str(tls / "router.pem"), "public_tls_key": str(tls / "router.key")}
    async with running(model, console_token_file=str(file), **shown) as cluster:
        base, trusted = (
            f"https://127.0.0.1:{cluster.router.http_port}",
            ssl.create_default_context(cafile=tls / "ca.pem"),
        )
        async with httpx2.AsyncClient(base_url=base, verify=trusted, timeout=20.0, trust_env=False) as http:
            answer = await http.post("/console/login", data={"token": file.read_text().strip()})
    assert "secure" in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    ("flags", "served"),
    [({}, True), ({"console": False}, False), ({"host": "0.0.0.0"}, False)],
)
async def test_where_there_is_a_console(model: str, flags: dict[str, Any], served: bool) -> None:
    async with running(model, **flags) as cluster, client(cluster) as http:
        assert ((await http.get(PAGE)).status_code == 200) is served
        assert (await http.get("/health/live")).status_code == 200


async def test_with_a_token_it_is_served_on_any_address(model: str, tmp_path: Path) -> None:
    async with (
        running(model, host="0.0.0.0", console_token_file=str(tmp_path / "t")) as cluster,
        client(cluster) as http,
    ):
        assert (await http.get(PAGE)).status_code == 200
        assert (await http.get("/console/events")).status_code == 401


def test_flags() -> None:
    assert RouterConfig().console
    assert RouterConfig().console_token_file == ""
