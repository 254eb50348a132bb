"""Tests that one request never harms another: whatever raises on its behalf ends it alone, and the others' actions are
done.

What is poisoned here is what a request and its workers bring along, and what the router does for no request. Each of
the functions that the router calls for a request: `test_isolated_events.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import types_pb2, worker_pb2
from services.router.catalogue import Catalogue
from services.router.coordinator import handoff
from services.router.coordinator.book import Book
from services.router.coordinator.canaries import Canaries
from services.router.coordinator.events import FinishReason
from services.router.coordinator.workers import WorkerTable
from services.router.policy.health import Health
from services.router.workers import wire
from tests.support.isolation_bench import (
    ALL,
    INNOCENT,
    POISONED,
    STAGES,
    Bench,
    FakeLink,
    Poison,
    as_any,
    started,
    tokens,
)
from tests.support.patience import HANG_S


@pytest.fixture
def bench() -> Iterator[Bench]:
    async def made() -> Bench:
        return Bench()

    with asyncio.Runner() as runner:
        yield runner.run(made())


POISONS = [
    ("answer", "started"),
    ("answer", "tokens"),
    ("answer", "finished"),
    ("trace", "leg_sent"),
    ("trace", "stage_ended"),
    ("trace", "first_token"),
    ("trace", "finished"),
    ("record", "accepted"),
    ("record", "tokens"),
    ("record", "finished"),
]


@pytest.mark.parametrize(("part", "method"), POISONS)
def test_a_part_that_raises_ends_its_own_request_only(bench: Bench, part: str, method: str) -> None:
    for request_id in ALL:
        bench.submit(request_id, **({part: method} if request_id == POISONED else {}))
    bench.run()
    # What comes after the answer is complete takes nothing from the client.
    bench.assert_only_the_poisoned_suffers(may_finish=(part, method) in [("trace", "finished"), ("record", "finished")])


@pytest.mark.parametrize("part", ["answer", "trace", "record"])
def test_a_part_that_raises_when_its_request_fails(bench: Bench, part: str) -> None:
    """The other parts are told of it all the same."""
    for request_id in ALL:
        bench.submit(request_id, **({part: "failed"} if request_id == POISONED else {}))
    bench.conductor.cancel(POISONED, as_any(bench.answers[POISONED]))
    for parts in (bench.answers, bench.traces, bench.records):
        assert as_any(parts)[POISONED].calls.count("failed") == 1
    bench.run(INNOCENT)
    for request_id in INNOCENT:
        assert bench.answers[request_id].reason is FinishReason.LENGTH
    assert bench.metrics.internal_errors["action"] == 1
    bench.assert_idle()


@pytest.mark.parametrize("kind", ["prefill", "decode", "cancel"])
def test_a_message_that_cannot_be_sent(bench: Bench, kind: str) -> None:
    """It may be a command or a cancel: only its own request ends, and its legs are given up."""

    def poison(message: Any) -> bool:
        if message.WhichOneof("message") != kind:
            return False
        if kind == "cancel":
            return message.cancel.leg in (bench.leg("prefill", POISONED), bench.leg("decode", POISONED))
        return bool(getattr(message, kind).request_id == POISONED)

    for link in bench.links.values():
        link.poison = poison
    for request_id in ALL:
        bench.submit(request_id, **({"answer": "started"} if kind == "cancel" and request_id == POISONED else {}))
    bench.run()
    bench.assert_only_the_poisoned_suffers()


@pytest.mark.parametrize("where", ["built", "sent"])
async def test_a_canary_that_cannot_be_sent_says_nothing_of_its_worker(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is the router's own defect, counted as often as it is met; once it is over the worker is checked and used."""
    with monkeypatch.context() as poisoned:
        if where == "sent":
            poisoned.setattr(FakeLink, "send", _raises)
        else:
            poisoned.setattr(wire, "request_of", _raises)
        bench = Bench(canaries=True)
        for _ in range(300):
            bench.clock.advance(0.1)
            bench.conductor.tick()
        assert bench.metrics.internal_errors["action"] > 5
        for worker in bench.coordinator.workers.all():
            assert (worker.health.num_failures, worker.health.state) == (0, Health.NEW), worker.health.reason
    bench.metrics.internal_errors.clear()
    for _ in range(60):
        bench.clock.advance(0.1)
        bench.conductor.tick()
    assert not bench.metrics.internal_errors
    assert bench.links["p"].sent.count("prefill") == bench.links["d"].sent.count("decode") == 1


@pytest.mark.parametrize("seconds", [9.3e15, 1e300, float("inf"), 1e10])
def test_no_duration_is_too_long_to_leave(bench: Bench, seconds: float) -> None:
    for request_id in ALL:
        deadline_s = bench.clock.now() + seconds
        bench.submit(request_id, **({"deadline_s": deadline_s} if request_id == POISONED else {}))
    bench.turn()
    assert bench.links["p"].sent.count("prefill") == 3
    bench.run()
    assert {answer.reason for answer in bench.answers.values()} == {FinishReason.LENGTH}
    assert not bench.metrics.internal_errors


