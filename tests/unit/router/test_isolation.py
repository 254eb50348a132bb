"""Tests that one request never harms another: whatever raises on its behalf ends it alone, and the others' actions are
done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import inference_pb2, types_pb2, worker_pb2
from services.router.catalogue import Catalogue
from services.router.coordinator import actions, admission, handoff, placement
from services.router.coordinator.actions import SendLeg
from services.router.coordinator.events import FinishReason, RequestSpec
from services.router.policy import Role
from services.router.policy.health import Health
from services.router.workers import wire
from tests.support.isolation_bench import (
    ALL,
    INNOCENT,
    POISONED,
    STAGES,
    Bench,
    FakeAnswer,
    FakeLink,
    FakeTrace,
    Poison,
    Recorder,
    as_any,
    started,
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
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id, **({part: method} if request_id == POISONED else {}))
    bench.run()
    # What comes after the answer is complete takes nothing from the client.
    bench.assert_only_the_poisoned_suffers(may_finish=(part, method) in [("trace", "finished"), ("record", "finished")])


@pytest.mark.parametrize("part", ["answer", "trace", "record"])
def test_a_part_that_raises_when_its_request_fails(bench: Bench, part: str) -> None:
    """The other parts are told of it all the same."""
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id, **({part: "failed"} if request_id == POISONED else {}))
    bench.conductor.cancel(POISONED, as_any(bench.answers[POISONED]))
    for parts in (bench.answers, bench.traces, bench.records):
        assert as_any(parts)[POISONED].calls.count("failed") == 1
    bench.run(INNOCENT)
    for request_id in INNOCENT:
        assert bench.answers[request_id].reason is FinishReason.LENGTH
    assert bench.metrics.internal_errors["action"] == 1
    assert not bench.conductor._live
    bench.coordinator.check_idle()


@pytest.mark.parametrize("kind", ["prefill", "decode", "cancel"])
def test_a_message_that_cannot_be_sent(bench: Bench, kind: str) -> None:
    """It may be a command or a cancel: only its own request ends, and its legs are given up."""
    bench.watch()

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


def test_a_command_that_cannot_be_encoded(bench: Bench) -> None:
    """A field cannot hold one of its numbers. The rest of the batch, and the session it is sent in, are unharmed."""
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id, **({"priority": 1 << 40} if request_id == POISONED else {}))
    bench.run()
    bench.assert_only_the_poisoned_suffers()
    assert bench.metrics.internal_errors == {"action": 1}


@pytest.mark.parametrize("where", ["built", "sent"])
async def test_a_canary_that_cannot_be_sent_says_nothing_of_its_worker(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """It is the router's own defect, counted as often as it is met; once it is over the worker is checked and used."""

    def raises(*_: Any) -> Any:
        raise Poison("canary")

    with monkeypatch.context() as poisoned:
        if where == "sent":
            poisoned.setattr(FakeLink, "_send", raises)
        else:
            poisoned.setattr(wire, "request_of", raises)
        bench = Bench(canaries=True)
        for _ in range(300):
            bench.clock.advance(0.1)
            bench.conductor.tick()
        assert bench.metrics.internal_errors["action"] > 5
        for worker in bench.coordinator.workers():
            assert (worker.health.num_failures, worker.health.state) == (0, Health.NEW), worker.health.reason
    bench.metrics.internal_errors.clear()
    for _ in range(60):
        bench.clock.advance(0.1)
        bench.conductor.tick()
    assert not bench.metrics.internal_errors
    assert bench.links["p"].sent.count("prefill") == bench.links["d"].sent.count("decode") == 1


@pytest.mark.parametrize("seconds", [9.3e15, 1e300, float("inf"), 1e10])
def test_no_duration_is_too_long_to_leave(bench: Bench, seconds: float) -> None:
    bench.watch()
    for request_id in ALL:
        deadline_s = bench.clock.now() + seconds
        bench.submit(request_id, **({"deadline_s": deadline_s} if request_id == POISONED else {}))
    assert bench.links["p"].sent.count("prefill") == 3
    bench.run()
    assert {answer.reason for answer in bench.answers.values()} == {FinishReason.LENGTH}
    assert not bench.metrics.internal_errors


