"""Tests `baton top` against a scripted router: the snapshot, the live view under textual's pilot, a router that goes
and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable

import pytest
from textual.pilot import Pilot
from textual.widgets import DataTable, Static

from baton.v1 import control_pb2
from services.cli import top_app
from services.cli.client import control
from services.cli.main import main
from services.cli.top_app import RequestScreen, TopApp
from services.cli.top_feed import MOST_REQUESTS, RouterFeed
from services.core.errors import BatonError
from tests.support.processes import PYTHON_PATH
from tests.support.scripted_control import (
    ScriptedControl,
    failed_timeline,
    live_timeline,
    serving,
    split_timeline,
    status,
    worker,
)
from tests.support.trusted import CLUSTER_TOKEN

pytestmark = pytest.mark.process

WITHIN_S = 20.0
TIMEOUT_S = 10.0
"""That of a call."""
HOSTILE = "[bold red]\x1b[2J\u202e[/]["


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    monkeypatch.setattr(top_app, "INTERVAL_S", 0.05)
    monkeypatch.setattr(top_app, "_LEAST_PAUSE_S", 0.02)


@contextlib.asynccontextmanager
async def watching(target: str, size: tuple[int, int] = (160, 40)) -> AsyncIterator[tuple[TopApp, Pilot[None]]]:
    """Runs the app on a screen of that size, as `baton top` does on a terminal."""
    with contextlib.ExitStack() as connection:
        feed = RouterFeed(connection.enter_context(control(target, "")), target, TIMEOUT_S)
        await asyncio.to_thread(feed.refresh)
        app = TopApp(feed, hang_up=connection.close)
        async with app.run_test(size=size) as pilot:
            yield app, pilot


async def until(pilot: Pilot[None], condition: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not condition():
            await pilot.pause(0.02)
    assert condition(), what


def column(app: TopApp, table: str, number: int) -> list[str]:
    widget = app.query_one(f"#{table}", DataTable)
    return [widget.get_row_at(row)[number].plain for row in range(widget.row_count)]


def shown(app: TopApp, name: str) -> str:
    return str(app.screen.query_one(f"#{name}", Static).visual)


async def run_main(*arguments: str) -> int:
    return await asyncio.to_thread(main, list(arguments))


async def test_a_snapshot_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    service = ScriptedControl()
    service.set(split_timeline(1), failed_timeline(2, "overloaded"), live_timeline(3))
    async with serving(service) as target:
        assert await run_main("top", "--target", target, "--once") == 0
        first = capsys.readouterr().out
        # No terminal, no live view.
        assert await run_main("top", "--target", target) == 0
    lines = first.splitlines()
    assert capsys.readouterr().out.splitlines()[0] == lines[0] == f"router {target}  pid 42  ready  model tiny"
    assert lines[1].startswith("requests  queued 3  prefilling 0  parked 0  decoding 1  oldest wait 1.")
    assert all(line.isprintable() for line in lines)
    words = [line.split() for line in lines if line]
    prefill = next(row for row in words if row[0] == "prefill-0")
    assert prefill[:3] == ["prefill-0", "prefill", "ready"]
    assert prefill[4:] == ["6/100", "5", "6", "41.2", "-", "-", "12", "ms"]
    assert len(prefill[3]) == 24
    assert ["prefill-0", "decode-0", "proven", "shm", "1", "4.0", "52"] in words
    assert [row[0] for row in words if row[0].startswith("req-")] == ["req-3", "req-2", "req-1"]
    assert next(row for row in words if row[0] == "req-1")[-4:] == ["0", "prefill-0", "→", "decode-0"]


def test_a_snapshot_needs_no_library_for_terminals() -> None:
    """Over a slow line, what is imported is what one waits for."""
    program = "import sys, services.cli.main, services.cli.top; sys.exit('textual' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": PYTHON_PATH}
    assert subprocess.run([sys.executable, "-c", program], env=environ, check=False).returncode == 0


async def test_a_router_that_cannot_be_reached_is_one_line_and_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    async with serving(ScriptedControl()) as target:
        pass
    assert await run_main("top", "--target", target, "--once") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"baton top: error: {target}: no Baton answers there")
    assert err.count("\n") == 1


async def test_the_live_view_follows_the_router() -> None:
    service = ScriptedControl()
    service.set(split_timeline(1))
    async with serving(service) as target, watching(target) as (app, pilot):
        assert column(app, "workers", 0) == ["prefill-0", "decode-0"]
        assert column(app, "pairs", 3) == ["shm"]
        assert column(app, "requests", 0) == ["req-1"]
        assert "queued 3" in shown(app, "heading")

        def has_a_pace() -> bool:
            for each in service.status.workers:
                each.load.num_tokens += 10**6  # a pace is shown until the next look
            return column(app, "workers", 9)[1] not in ("-", "0.0")

        await until(pilot, has_a_pace, "decode-0 has a pace")
        service.set(live_timeline(2))
        service.status = status(worker("decode-0", "decode", state="DOWN", reason="silent for 3 s"))
        await until(pilot, lambda: column(app, "requests", 0) == ["req-2", "req-1"], "the new request is first")
        await until(pilot, lambda: column(app, "workers", 2) == ["down"], "the lost worker is down")
        assert column(app, "workers", 11) == ["silent for 3 s"]
        assert service.asked_after[0] == 0
        await until(pilot, lambda: service.asked_after[-1] == 2, "only changes are asked for")
        done = split_timeline(2)
        service.set(done)
        await until(pilot, lambda: column(app, "requests", 2) == ["length", "length"], "the row has changed")
        await pilot.press("q")
        await until(pilot, lambda: app.return_code == 0, "q leaves")


async def test_requests_are_sorted_by_a_key_and_turned_by_it_again() -> None:
    service = ScriptedControl()
    service.set(*(split_timeline(number, ttft_us=ttft) for number, ttft in ((1, 90_000), (2, 70_000), (3, 80_000))))
    async with serving(service) as target, watching(target) as (app, pilot):
        await pilot.press("t")
        assert column(app, "requests", 0) == ["req-1", "req-3", "req-2"]
        assert "by ttft ▼" in shown(app, "order")
        await pilot.press("t")
        assert column(app, "requests", 0) == ["req-2", "req-3", "req-1"]
        await pilot.press("down")
        # The cursor stays with its request, wherever that goes.
        service.set(split_timeline(4, ttft_us=1_000), split_timeline(5, ttft_us=2_000))
        await until(pilot, lambda: len(column(app, "requests", 0)) == 5, "two more have come")
        assert app.query_one("#requests", DataTable).cursor_row == 3
        await pilot.press("a")
        assert column(app, "requests", 0) == [f"req-{number}" for number in (5, 4, 3, 2, 1)]


async def test_a_filter_leaves_what_has_it_in_common() -> None:
    service = ScriptedControl()
    service.set(split_timeline(1), split_timeline(2, decode_worker="Decode-7"), failed_timeline(3, "overloaded"))
    async with serving(service) as target, watching(target) as (app, pilot):
        await pilot.press("slash", *"decode-7")
        assert column(app, "requests", 0) == ["req-2"]
        assert "3 requests known, 0 live, by arrival ▼; 1 with 'decode-7'" in shown(app, "order")
        # Letters sort again once the filter is chosen, and Escape ends it.
        await pilot.press("enter", "t")
        assert "by ttft ▼; 1 with" in shown(app, "order")
        await pilot.press("escape")
        assert column(app, "requests", 0) == ["req-2", "req-1", "req-3"]
        await pilot.press("slash", *"over", "escape")
        assert len(column(app, "requests", 0)) == 3
        assert not app.query_one("#filter").display


async def test_enter_opens_the_waterfall_and_why_it_was_placed_there() -> None:
    service = ScriptedControl()
    service.set(split_timeline(1), live_timeline(2))
    for age_us, worker_id in ((2_000_000, "prefill-0"), (900_000_000, "prefill-9")):
        explained = control_pb2.ExplainedRequest(request_id="req-1", model="tiny", age_us=age_us)
        choice = explained.choices.add(phase=control_pb2.PLACED_PHASE_PREFILL, leg=1, attempt=1, outcome="done")
        choice.candidates.add(worker_id=worker_id, score=1.5)
        choice.verdict.decider = control_pb2.DECIDER_ONLY
        service.explained.append(explained)
    async with serving(service) as target, watching(target) as (app, pilot):
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, RequestScreen), "the request is open")
        await until(pilot, lambda: "it was the only candidate" in shown(app, "request"), "its placement is explained")
        text = shown(app, "request")
        assert text.startswith("req-1  tiny  length  1536 prompt tokens")
        assert "kv.transfer" in text
        assert "prefill on prefill-0" in text
        assert "prefill-9" not in text, "an older request with the same id is another one"
        await pilot.press("escape")
        await until(pilot, lambda: not isinstance(app.screen, RequestScreen), "back in the list")
        # What lives is followed; nothing is known of why it waits.
        await pilot.press("up", "enter")
        await until(pilot, lambda: isinstance(app.screen, RequestScreen), "the other is open")
        assert shown(app, "request").startswith("req-2  tiny  queued")
        service.set(split_timeline(2))
        await until(pilot, lambda: shown(app, "request").startswith("req-2  tiny  length"), "it has ended")


async def test_a_router_goes_and_comes_back() -> None:
    before, after = ScriptedControl(incarnation=7), ScriptedControl(incarnation=8)
    before.set(split_timeline(1), split_timeline(2), split_timeline(3))
    after.set(live_timeline(1))
    async with contextlib.AsyncExitStack() as first:
        target = await first.enter_async_context(serving(before))
        async with watching(target) as (app, pilot):
            assert not app.query_one("#trouble").display
            await first.aclose()
            await until(pilot, lambda: bool(app.query_one("#trouble").display), "its silence is told")
            assert f"{target}: " in shown(app, "trouble")
            assert column(app, "requests", 0) == ["req-3", "req-2", "req-1"], "what was heard stays"
            async with serving(after, int(target.rpartition(":")[2])):
                await until(pilot, lambda: not app.query_one("#trouble").display, "it is back")
                assert column(app, "requests", 2) == ["queued"], "another process counts its requests anew"
                assert after.asked_after[:2] == [3, 0]


async def test_an_opened_request_is_no_other_of_a_router_that_counts_anew() -> None:
    before, after = ScriptedControl(incarnation=7), ScriptedControl(incarnation=8)
    before.set(split_timeline(1))
    other = split_timeline(1)
    other.request_id = "another"
    after.set(other)
    async with contextlib.AsyncExitStack() as first:
        target = await first.enter_async_context(serving(before))
        async with watching(target) as (app, pilot):
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.screen, RequestScreen), "it is open")
            await first.aclose()
            async with serving(after, int(target.rpartition(":")[2])):
                await until(pilot, lambda: app._feed.request(1).timeline["request_id"] == "another", "it is back")
                app._show()
                assert shown(app, "request").startswith("req-1 ")


async def test_hostile_names_are_shown_as_text() -> None:
    service = ScriptedControl()
    service.status = status(worker(HOSTILE, "decode", reason=HOSTILE))
    service.status.models[0].model_id = service.status.pairs[0].prefill = HOSTILE
    timeline = split_timeline(1, failure=HOSTILE)
    timeline.request_id = timeline.outcome = timeline.prefill_worker = HOSTILE
    service.set(timeline)
    escaped = r"[bold red]\x1b[2J\u202e[/]["
    async with serving(service) as target, watching(target) as (app, pilot):
        assert column(app, "workers", 0) == column(app, "requests", 0) == column(app, "pairs", 0) == [escaped]
        assert escaped in shown(app, "heading")
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, RequestScreen), "the request is open")
        await until(pilot, lambda: escaped in shown(app, "request"), "its name is text")
        assert "\x1b" not in shown(app, "request")


async def test_many_workers_and_requests_on_a_small_screen() -> None:
    service = ScriptedControl()
    service.status = status(*(worker(f"decode-{number}", "decode") for number in range(64)))
    service.set(*(split_timeline(number) for number in range(1, MOST_REQUESTS + 200)))
    async with serving(service) as target, watching(target, (80, 24)) as (app, pilot):
        assert len(column(app, "workers", 0)) == 64
        assert column(app, "requests", 0)[0] == f"req-{MOST_REQUESTS + 199}"
        assert app.query_one("#requests").size.height >= 5
        service.set(*(split_timeline(number) for number in range(2000, 2100)))
        await until(pilot, lambda: column(app, "requests", 0)[0] == "req-2099", "the newest are first")
        assert f"{MOST_REQUESTS} requests known" in shown(app, "order")


async def test_a_call_that_hangs_does_not_keep_q_waiting() -> None:
    service = ScriptedControl()
    async with serving(service) as target:
        async with watching(target) as (app, pilot):
            service.answers.clear()
            async with asyncio.timeout(WITHIN_S):
                await service.waiting.wait()
            begun_s = time.monotonic()
            await pilot.press("q")
            await until(pilot, lambda: app.return_code == 0, "q leaves")
        await asyncio.get_running_loop().shutdown_default_executor()  # as the end of a program does
        assert time.monotonic() - begun_s < TIMEOUT_S / 2


async def test_a_feed_keeps_the_live_of_many() -> None:
    service = ScriptedControl()
    service.set(live_timeline(1), *(split_timeline(number) for number in range(2, MOST_REQUESTS)))
    async with serving(service) as target:
        with control(target, "") as call:
            feed = RouterFeed(call, target, 5.0)
            await asyncio.to_thread(feed.refresh)
            service.set(*(split_timeline(number) for number in range(2000, 2100)))
            await asyncio.to_thread(feed.refresh)
            assert len(feed.requests) == MOST_REQUESTS
            assert feed.request(1) is not None
            assert feed.request(2) is None
    with pytest.raises(BatonError, match="no Baton answers there"):
        with control(target, "") as call:
            RouterFeed(call, target, 5.0).refresh()
