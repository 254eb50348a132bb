"""Tests what is remembered of where requests spend their time, and its bounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import inference_pb2
from services.router.policy import Role
from services.router.telemetry.timelines import MOST_STAGES, Timeline, Timelines, TimelineStage, TokenTimes
from services.router.telemetry.tracing import RequestTrace
from tests.sim.tracing import NullTracer


def begun(timelines: Timelines, request_id: str = "r", now: float = 1.0) -> Timeline:
    return timelines.begin(request_id, "m", now, TokenTimes())


def queued(timeline: Timeline, attempt: int = 1, now: float = 2.0) -> None:
    timeline.stage_ended(TimelineStage("queue", now - 0.5, now, attempt=attempt, outcome="done"))


def test_token_times() -> None:
    times = TokenTimes()
    assert times.per_token_s is None
    times.add(1, 5.0)
    assert (times.first_s, times.per_token_s, times.longest_gap_s) == (5.0, None, 0.0)
    times.add(2, 5.5)
    times.add(1, 5.6)
    assert times.num_tokens == 4
    assert times.per_token_s == pytest.approx(0.2)
    assert times.longest_gap_s == pytest.approx(0.5)


def test_a_request_from_its_arrival_to_its_end() -> None:
    timelines = Timelines()
    timeline = begun(timelines)
    timeline.tokenized(1.0, 1.1, 40)
    queued(timeline)
    timeline.leg_sent("prefill", "p", 7, 1, 2.0)
    timeline.leg_sent("decode", "d", 8, 1, 2.1)
    assert timelines.changed_since(0, 10) == [timeline]
    timeline.stage_ended(TimelineStage("prefill", 2.0, 3.0, "p", 7, 1, "done"))
    assert [(each.name, each.ended_s) for each in timeline.stages] == [
        ("tokenize", 1.1),
        ("queue", 2.0),
        ("prefill", 3.0),
        ("decode", None),
    ]
    timelines.end(timeline, "stop", 4.0)
    assert not timeline.is_live
    assert timeline.stages[-1].ended_s == 4.0, "the end of a request ends what nobody has reported the end of"
    assert (timeline.prefill_worker, timeline.decode_worker, timeline.prompt_tokens) == ("p", "d", 40)
    timelines.end(timeline, "cancelled", 5.0)
    assert timeline.outcome == "stop", "a request ends once"


def test_a_replay_counts_as_a_retry_and_its_stages_come_after_the_first() -> None:
    timeline = begun(Timelines())
    queued(timeline)
    timeline.leg_sent("prefill", "p0", 1, 1, 2.0)
    timeline.stage_ended(TimelineStage("prefill", 2.0, 3.0, "p0", 1, 1, "lost"))
    queued(timeline, attempt=2, now=3.1)
    timeline.leg_sent("prefill", "p1", 2, 2, 3.1)
    assert timeline.num_retries == 1
    assert [(each.name, each.worker_id, each.outcome) for each in timeline.stages if each.name == "prefill"] == [
        ("prefill", "p0", "lost"),
        ("prefill", "p1", ""),
    ]


def test_of_many_stages_the_first_and_the_newest_are_kept() -> None:
    timeline = begun(Timelines())
    for number in range(MOST_STAGES + 10):
        queued(timeline, attempt=number + 1, now=float(number))
    assert len(timeline.stages) == MOST_STAGES
    assert timeline.stages[0].attempt == 1
    assert timeline.stages[-1].attempt == MOST_STAGES + 10
    timeline.stage_ended(TimelineStage("decode", 1.0, 2.0, "d", 99, 1, "done"))
    assert timeline.stages[-1].name == "queue", "the end of a stage that is no longer kept changes nothing"


def test_changes_since_the_last_look() -> None:
    timelines = Timelines()
    first, second = begun(timelines, "a"), begun(timelines, "b")
    seen = timelines.newest
    assert timelines.changed_since(0, 10) == [first, second]
    queued(first)
    timelines.end(first, "stop", 3.0)
    assert timelines.changed_since(seen, 10) == [second, first], "what lives may have changed at any time"
    seen = timelines.newest
    queued(second)
    timelines.end(second, "length", 4.0)
    third = begun(timelines, "c")
    assert timelines.changed_since(seen, 10) == [second, third]
    assert timelines.changed_since(0, 2) == [second, third], "the newest"
    assert timelines.changed_since(timelines.newest, 10) == [third]
    assert timelines.find(first.number) is first
    assert timelines.find(third.number) is third
    assert timelines.find(99) is None


def test_ended_requests_are_forgotten_the_oldest_first_and_live_ones_never() -> None:
    timelines = Timelines(most_requests=2)
    live = begun(timelines, "live")
    for number in range(5):
        timeline = begun(timelines, f"{number}")
        queued(timeline)
        timelines.end(timeline, "stop", 3.0)
    assert [each.label for each in timelines.changed_since(0, 10)] == ["live", "3", "4"]
    assert timelines.find(live.number) is live


def test_the_memory_is_bounded_in_bytes() -> None:
    timelines = Timelines(most_bytes=20_000)
    for _ in range(1000):
        timeline = begun(timelines)
        queued(timeline)
        timeline.prompt = "x" * 500
        timelines.end(timeline, "stop", 3.0)
    kept = timelines.changed_since(0, 10_000)
    assert 2 <= len(kept) < 20
    assert sum(each.num_bytes for each in kept) <= 20_000


def test_a_flood_of_refused_requests_leaves_the_others() -> None:
    timelines = Timelines()
    served = begun(timelines, "served")
    queued(served)
    timelines.end(served, "stop", 3.0)
    for _ in range(5000):
        timelines.end(begun(timelines, "refused"), "resource_exhausted", 4.0, "the queue is full" * 100)
    kept = timelines.changed_since(0, 10_000)
    assert kept[0] is served
    assert len(kept) < 1000
    assert len(kept[-1].failure) == 500


def test_a_request_is_split_as_its_newest_decode_leg_is() -> None:
    """One that was split may be replayed on a worker alone."""
    trace = RequestTrace(
        NullTracer(),
        inference_pb2.GenerateRequest(text="x"),
        model_id="m",
        parent="",
        stream=True,
        arrived_s=0.0,
        timelines=Timelines(),
        times=TokenTimes(),
    )

    def sent(phase: Role, worker_id: str, handoff: object = None) -> bool:
        command: Any = SimpleNamespace(phase=phase, worker_id=worker_id, leg=1, attempt=1, choice=None, handoff=handoff)
        trace.leg_sent(command, 1.0)
        return trace.is_split

    assert not sent(Role.PREFILL, "p")
    assert sent(Role.DECODE, "d", handoff="of p")
    assert not sent(Role.DECODE, "p", handoff="of p"), "it took over its own"
    assert sent(Role.DECODE, "d", handoff="of p")
    assert not sent(Role.DECODE, "d"), "it computed the prompt itself"
