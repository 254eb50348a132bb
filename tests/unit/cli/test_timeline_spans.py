"""Tests the waterfall of a request as its router tells it, while it lives and after."""

from __future__ import annotations

from typing import Any

from baton.v1 import control_pb2, types_pb2
from services.cli.timeline_spans import as_recorded
from services.cli.top_requests import FollowedRequest
from services.cli.top_snapshot import request_lines
from services.cli.trace_breakdown import break_down
from services.rpc.plain import plain
from tests.support.scripted_control import failed_timeline, live_timeline, split_timeline

ARRIVED_NS = 1_700_000_000_000_000_000


def spans_of(timeline: control_pb2.Timeline, elapsed_us: int = 0) -> dict[str, tuple[float, float]]:
    """Returns by name when each span began and how long it took, milliseconds."""
    recorded = as_recorded(timeline, ARRIVED_NS, elapsed_us)
    assert recorded.root is recorded.spans[0]
    assert {span.span_id for _, span in recorded.tree()} == {span.span_id for span in recorded.spans}
    return {
        span.name: (round((span.start_ns - ARRIVED_NS) / 1e6, 3), round(span.duration_ms, 3)) for span in recorded.spans
    }


def test_a_split_request_has_the_spans_of_its_trace() -> None:
    assert spans_of(split_timeline(1)) == (
        {
            "baton.request": (0, 400),
            "tokenize": (0, 2),
            "queue": (2, 4),
            "prefill": (6, 113),
            "prefill.wait": (6, 2),
            "prefill.compute": (8, 108),
            "place": (8, 1),
            "decode": (9, 390),
            # It ends when what of it was exposed has passed since the prompt's end.
            "kv.transfer": (60, 60),
            "decode.wait": (123, 1),
            "decode.run": (124, 275),
        }
    )
    breakdown = break_down(as_recorded(split_timeline(1), ARRIVED_NS, 0))
    assert breakdown.first_token.total_ms == 120
    assert breakdown.first_token.prefill_compute_ms == 108
    assert breakdown.second_token is not None
    assert breakdown.second_token.transfer_exposed_ms == 4
    assert breakdown.transfer is not None
    assert (breakdown.transfer.bytes, breakdown.transfer.transport) == (3 << 20, "shm")


def test_an_unsplit_request_is_all_in_one_leg() -> None:
    timeline = split_timeline(1, prefill_worker="decode-0")
    timeline.ClearField("timings")
    timeline.timings.MergeFrom(
        types_pb2.PhaseTimings(prefill_wait_ms=2, prefill_compute_ms=100, decode_run_ms=280, total_ms=400)
    )
    del timeline.stages[2:4]
    spans = spans_of(timeline)
    assert spans["prefill.compute"] == (11, 100)
    assert spans["decode.run"] == (119, 280)
    assert "kv.transfer" not in spans


def test_what_goes_on_lasts_until_now() -> None:
    assert spans_of(live_timeline(1), 1_700_000) == {"baton.request": (0, 1700), "queue": (0, 1700)}


def view(timeline: control_pb2.Timeline, explained: dict[str, Any] | None = None) -> list[str]:
    return request_lines(FollowedRequest(timeline, plain(timeline), heard_s=10.0), explained, 10.2, 90)


def test_the_view_of_a_request() -> None:
    lines = view(split_timeline(1))
    assert lines[0] == "req-1  tiny  length  1536 prompt tokens (32 cached)  5 output tokens"
    assert "first token after 120.0 ms" in lines
    assert "KV moved: 3.0 MiB in 96 blocks by shm" in lines
    transfer = next(line for line in lines if "kv.transfer" in line)
    assert transfer.split()[:4] == ["kv.transfer", "decode-0", "60.0", "60.0"]
    assert "░" in transfer
    assert max(map(len, lines)) <= 90


def test_a_fault_and_the_replay_after_it_are_told() -> None:
    timeline = live_timeline(1)
    timeline.phase = control_pb2.REQUEST_PHASE_PREFILLING
    timeline.num_retries = 1
    timeline.stages[0].end_us, timeline.stages[0].outcome = 1_000, "done"
    timeline.stages.add(
        name="prefill", start_us=1_000, end_us=50_000, worker_id="prefill-0", leg=1, attempt=1, outcome="lost"
    )
    timeline.stages.add(name="queue", start_us=50_000, end_us=51_000, attempt=2, outcome="done")
    timeline.stages.add(name="prefill", start_us=51_000, worker_id="prefill-1", leg=2, attempt=2)
    lines = view(timeline)
    assert lines[0].startswith("req-1  tiny  prefilling  100 prompt tokens")
    assert [line.split()[:3] for line in lines if line.startswith("  prefill")][:2] == [
        ["prefill", "!", "prefill-0"],
        ["prefill", "prefill-1", "51.0"],
    ]
    assert "! prefill on prefill-0, attempt 1: lost" in lines
    assert "placed again 1 time" in lines
    assert not any("first token" in line for line in lines), "what workers measured is not known yet"


def test_what_a_client_was_told_is_told() -> None:
    lines = view(failed_timeline(1, "no_worker"))
    assert "failed: it was no_worker" in lines
    assert lines[0].startswith("req-1  tiny  no_worker")


def test_hostile_text_in_a_request_is_text() -> None:
    hostile = "\x1b]0;title\x07\u202e\n"
    timeline = split_timeline(1, failure=hostile, prompt=hostile, output=hostile, decode_worker=hostile)
    timeline.request_id = timeline.stages[2].worker_id = timeline.stages[2].outcome = hostile
    lines = view(timeline)
    assert all(line.isprintable() for line in lines)
    for name in ("prompt", "output"):
        assert rf"{name}: \x1b]0;title\x07\u202e\n" in lines


def test_times_that_cannot_be_break_nothing() -> None:
    timeline = split_timeline(1, total_us=5)
    timeline.stages[0].start_us, timeline.stages[1].end_us = -(2**62), 2**62
    timeline.timings.transfer_ms = float("inf")
    timeline.timings.decode_wait_ms = -1e300
    assert max(map(len, view(timeline))) <= 90
