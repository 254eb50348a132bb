"""Tests the console's views in a browser, over a feed that says what the test wants."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest

from tests.support.console_feed import HOSTILE, ConsoleFeed, bars, placement, row, stage, worker
from tests.support.console_page import VIEWS, looking

pytestmark = pytest.mark.asyncio(loop_scope="package")

LIVE = {"ttft_ms": None, "total_ms": None, "tpot_ms": None, "longest_itl_ms": None, "outcome": "", "timings": {}}

# All text, and all attributes that are shown or read out.
_TOLD = """[document.title, ...[...document.querySelectorAll("*")].flatMap((each) => [
    ...[...each.childNodes].filter((node) => node.nodeType === Node.TEXT_NODE).map((node) => node.data),
    ...["title", "aria-label", "alt", "placeholder", "label"].map((name) => each.getAttribute(name) ?? ""),
])].join("\\n")"""


def fill(feed: ConsoleFeed, name: str = "prefill-1") -> None:
    """Gives every view something of each kind to show."""
    feed.workers += [
        worker(name, state="down", reason=f"{name} is silent"),
        worker("decode-1", "decode", state="ejected"),
        worker("mixed-0", "mixed", state="draining"),
    ]
    for decode, state in (("decode-0", "broken"), ("decode-1", "unproven")):
        feed.pairs.append(
            {
                "prefill": name,
                "decode": decode,
                "state": state,
                "reason": f"{name} fails",
                "transport": None,
                "handoff_ms": None,
            }
        )
    feed.rows += [
        row(2, id=name, prefill_worker="decode-0", ttft_ms=430.0),
        row(3, phase="queued", prefill_worker="", decode_worker="", output_tokens=0, **LIVE),
        row(4, phase="binding", output_tokens=0, **LIVE),
        row(5, outcome="cancelled", failure=f"{name} went away", retries=2, prompt=name, output=name),
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
async def test_nothing_keeps_people_out(browser: Any, feed: ConsoleFeed, view: str, scheme: str) -> None:
    fill(feed)
    async with looking(browser, feed.url, scheme=scheme) as console:
        await console.show(view)
        assert await console.barriers() == []
        await console.keep(f"{view}-{scheme}")


@pytest.mark.parametrize("view", [*VIEWS, "requests/5"])
async def test_a_phone_shows_it_all_without_scrolling_sideways(browser: Any, feed: ConsoleFeed, view: str) -> None:
    fill(feed, HOSTILE)
    async with looking(browser, feed.url, width=360) as console:
        await console.show(view)
        assert await console.width_to_scroll() == 0
        await console.keep(f"{view}-phone")


@pytest.mark.parametrize("view", [*VIEWS, "requests/5"])
async def test_hostile_names_are_text(browser: Any, feed: ConsoleFeed, view: str) -> None:
    fill(feed, HOSTILE)
    feed.hello["log_prompts"] = True
    feed.models[0] |= {"id": HOSTILE, "policy": HOSTILE}
    feed.rows[0] |= {"id": HOSTILE, "prompt": HOSTILE, "output": HOSTILE, "failure": HOSTILE, "trace_id": HOSTILE}
    feed.details[1] = {"placements": [placement(HOSTILE, HOSTILE)]}
    async with looking(browser, feed.url) as console:
        await console.show(view)
        # What is seen and what is heard, labels and titles included: nothing is there unescaped.
        told = await console.page.evaluate(_TOLD)
        assert not {each for each in told if each < " " and each not in "\n\t"} | ({"\u202e", "\u2066"} & set(told))
        assert await console.page.evaluate("window.hacked") is None
        assert await console.page.locator("main script, main img").count() == 0
        if view != "latency":  # which shows no name
            assert "\\u{202e}gnp.exe" in told
        # What is copied from there has nothing that cannot be seen either.
        if view == "playground":
            await console.page.locator(".ask textarea").first.fill(HOSTILE)
            assert "\\u202egnp.exe" in await console.text(".snippets pre")


async def test_what_it_cost_is_said_in_a_sentence(browser: Any, feed: ConsoleFeed) -> None:
    async with looking(browser, feed.url) as console:
        await console.show("requests/1", "request-1")
        assert await console.text(".story") == (
            "prefill-0 computed the prompt (1,782 tokens, 16 of them from its cache) in 420 ms; its KV (39.0 MiB) went "
            "to decode-0 over shared memory. 294 ms of the transfer ran beside the prompt and cost nothing; 13.2 ms of "
            "it nobody hid: that is what the handoff cost, < 1 % of the request's time. decode-0 made the answer: 64 "
            "tokens, one in 52.6 ms on average."
        )
        assert "Mostly computing the prompt (98 %)" in await console.text()
        assert "Decided by short_queue: 1.800 more for prefill-0" in await console.text()
        assert "prefill-9 (no room: too few blocks)" in await console.text()
        await console.show("cluster")
        assert "13.2 ms of it nobody hid" in await console.text(".newest")


async def test_a_replay_is_told_as_what_it_is(browser: Any, feed: ConsoleFeed) -> None:
    lost = {
        "name": "decode",
        "start_ms": 9.3,
        "end_ms": 900.0,
        "worker": "decode-1",
        "leg": 9,
        "attempt": 1,
        "outcome": "lost",
    }
    feed.rows[0] |= {"retries": 1, "stages": [lost, *feed.rows[0]["stages"]]}
    drawn = bars(feed.rows[0])
    first = {**drawn[6], "end_ms": 900.0, "worker": "decode-1", "outcome": "lost"}
    feed.details[1] = {"bars": [*drawn[:6], first, *drawn[6:]]}
    async with looking(browser, feed.url) as console:
        await console.show("requests/1", "request-1")
        assert "It was placed again once: the decode on decode-1 was given up (lost) at 900 ms." in await console.text()
        assert await console.text("tr.wf-bad") == "decode decode-1 lost from 9.3 ms: 891 ms 891 ms"


async def test_the_first_tokens_time_is_not_that_of_a_replay_after_it(browser: Any, feed: ConsoleFeed) -> None:
    """What workers measured is of the last attempt."""
    feed.rows[0] |= {"retries": 1, "total_ms": 18_000.0}
    feed.rows[0]["stages"] += [
        stage("queue", 900.0, 17_000.0, attempt=2),
        stage("prefill", 17_001.0, 17_500.0, worker="prefill-0", leg=90, attempt=2),
    ]
    feed.rows[0]["timings"] |= {"queue_ms": 16_100.0, "prefill_compute_ms": 499.0}
    async with looking(browser, feed.url) as console:
        await console.show("requests/1", "request-1")
        told = await console.text("section[aria-labelledby=ttft-title]")
        assert "428 ms went Mostly waiting for the worker's batch and computing the prompt (99 %)" in told
        assert "waiting for a prefill worker 0.4 ms < 1 %" in told
        assert "tokenising 4.4 ms 1 %" in told


async def test_attempts_before_the_first_token_are_part_of_its_time(browser: Any, feed: ConsoleFeed) -> None:
    feed.rows[0] |= {"retries": 1, "ttft_ms": 1000.0}
    feed.rows[0]["stages"] = [
        stage("prefill", 0.0, 300.0, worker="prefill-1", leg=1, outcome="lost"),
        stage("queue", 300.0, 570.0, attempt=2),
        stage("prefill", 570.0, 1000.0, worker="prefill-0", leg=2, attempt=2),
    ]
    async with looking(browser, feed.url) as console:
        await console.show("requests/1", "request-1")
        told = await console.text("section[aria-labelledby=ttft-title]")
        assert "attempts that were given up 300 ms 30 %" in told
        assert "waiting for a prefill worker 270 ms 27 %" in told
        assert "computing the prompt 420 ms 42 %" in told


async def test_what_waits_has_waited_since_it_began_to(browser: Any, feed: ConsoleFeed) -> None:
    """Not since its arrival, nor since the page was opened."""
    feed.rows = [
        row(number, phase=phase, arrived=time.time() - 60, stages=[leg, stage(wait, since_ms, None)], **LIVE)
        for number, phase, leg, wait, since_ms in (
            (1, "queued", stage("decode", 0.0, 58_000.0), "queue", 58_000.0),
            (2, "parked", stage("prefill", 0.0, 40_000.0), "place", 40_000.0),
        )
    ]
    async with looking(browser, feed.url) as console:
        await console.show("cluster")
        told = await console.text("section[aria-labelledby=waiting-title]")
        assert "1 to 10 s 1 0" in told
        assert "over 10 s 0 1" in told


async def test_commands_to_copy_reach_this_router(browser: Any, feed: ConsoleFeed) -> None:
    feed.hello["router"] |= {"control": "10.0.0.7:5", "tls": True}
    async with looking(browser, feed.url) as console:
        await console.show("requests/1", "request-1")
        assert "baton explain --request request-1 --target 10.0.0.7:5" in await console.text(".actions")
        assert "baton top --target 10.0.0.7:5" in await console.text("footer")
        await console.show("playground")
        assert f"curl -N https://127.0.0.1:{feed.port}/v1/" in await console.text(".snippets pre")
        await console.page.get_by_role("button", name="grpcurl", exact=True).click()
        assert (await console.text(".snippets pre")).startswith("grpcurl -d ")


async def test_a_waterfall_grows_while_its_request_runs(browser: Any, feed: ConsoleFeed) -> None:
    ended = feed.rows[0]
    feed.rows = [
        {**ended, "phase": "prefilling", "decode_worker": "", "output_tokens": 0, "arrived": time.time(), **LIVE}
    ]
    drawn = bars(ended)
    feed.details[1] = {"bars": [{**drawn[0], "end_ms": None, "events": []}, *drawn[1:3], {**drawn[3], "end_ms": None}]}
    async with looking(browser, feed.url) as console:
        await console.show("requests/1")
        assert "prefill-0 is computing the prompt" in await console.text(".story")
        assert await console.page.locator(".wf-runs").count() == 2
        feed.rows[0] |= {"phase": "decoding", "decode_worker": "decode-0"}
        await console.see(".story:has-text('what is done of its KV goes to decode-0 meanwhile')")
        feed.rows, feed.details = [ended], {}
        await console.see("text=first token after 428 ms")
        assert await console.page.locator(".wf-runs").count() == 0
        # Attributes are a press away.
        await console.page.get_by_role("button", name="kv.transfer").press("Enter")
        assert "40894464" in await console.text(".wf-facts")


async def test_requests_are_filtered_and_sorted(browser: Any, feed: ConsoleFeed) -> None:
    fill(feed)
    feed.rows.append(row(6, prefill_worker="prefill-7", ttft_ms=9000.0, outcome="stop"))
    async with looking(browser, feed.url) as console:
        await console.show("requests")

        async def shown() -> list[str]:
            return await console.page.locator("table.requests tbody th").all_inner_texts()

        assert await shown() == ["request-6", "request-5", "request-4", "request-3", "prefill-1", "request-1"]
        await console.page.get_by_role("button", name="TTFT").press("Enter")
        assert (await shown())[0] == "request-6"
        assert await console.page.locator("th[aria-sort=descending]").inner_text() == "TTFT ▾"
        await console.page.get_by_role("button", name="TTFT").press("Enter")
        assert (await shown())[-3:] == ["request-6", "request-4", "request-3"], "what has none comes last"
        await console.page.get_by_label("Worker").select_option("prefill-7")
        assert await shown() == ["request-6"]
        await console.page.get_by_label("Worker").select_option("")
        await console.page.get_by_label("State").select_option("failed")
        assert await shown() == ["request-5"]
        await console.page.get_by_label("State").select_option("")
        await console.page.get_by_label("Split").select_option("unsplit")
        assert await shown() == ["prefill-1"]
        await console.page.get_by_label("Split").select_option("")
        await console.page.get_by_label("Objectives").select_option("ttft")
        assert await shown() == ["request-6"]
        await console.page.get_by_label("Objectives").select_option("itl")
        assert "No request is like that." in await console.text()
        await console.page.get_by_label("Objectives").select_option("")
        await console.page.get_by_label("placed again").check()
        assert await shown() == ["request-5"]


async def test_latencies_are_held_against_their_objectives(browser: Any, feed: ConsoleFeed) -> None:
    feed.rows = [row(number, ttft_ms=300.0 + number) for number in range(1, 101)]
    feed.rows += [row(number, ttft_ms=450.0, decode_worker="prefill-0", tpot_ms=60.0) for number in range(101, 111)]
    in_vain = stage("queue", 0.0, 30_000.0, outcome="abandoned")
    feed.rows.append(row(111, prefill_worker="", decode_worker="", stages=[in_vain], **LIVE))
    async with looking(browser, feed.url) as console:
        await console.show("latency")
        assert "▲ p99 over 80 % of the objective" in await console.text("section[aria-labelledby=ttft-title]")
        assert await console.text("section[aria-labelledby=ttft-title] tbody") == (
            "split 100 350 ms 390 ms 399 ms 100 % 0 % 0 % unsplit 10 450 ms 450 ms 450 ms 100 % 100 % 0 %"
        )
        assert "✕ p99 over the objective" in await console.text("section[aria-labelledby=tpot-title]")
        # Of a hundred, 20 take up to 50 ms, 70 more up to 100, 8 more up to 200, and 2 up to 500: shares of a bucket
        # are in proportion. The objective is 200 ms, and near it are those over 160.
        itl = await console.text("section[aria-labelledby=itl-title] tbody")
        assert re.search(
            r"^split [\d,]+ 71.4 ms 100 ms 350 ms 98 % 3 % 2 % unsplit [\d,]+ 350 ms 470 ms 497 ms 0 %", itl
        ), itl
        # Who waited in vain has no worker, and counts.
        queue = await console.text("section[aria-labelledby=queue-title]")
        assert "✕ p99 over the objective" in queue
        assert "neither 1 30.00 s 30.00 s 30.00 s 0 % 0 % 100 %" in queue
        assert await console.page.locator(".chart canvas").count() == 4
        assert "ITL is of all" not in await console.text()


async def test_what_the_page_does_not_know_is_no_part_of_the_last_minutes(browser: Any, feed: ConsoleFeed) -> None:
    feed.rows = [row(number, arrived=time.time() - 60) for number in (5000, 5001, 5009)]
    async with looking(browser, feed.url) as console:
        await console.show("latency")
        told = await console.text()
        assert re.search(
            r"This page knows none that arrived before \d+ s ago. Of 10 requests, it was not told of 7.", told
        )
        feed.rows.append(row(4999, arrived=time.time() - 1000))
        await console.see("text=Of 10 requests, it was not told of 7.")
        await console.page.locator("text=This page knows none").wait_for(state="detached")


async def test_what_ended_or_began_anew_while_nobody_looked(browser: Any, feed: ConsoleFeed) -> None:
    """A router that is started again may have the same process id, and a request may end while a page is cut off."""
    feed.rows = [row(1), row(2, phase="decoding", **LIVE)]
    feed.hello["incarnation"] = "a"
    async with looking(browser, feed.url, expected=("ERR_",)) as console:
        await console.show("requests")
        await console.see("tbody tr:has-text('decoding')")
        feed.rows = [row(3)]
        feed.cut()
        await console.see("tbody tr:has-text('request-3')")
        assert await console.page.locator("table.requests tbody th").all_inner_texts() == ["request-3", "request-1"]
        feed.rows, feed.hello["incarnation"] = [row(1, id="other")], "b"
        feed.cut()
        await console.see("tbody tr:has-text('other')")
        assert await console.page.locator("table.requests tbody th").all_inner_texts() == ["other"]
