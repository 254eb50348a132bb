"""Tests how a request's time is laid out as bars, and as OTLP."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import types_pb2
from services.cli.timeline_spans import as_recorded
from services.cli.trace_breakdown import break_down
from services.cli.trace_reader import read_requests
from services.router.console.bars import Bar, bars_of, otlp_of
from services.router.front.operator.timeline_messages import told
from services.router.telemetry.timelines import Timeline, TimelineStage, TokenTimes
from services.rpc.names import Attr

ARRIVED_S = 100.0


def stage(
    name: str, start_ms: float, end_ms: float | None, worker: str = "", leg: int = 0, attempt: int = 1
) -> TimelineStage:
    ended_s = None if end_ms is None else ARRIVED_S + end_ms / 1000
    return TimelineStage(name, ARRIVED_S + start_ms / 1000, ended_s, worker, leg, attempt, "done" if ended_s else "")


def timeline(*stages: TimelineStage, total_ms: float | None = 500.0, **timings: float) -> Timeline:
    made = Timeline(7, "r", "m", ARRIVED_S, TokenTimes(num_tokens=9, first_s=ARRIVED_S + 0.1))
    made.stages, made.prefill_worker, made.decode_worker = list(stages), "p", "d"
    if total_ms is not None:
        made.ended_s, made.outcome = ARRIVED_S + total_ms / 1000, "stop"
        made.timings = types_pb2.PhaseTimings(transport=types_pb2.TRANSPORT_SHM, **timings)
    return made


SPLIT = (
    stage("tokenize", 0, 1),
    stage("queue", 1, 10),
    stage("prefill", 10, 105, "p", 1),
    stage("place", 12, 13),
    stage("decode", 13, 500, "d", 2),
)
MEASURED = {
    "prefill_wait_ms": 5.0,
    "prefill_compute_ms": 80.0,
    "transfer_ms": 42.0,
    "transfer_overlapped_ms": 40.0,
    "transfer_exposed_ms": 2.0,
    "decode_wait_ms": 3.0,
    "decode_run_ms": 400.0,
    "transfer_bytes": 4096,
}


def named(bars: list[Bar], name: str) -> list[tuple[float, float | None]]:
    return [
        (round(bar.start_ms, 3), None if bar.end_ms is None else round(bar.end_ms, 3))
        for bar in bars
        if bar.name == name
    ]


def test_a_split_request() -> None:
    made = timeline(*SPLIT, **MEASURED)
    bars = bars_of(made, made.stages)
    assert named(bars, "baton.request") == [(0, 500)]
    assert named(bars, "prefill.wait") == [(10, 15)]
    assert named(bars, "prefill.compute") == [(15, 95)]
    assert named(bars, "kv.transfer") == [(55, 95), (95, 97)], "what the prompt hid, and what nothing did"
    assert named(bars, "decode.wait") == [(97, 100)]
    assert named(bars, "decode.run") == [(100, 500)]
    assert [bar.hidden for bar in bars if bar.name == "kv.transfer"] == [True, False]
    assert next(bar for bar in bars if bar.name == "kv.transfer").attributes[Attr.TRANSFER_TRANSPORT] == "shm"
    assert bars[0].events == ({"name": "first_token", "at_ms": pytest.approx(100.0)},)
    depths = [bar.depth for bar in bars]
    assert depths[0] == 0
    assert all(after - before <= 1 for before, after in itertools.pairwise(depths))


def test_a_handoff_that_is_repeated_begins_with_its_leg() -> None:
    """A decode worker was lost, and the prompt was done by then."""
    first, second = stage("decode", 13, 180, "e", 2), stage("decode", 200, 500, "d", 3, attempt=2)
    made = timeline(*SPLIT[:4], first, second, **MEASURED | {"decode_run_ms": 200.0})
    assert named(bars_of(made, made.stages), "kv.transfer") == [(200, 240), (240, 242)]


def test_an_unsplit_request_has_its_prompt_inside_its_only_leg() -> None:
    stages = (stage("queue", 0, 10), stage("decode", 10, 500, "d", 1))
    made = timeline(*stages, prefill_wait_ms=1.0, prefill_compute_ms=50.0, decode_run_ms=430.0)
    made.prefill_worker = "d"
    bars = bars_of(made, made.stages)
    assert named(bars, "prefill.compute") == [(11, 61)]
    assert named(bars, "kv.transfer") == []
    assert named(bars, "decode.run") == [(70, 500)]


def test_what_workers_measured_belongs_to_the_last_attempt() -> None:
    stages = (stage("prefill", 0, 20, "p0", 1), stage("prefill", 30, 130, "p", 2, 2), stage("decode", 40, 500, "d", 3))
    made = timeline(*stages, **MEASURED)
    bars = bars_of(made, made.stages)
    assert named(bars, "prefill") == [(0, 20), (30, 130)]
    assert named(bars, "prefill.compute") == [(35, 115)]


def test_a_request_that_lives_has_open_bars() -> None:
    made = timeline(stage("queue", 0, 10), stage("prefill", 10, None, "p", 1), total_ms=None)
    bars = bars_of(made, made.stages)
    assert [(bar.name, bar.end_ms) for bar in bars] == [("baton.request", None), ("queue", 10.0), ("prefill", None)]
    document = otlp_of(made, bars, 1_800_000_000.5)
    spans = document["resourceSpans"][0]["scopeSpans"][0]["spans"]
    assert [span["name"] for span in spans] == ["queue"], "what goes on is no span yet"


@pytest.mark.parametrize(
    ("prefill_ends_ms", "placed_ms", "num_tokens", "expected"),
    [
        (None, None, 0, []),  # no decode worker has admitted it
        (None, 13, 0, [(13, None, True)]),
        (105, 13, 1, [(13, 105, True), (105, None, False)]),
        (105, 120, 1, [(120, None, False)]),  # nothing of it could run beside the prompt
        (105, 13, 2, [(13, 105, True)]),  # it is over, and how long it took is told at the end
        (105, 120, 2, []),
        (None, 11, 0, []),  # that was the decode leg before this one
    ],
)
def test_the_transfer_of_a_request_that_lives_is_drawn_as_far_as_it_is_known(
    prefill_ends_ms: float | None, placed_ms: float | None, num_tokens: int, expected: list[tuple[float, Any, bool]]
) -> None:
    made = timeline(
        stage("prefill", 10, prefill_ends_ms, "p", 1),
        stage("place", 12, placed_ms),
        stage("decode", 12, None, "d", 2),
        total_ms=None,
    )
    made.times.num_tokens = num_tokens
    bars = bars_of(made, made.stages)
    transfer = [bar for bar in bars if bar.name == "kv.transfer"]
    assert [
        (round(bar.start_ms), None if bar.end_ms is None else round(bar.end_ms), bar.hidden) for bar in transfer
    ] == expected
    document = otlp_of(made, bars, 1.8e9)
    names = {span["name"] for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]}
    assert "kv.transfer" not in names, "a part of it is no span"
    message = told(made, None, made.arrived_s + 1)
    drawn = [each for each in as_recorded(message, 0, 1_000_000).spans if each.name == "kv.transfer"]
    assert bool(drawn) is bool(expected)
    exposed_ms = sum(1000.0 - start for start, end, hidden in expected if not hidden)
    assert all(each.attributes[Attr.TRANSFER_EXPOSED_MS] == pytest.approx(exposed_ms) for each in drawn)


def test_a_decode_that_has_its_prompts_kv_already_shows_no_transfer() -> None:
    made = timeline(*SPLIT[:3], stage("decode", 13, None, "p", 2), total_ms=None)
    assert named(bars_of(made, made.stages), "kv.transfer") == []


def test_otlp_has_the_transfer_as_one_span_and_the_same_ids_each_time() -> None:
    made = timeline(*SPLIT, **MEASURED)
    made.trace_id = "ab" * 16
    bars = bars_of(made, made.stages)
    document = otlp_of(made, bars, 1_800_000_000.5)
    assert document == otlp_of(made, bars, 1_800_000_000.5)
    spans = {span["name"]: span for span in document["resourceSpans"][0]["scopeSpans"][0]["spans"]}
    transfer = spans["kv.transfer"]
    assert transfer["traceId"] == "ab" * 16
    assert int(transfer["endTimeUnixNano"]) - int(transfer["startTimeUnixNano"]) == 42_000_000
    assert [each["name"] for each in transfer["events"]] == ["sealed"]
    assert transfer["parentSpanId"] == spans["decode"]["spanId"]
    assert spans["decode"]["parentSpanId"] == spans["baton.request"]["spanId"]
    assert int(spans["baton.request"]["startTimeUnixNano"]) == 1_800_000_000_500_000_000


def test_the_otlp_is_read_as_a_trace_file_is(tmp_path: Path) -> None:
    made = timeline(*SPLIT, **MEASURED)
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(otlp_of(made, bars_of(made, made.stages), 1.8e9)) + "\n")
    (found,) = read_requests(str(file))
    assert found.root is not None
    assert found.root.attributes[Attr.FINISH_REASONS] == ["stop"]
    assert (found.root.attributes[Attr.PREFILL_WORKER], found.root.attributes[Attr.DECODE_WORKER]) == ("p", "d")
    parts = break_down(found)
    assert parts.transfer is not None
    assert (parts.transfer.bytes, parts.transfer.transport) == (4096, "shm")
    assert parts.second_token is not None
    assert parts.second_token.transfer_exposed_ms == 2.0
    assert parts.second_token.transfer_overlapped_ms == 40.0
    assert parts.first_token.prefill_compute_ms == pytest.approx(80.0)


def test_a_failed_request_says_so_in_otlp() -> None:
    made = timeline(stage("queue", 0, 10))
    made.failure = "the queue is full"
    document = otlp_of(made, bars_of(made, made.stages), 1.8e9)
    root = document["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert root["status"] == {"code": 2, "message": "the queue is full"}