async def test_the_ticking_task_survives() -> None:
    bench = Bench()
    ticks: list[int] = []

    def raises(*_: Any) -> None:
        ticks.append(1)
        raise Poison("observe")

    bench.metrics.observe = raises  # type: ignore[method-assign]
    model: Any = SimpleNamespace(model_id="m", conductor=bench.conductor)
    no: Any = None
    catalogue = Catalogue(model, text_of=no, serve=no, forget=no, max_models=1, clock=bench.clock)
    task = asyncio.create_task(catalogue.tick_forever())
    async with asyncio.timeout(HANG_S):
        while len(ticks) < 3:
            assert not task.done(), "the tick is over"
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bench.metrics.internal_errors["tick"] >= 2


def test_log_probabilities_of_a_prompt_that_cannot_be_passed_on(bench: Bench) -> None:
    for request_id in ALL:
        bench.submit(request_id, answer="prompt_scored", scores_prompt=request_id == POISONED)
    bench.run(stages=["prefill begins"])
    prompt_tokens = worker_pb2.PromptTokens(leg=bench.leg("prefill", POISONED), position=1)
    prompt_tokens.logprobs.extend([types_pb2.TokenLogprobs(logprob=-1.0)] * 19)
    bench.say("p", [worker_pb2.LegEvent(prompt_tokens=prompt_tokens)])
    bench.run(INNOCENT, [stage for stage in STAGES if stage != "prefill begins"])
    bench.assert_only_the_poisoned_suffers()


def test_an_event_that_cannot_be_read_takes_no_other_event_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request_id in ALL:
        bench.submit(request_id)
    bad_leg, real = bench.leg("prefill", POISONED), wire.leg_event

    def raises(event: worker_pb2.LegEvent) -> Any:
        if event.started.leg == bad_leg:
            raise Poison("event")
        return real(event)

    monkeypatch.setattr(wire, "leg_event", raises)
    bench.run()
    bench.assert_only_the_poisoned_suffers()


def _raises(*_: Any, **__: Any) -> Any:
    raise Poison("raised")


def test_an_event_that_cannot_be_read_ends_no_leg_of_another_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that names a leg of another worker's does no harm, even if the router cannot read what it says."""
    for request_id in ALL:
        bench.submit(request_id)
    leg = bench.leg("prefill", POISONED)
    assert leg is not None
    with monkeypatch.context() as poisoned:
        poisoned.setattr(wire, "leg_event", _raises)
        bench.say("d", [started(leg)])
    assert bench.metrics.internal_errors == {"event": 1}
    bench.run()
    assert {answer.reason for answer in bench.answers.values()} == {FinishReason.LENGTH}


async def test_an_event_that_cannot_be_read_ends_no_canary_of_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(canaries=True)
    bench.conductor.tick()
    (leg,) = bench.commands["prefill"].values()
    with monkeypatch.context() as poisoned:
        poisoned.setattr(wire, "leg_event", _raises)
        bench.say("d", [started(leg)])
    assert bench.metrics.internal_errors == {"event": 1}
    bench.say("p", [started(leg), tokens(leg, 0, [7], finish=True)])
    assert bench.coordinator.workers.get("p").health.state is Health.UP


def test_a_canary_that_cannot_be_given_up_takes_no_other_event_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request_id in ALL:
        bench.submit(request_id)
    bad_leg, real = bench.leg("prefill", POISONED), handoff.leg_event

    def raises(*arguments: Any) -> None:
        if arguments[2].leg == bad_leg:
            raise Poison("event")
        real(*arguments)

    monkeypatch.setattr(handoff, "leg_event", raises)
    monkeypatch.setattr(Canaries, "give_up", _raises)
    bench.run()
    bench.assert_only_the_poisoned_suffers()


def test_what_a_worker_has_is_given_up_there_although_the_request_cannot_be_ended_in_order(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for request_id in ALL:
        bench.submit(request_id)
    bench.turn()
    with monkeypatch.context() as poisoned:
        poisoned.setattr(Book, "end_prefill", _raises)
        bench.conductor.cancel(POISONED, as_any(bench.answers[POISONED]))
    assert bench.links["p"].sent.count("cancel") == 1
    bench.run(INNOCENT)
    bench.assert_only_the_poisoned_suffers()


@pytest.mark.parametrize("part", ["forget", "tick"])
def test_a_part_of_the_tick_that_always_raises_does_not_stop_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    monkeypatch.setattr(WorkerTable, part, _raises)
    bench.submit("a", deadline_s=bench.clock.now() + 5.0)
    bench.clock.advance(6.0)
    bench.conductor.tick()
    error = bench.answers["a"].error
    assert error is not None
    assert error.reason == "DEADLINE_EXCEEDED"
