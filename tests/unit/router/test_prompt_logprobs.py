"""Tests how the coordinator passes on the log-probabilities of a prompt: once, in order, before any output, whatever
fails."""

from __future__ import annotations

from typing import Any

import pytest

from services.router.coordinator.events import DecodeAdmitted, EmitPromptTokens, ImportReady, PromptTokens, SendLeg
from services.router.coordinator.request import Phase
from services.router.policy import Fingerprint, Role
from tests.support.router_bench import Bench, started, tokens, two_of_each


def scores(leg: SendLeg, position: int, *entries: Any) -> PromptTokens:
    return PromptTokens(leg.leg, position, entries)


def received(bench: Bench) -> list[Any]:
    """Returns what was passed on since the last look, and asserts that nothing is missing in between."""
    found: list[Any] = []
    first = None
    for action in bench.take_all(EmitPromptTokens):
        first = action.position if first is None else first
        assert action.position == first + len(found)
        found += action.logprobs
    return found


def test_a_handoff_is_offered_when_the_prompt_is_scored(bench: Bench) -> None:
    bench.submit(num_tokens=5, scores_prompt=True)
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.scores_prompt
    bench.say("p", started(prefill), scores(prefill, 1, "a", "b"))
    assert not bench.take_legs(Role.DECODE)
    assert bench.phase() is Phase.PREFILLING
    bench.say("p", scores(prefill, 3, "c", "d"))
    decode = bench.take_leg(Role.DECODE)
    assert not decode.scores_prompt, "it has a handoff"
    assert received(bench) == ["a", "b", "c", "d"]
    bench.say("d", DecodeAdmitted(decode.leg))
    bench.say("p", tokens(prefill, 7))
    bench.say("d", ImportReady(decode.leg), tokens(decode, 7))
    assert bench.output["r"] == [7]
    bench.cancel()
    bench.assert_idle()


def test_what_was_not_asked_for_ends_the_leg(bench: Bench) -> None:
    bench.submit(num_tokens=5)
    prefill = bench.take_leg(Role.PREFILL)
    assert not prefill.scores_prompt
    bench.say("p", started(prefill), scores(prefill, 1, "a"))
    assert not received(bench)
    assert bench.take_leg(Role.PREFILL).leg > prefill.leg


@pytest.mark.parametrize("position", [0, 2, -1, 5])
def test_a_gap_ends_the_leg(bench: Bench, position: int) -> None:
    bench.submit(num_tokens=5, scores_prompt=True)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), scores(prefill, position, "a"))
    assert not received(bench)
    assert bench.take_leg(Role.PREFILL).scores_prompt


def test_more_than_the_prompt_has_ends_the_leg(bench: Bench) -> None:
    bench.submit(num_tokens=3, scores_prompt=True)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), scores(prefill, 1, "a", "b", "c"))
    assert not received(bench)
    bench.take_leg(Role.PREFILL)


def test_output_before_all_is_scored_ends_the_leg(bench: Bench) -> None:
    bench.submit(num_tokens=5, scores_prompt=True)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), scores(prefill, 1, "a"), tokens(prefill, 7))
    assert bench.output["r"] == []
    bench.take_leg(Role.PREFILL)


def test_a_replay_sends_the_rest_and_repeats_nothing() -> None:
    bench = two_of_each()
    bench.submit(num_tokens=5, scores_prompt=True)
    first = bench.take_leg(Role.PREFILL)
    bench.say(first.worker_id, started(first), scores(first, 1, "a", "b"))
    bench.lose(first.worker_id)
    again = bench.take_leg(Role.PREFILL)
    assert again.scores_prompt
    assert again.worker_id != first.worker_id
    bench.say(again.worker_id, started(again), scores(again, 1, "A", "B", "C"), scores(again, 4, "D"))
    assert received(bench) == ["a", "b", "C", "D"]
    bench.cancel()
    bench.assert_idle()


def test_a_replay_of_a_scored_prompt_asks_for_nothing() -> None:
    bench = two_of_each()
    bench.submit(num_tokens=3, scores_prompt=True)
    first = bench.take_leg(Role.PREFILL)
    bench.say(first.worker_id, started(first), scores(first, 1, "a", "b"), tokens(first, 7))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 7))
    bench.lose(decode.worker_id)
    again = bench.take_leg(Role.PREFILL)
    assert not again.scores_prompt
    assert again.token_ids == (0, 1, 2, 7)
    bench.cancel()
    bench.assert_idle()


def test_scores_bind_a_request_to_the_weights_they_came_from() -> None:
    bench = Bench()
    for worker_id, weights in (("a", "L"), ("b", "M"), ("c", "L")):
        bench.join(worker_id, Role.DECODE, fingerprint=Fingerprint(weights))
    bench.submit("bound", num_tokens=5, scores_prompt=True)
    bench.submit("free", num_tokens=5, scores_prompt=True)
    bound, free = bench.take_legs(Role.DECODE)
    assert (bound.worker_id, free.worker_id) == ("a", "b")
    bench.say("a", DecodeAdmitted(bound.leg), scores(bound, 1, "a"))
    for worker_id in ("c", "a"):
        bench.lose(worker_id)
    assert not bench.take_legs(Role.DECODE), "its weights are gone"
    bench.join("c", Role.DECODE, incarnation=2)
    assert bench.take_leg(Role.DECODE).worker_id == "c"
    bench.cancel("bound")
    bench.cancel("free")
    bench.assert_idle()


def test_an_unsplit_leg_scores_before_its_first_token(bench: Bench) -> None:
    bench.lose("p")
    bench.submit(num_tokens=3, scores_prompt=True)
    leg = bench.take_leg(Role.DECODE)
    assert leg.scores_prompt
    assert leg.handoff is None
    bench.say("d", DecodeAdmitted(leg.leg), scores(leg, 1, "a", "b"), tokens(leg, 7))
    assert received(bench) == ["a", "b"]
    assert bench.output["r"] == [7]
    bench.cancel()
    bench.assert_idle()