def test_an_event_that_raises_takes_no_other_event_with_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message's other events are handled, and its load is taken."""
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id)
    bad_leg = bench.leg("prefill", POISONED)
    real = handoff._prefill_started

    def raises(book: Any, request: Any, leg: Any, event: Any, now: float) -> None:
        if leg.leg == bad_leg:
            raise Poison("event")
        real(book, request, leg, event, now)

    monkeypatch.setattr(handoff, "_prefill_started", raises)
    bench.run()
    bench.assert_only_the_poisoned_suffers()
    assert bench.metrics.internal_errors == {"event": 1}


def test_an_event_that_cannot_be_read_takes_no_other_event_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id)
    bad_leg = bench.leg("prefill", POISONED)
    real = wire.PrefillStarted

    def raises(leg: int, *rest: Any) -> Any:
        if leg == bad_leg:
            raise Poison("event")
        return real(leg, *rest)

    monkeypatch.setattr(wire, "PrefillStarted", raises)
    bench.run()
    bench.assert_only_the_poisoned_suffers()


def test_the_tick_survives_and_ends_only_the_request_that_broke_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may break in each of its parts: the bounds of waiting of all others still hold."""
    real = admission._waited_too_long

    def raises(book: Any, request: Any, now: float) -> Any:
        if request.request_id == POISONED:
            raise Poison("tick")
        return real(book, request, now)

    monkeypatch.setattr(admission, "_waited_too_long", raises)
    for request_id in ALL:
        bench.submit(request_id, deadline_s=bench.clock.now() + 5.0)
    bench.clock.advance(6.0)
    bench.conductor.tick()
    assert bench.answers[POISONED].error is not None
    assert bench.answers[POISONED].error.reason == "INTERNAL"
    for request_id in INNOCENT:
        error = bench.answers[request_id].error
        assert error is not None
        assert error.reason == "DEADLINE_EXCEEDED"
    assert bench.metrics.internal_errors == {"tick": 1}
    bench.coordinator.check_idle()


@pytest.mark.parametrize("part", ["forget", "tick"])
def test_a_part_of_the_tick_that_always_raises_does_not_stop_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def raises(*_: Any) -> None:
        raise Poison(part)

    monkeypatch.setattr(bench.coordinator._book.workers, part, raises)
    bench.submit("a", deadline_s=bench.clock.now() + 5.0)
    bench.clock.advance(6.0)
    bench.conductor.tick()
    error = bench.answers["a"].error
    assert error is not None
    assert error.reason == "DEADLINE_EXCEEDED"


def test_a_placement_that_raises_fails_only_what_it_was_for(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    real = placement.policy.place_prefill

    def raises(job: Any, *rest: Any) -> Any:
        if job.num_tokens == 21:
            raise Poison("placement")
        return real(job, *rest)

    monkeypatch.setattr(placement.policy, "place_prefill", raises)
    bench.watch()
    for request_id in ALL:
        if request_id == POISONED:
            bench.answers[POISONED], bench.traces[POISONED] = FakeAnswer(""), FakeTrace("")
            bench.records[POISONED] = Recorder()
            spec = RequestSpec(POISONED, tuple(range(21)), 3, payload=inference_pb2.GenerateRequest())
            parts = bench.answers[POISONED], bench.traces[POISONED], bench.records[POISONED]
            bench.conductor.submit(spec, *map(as_any, parts))
        else:
            bench.submit(request_id)
    bench.run(INNOCENT)
    bench.assert_only_the_poisoned_suffers()
    assert bench.metrics.internal_errors == {"placement": 1}


def test_a_loss_that_raises_for_one_request_is_seen_through_for_the_others(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker can join again."""
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id)
    real = handoff.source_gone

    def raises(book: Any, request: Any, *rest: Any, **more: Any) -> None:
        if request.request_id == POISONED:
            raise Poison("loss")
        real(book, request, *rest, **more)

    monkeypatch.setattr(handoff, "source_gone", raises)
    bench.conductor.link_lost(as_any(bench.links["p"]), "cut", crashed=True)
    bench.turn()
    bench.links["p"] = bench.join("p", Role.PREFILL)
    bench.watch()
    bench.coordinator.check()
    bench.clock.advance(1.5)
    bench.conductor.tick()
    bench.run(INNOCENT)
    bench.assert_only_the_poisoned_suffers()


