"""Tests what `baton top` shows in its rows: blocks as bars, requests in order, names that are hostile."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.v1 import control_pb2
from services.cli.timeline_spans import as_recorded
from services.cli.top_cluster import ASCII_GLYPHS, GLYPHS, bar, cells, heading, pair_rows, worker_rows
from services.cli.top_requests import (
    SORT_KEYS,
    FollowedRequest,
    grades,
    in_order,
    longest_wait_s,
    request_row,
)
from services.cli.trace_view import UNICODE, request_view
from services.cli.worker_words import CLASSES
from services.router.telemetry.slo import Grade
from services.rpc.plain import plain
from tests.support.scripted_control import (
    OBJECTIVES,
    failed_timeline,
    live_timeline,
    split_timeline,
    status,
    worker,
)

HOSTILE = "\x1b[2J\x9b31m\u202e[bold]x[/]\n"
ORDERS = {order.name: order for order in SORT_KEYS}


def followed(*timelines: control_pb2.Timeline) -> list[FollowedRequest]:
    return [FollowedRequest(each, plain(each), heard_s=100.0) for each in timelines]


@given(st.lists(st.integers(0, 10_000), min_size=5, max_size=5), st.integers(5, 60))
def test_a_bar_is_full_and_hides_no_class(counts: list[int], width: int) -> None:
    found = cells(counts, width)
    if not sum(counts):
        assert found == ()
        return
    assert sum(found) == width
    assert [length > 0 for length in found] == [count > 0 for count in counts]


def test_a_bar_shows_shares() -> None:
    found = cells([25, 0, 25, 0, 50], 20)
    assert found == (5, 0, 5, 0, 10)
    assert bar(found, ASCII_GLYPHS) == "iiiiiaaaaa.........."
    assert len({GLYPHS[name] for name in CLASSES}) == len({ASCII_GLYPHS[name] for name in CLASSES}) == len(CLASSES)


def test_workers_stand_by_role_with_load_and_reason() -> None:
    workers = [
        worker("z-mixed", "prefill", "decode"),
        worker("decode-1", "decode", state="EJECTED", reason="3.1 times as slow as its peers"),
        worker("decode-0", "decode"),
        worker("prefill-0", "prefill"),
        control_pb2.WorkerStatus(state=control_pb2.WORKER_STATE_JOINING),
    ]
    rows = worker_rows(plain(status(*workers)), 10, {"prefill-0": 512.25, "decode-1": 1024.0, "decode-0": None})
    assert [(row.worker_id, row.role) for row in rows] == [
        ("prefill-0", "prefill"),
        ("decode-0", "decode"),
        ("decode-1", "decode"),
        ("-", "-"),
        ("z-mixed", "mixed"),
    ]
    assert [row.prefill_ms for row in rows] == ["41.2", "-", "-", "-", "41.2"]
    assert [row.decode_ms for row in rows] == ["-", "12.5", "12.5", "-", "12.5"]
    assert [row.tokens_per_s for row in rows] == ["512.2", "-", "1024", "-", "-"]
    assert rows[0][3:] == ((1, 1, 1, 1, 6), "6/100", "5", "6", "41.2", "-", "512.2", "12 ms", "")
    assert (rows[2].state, rows[2].reason) == ("ejected", "3.1 times as slow as its peers")
    assert rows[3].bar == ()


def test_a_pair_has_the_figures_of_its_newest_handoffs() -> None:
    message = status()
    message.pairs.add(prefill="p", decode="d", state=control_pb2.PAIR_STATE_BROKEN, reason="3 transfers failed")
    slow = split_timeline(2)
    slow.timings.transfer_exposed_ms, slow.timings.transfer_ms = 8.0, 30.0
    timelines = [plain(each) for each in (slow, split_timeline(1), live_timeline(3))]
    broken, proven = pair_rows(plain(message), timelines)
    assert (broken.prefill, broken.state, broken.num_handoffs, broken.exposed_ms) == ("p", "broken", "0", "-")
    assert broken.reason == "3 transfers failed"
    megabytes = (3 << 20) / 1e6
    speed = f"{(megabytes / 0.030 + megabytes / 0.060) / 2:.0f}"
    assert proven[2:] == ("proven", "shm", "2", "6.0", speed, "")


def test_the_heading_says_what_waits_and_for_how_long() -> None:
    parked = live_timeline(2)
    parked.phase = control_pb2.REQUEST_PHASE_PARKED
    parked.stages.add(name="place", start_us=400_000)
    requests = followed(live_timeline(1), parked, split_timeline(3))
    # The first waits since it arrived; the second for its second worker.
    assert longest_wait_s(requests[1:], 100.5) == pytest.approx(1.6)
    wait_s = longest_wait_s(requests, 100.5)
    assert wait_s == pytest.approx(2.0)
    lines = heading("host:1", plain(status()), wait_s)
    assert lines == [
        "router host:1  pid 42  ready  model tiny",
        "requests  queued 3  prefilling 0  parked 0  decoding 1  oldest wait 2.0 s  workers 2/2 ready",
    ]


def test_the_row_of_a_request() -> None:
    ended, live, failed = followed(split_timeline(1), live_timeline(2), failed_timeline(3, "no_worker"))
    assert request_row(ended, 103.0) == (
        *("req-1", "5 s", "length", "1536", "32", "5", "120.0", "70.0", "90.0", "4.0", "400.0", "0"),
        "prefill-0 → decode-0",
    )
    assert request_row(live, 100.0)[2:3] == ("queued",)
    assert request_row(live, 100.0)[6:] == ("-", "-", "-", "-", "-", "0", "-")
    assert request_row(failed, 100.0).phase == "no_worker"


@pytest.mark.parametrize(("retries", "words"), [(1, "placed again 1 time"), (2, "placed again 2 times")])
def test_a_waterfall_says_how_often_its_request_was_placed_again(retries: int, words: str) -> None:
    message = split_timeline(1)
    for attempt in range(2, 2 + retries):
        message.stages.add(name="queue", start_us=50_000, end_us=60_000, attempt=attempt)
    assert request_view(as_recorded(message, 0, 400_000), UNICODE)[-1] == words


def test_orders_put_what_is_unknown_last_in_both_directions() -> None:
    requests = followed(
        split_timeline(1, ttft_us=300_000), live_timeline(2), split_timeline(3), split_timeline(4, num_retries=2)
    )
    requests[0].timeline["timings"]["transfer_exposed_ms"] = 9.0

    def numbers(name: str, **direction: bool) -> list[int]:
        return [each.timeline["number"] for each in in_order(requests, ORDERS[name], **direction)]

    assert numbers("arrival") == [4, 3, 2, 1]
    assert numbers("ttft") == [1, 3, 4, 2]
    assert numbers("ttft", descending=False) == [3, 4, 1, 2]
    assert numbers("exposed")[0] == 1
    assert numbers("retries")[0] == 4
    assert numbers("outcome")[0] == 2
    for order in SORT_KEYS:
        assert sorted(numbers(order.name)) == [1, 2, 3, 4]


def test_latencies_are_held_to_the_objectives() -> None:
    near = split_timeline(1, ttft_us=450_000, longest_itl_us=201_000)
    assert grades(plain(near), OBJECTIVES) == {
        "ttft_ms": Grade.NEAR,
        "tpot_ms": Grade.MISSED,
        "longest_itl_ms": Grade.MISSED,
        "total_ms": Grade.MET,
    }
    assert grades(plain(near), {}) == {}
    assert grades(plain(live_timeline(2)), OBJECTIVES) == {}


def test_hostile_names_are_text_in_every_row() -> None:
    message = status(worker(HOSTILE, "prefill", reason=HOSTILE))
    message.models[0].model_id = HOSTILE
    message.pairs[0].prefill = message.pairs[0].reason = HOSTILE
    timeline = failed_timeline(1, HOSTILE, prefill_worker=HOSTILE)
    timeline.request_id = HOSTILE
    shown = [*heading("t", plain(message)), *pair_rows(plain(message), [])[0], *worker_rows(plain(message), 10, {})[0]]
    shown += request_row(followed(timeline)[0], 0.0)
    text = [each for each in shown if isinstance(each, str)]
    assert all(each.isprintable() for each in text)
    assert sum(r"\x1b[2J" in each for each in text) == 8


def test_counts_that_cannot_be_break_nothing() -> None:
    broken = worker("w", "decode", blocks=(-5, 2**31 - 1, -(2**31), 0, 1))
    broken.load.decode_step.ms = float("nan")
    (row,) = worker_rows(plain(status(broken)), 10, {})
    assert sum(row.bar) == 10
    timeline = live_timeline(1, ttft_us=-(2**63), total_us=2**63 - 1)
    timeline.age_us = -(2**63)
    assert request_row(followed(timeline)[0], 0.0).age == "0 s"