def test_nothing_of_a_request_is_left_however_broken_its_record(bench: Bench) -> None:
    """Its record is so broken that it cannot be failed in order."""
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id)
    request = bench.coordinator._book.requests[POISONED]
    assert request.prefill is not None
    request.prefill.leg = 4711  # its record and the book's contradict each other
    bench.conductor.cancel(POISONED, as_any(bench.answers[POISONED]))
    assert bench.answers[POISONED].over
    bench.coordinator.check()
    assert bench.links["p"].sent.count("cancel") == 1, "the leg that the worker has is given up there"
    bench.run(INNOCENT)
    bench.assert_only_the_poisoned_suffers(reason="CANCELLED")


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
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id, answer="prompt_scored", scores_prompt=request_id == POISONED)
    bench.run(stages=["prefill begins"])
    prompt_tokens = worker_pb2.PromptTokens(leg=bench.leg("prefill", POISONED), position=1)
    prompt_tokens.logprobs.extend([types_pb2.TokenLogprobs(logprob=-1.0)] * 19)
    bench.say("p", [worker_pb2.LegEvent(prompt_tokens=prompt_tokens)])
    bench.run(INNOCENT, [stage for stage in STAGES if stage != "prefill begins"])
    bench.assert_only_the_poisoned_suffers()


def test_every_action_is_poisoned_above() -> None:
    """A new kind of action needs its own case here, or a reason why it concerns no request."""
    from typing import get_args

    names = {kind.__name__ for kind in get_args(actions.Action)}
    of_requests = {
        *("SendLeg", "CancelLeg"),
        *("EmitStarted", "EmitPromptTokens", "EmitTokens", "EmitFinished", "EmitFailed", "StageEnded"),
    }
    assert names == {*of_requests, "HealthChanged", "EjectionChanged", "GroupsChanged", "Defect"}
    assert SendLeg.__name__ in names


@pytest.mark.parametrize("leg_of", ["a request", "a canary"])
def test_an_event_that_cannot_be_read_ends_no_leg_of_another_worker(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, leg_of: str
) -> None:
    """A worker that names a leg of another worker's does no harm, even if the router cannot read what it says."""
    bench.watch()
    if leg_of == "a canary":
        bench = Bench(canaries=True)
        bench.conductor.tick()
        (leg,) = [leg for leg, canary in bench.coordinator._canaries._legs.items() if canary.source is not None]
    else:
        for request_id in ALL:
            bench.submit(request_id)
        found = bench.leg("prefill", POISONED)
        assert found is not None
        leg = found

    def raises(*_: Any) -> Any:
        raise Poison("event")

    with monkeypatch.context() as poisoned:
        poisoned.setattr(wire, "leg_event", raises)
        bench.say("d", [started(leg)])
    assert bench.metrics.internal_errors == {"event": 1}
    if leg_of == "a canary":
        assert bench.coordinator._canaries.has_leg(leg)
        return
    bench.run()
    assert {answer.reason for answer in bench.answers.values()} == {FinishReason.LENGTH}


def test_a_canary_that_cannot_be_given_up_takes_no_other_event_with_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id)
    bad_leg, real = bench.leg("prefill", POISONED), handoff.leg_event

    def raises(*arguments: Any) -> None:
        if arguments[2].leg == bad_leg:
            raise Poison("event")
        real(*arguments)

    def fails(*_: Any) -> None:
        raise Poison("canary")

    monkeypatch.setattr(handoff, "leg_event", raises)
    monkeypatch.setattr(bench.coordinator._canaries, "give_up", fails)
    bench.run()
    bench.assert_only_the_poisoned_suffers()
