"""Tests that each command says why it goes to its worker: the terms then, the others, and what was in the way.

That the winner is the worker of the command is also asserted of every command on the bench (`check_choice`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from services.core.clock import ManualClock
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    LeaseEnd,
    LeaseEnded,
    SendLeg,
    Stage,
    StageEnded,
)
from services.router.policy import LeftOut, PlacedPhase, PlacementChoice, Role, WhyNot
from services.router.policy.explanation import Decider
from services.router.policy.presets import PRESETS
from tests.support.router_bench import Bench, check_choice, started, tokens

FULL: dict[str, Any] = {"blocks_free": 0, "blocks_active": 64}


def choice_of(command: SendLeg) -> PlacementChoice:
    assert command.choice is not None
    return command.choice


def test_a_prefill_has_the_terms_of_all_candidates(bench: Bench) -> None:
    """P waits for 1000 tokens of 0.5 ms: a half at 500 ms. Both have 64 blocks, of which the prompt takes two."""
    bench.join("p0", Role.PREFILL)
    bench.load("p", queued_prefill_tokens=1000, ms_per_prefill_token=0.5, blocks_free=32, blocks_active=32)
    bench.load("p0", queued_prefill_tokens=0, ms_per_prefill_token=0.5)
    bench.submit()
    choice = choice_of(bench.take_leg(Role.PREFILL))
    assert [each.worker_id for each in choice.scored] == ["p0", "p"]
    winner, other = (dict(choice.weighted(each)) for each in choice.scored)
    assert winner == pytest.approx(
        {"short_queue": 4.0, "free_memory": 62 / 64, "small_batch": 1.0, "dedicated": 2.0, "trusted": 4.0}
    )
    assert other == pytest.approx({**winner, "short_queue": 2.0, "free_memory": 30 / 64})
    verdict = choice.verdict()
    assert (verdict.decider, verdict.term) == (Decider.TERM, "short_queue")
    assert verdict.term_difference == pytest.approx(2.0)
    assert verdict.score_difference == pytest.approx(2.5)
    assert verdict.queue_ms == pytest.approx(500.0)
    assert (choice.phase, choice.at_s, choice.waited_s, choice.before) == (PlacedPhase.PREFILL, bench.now, 0.0, None)


def test_a_decode_says_what_the_next_best_would_have_cost(bench: Bench) -> None:
    bench.join("d0", Role.DECODE, host_id="other")
    for worker_id in ("d", "d0"):
        bench.load(worker_id, ms_per_decode_step=10.0, ms_per_decode_sequence=2.0)
    bench.load("d0", num_running=4)
    _, decode = bench.handed_over()
    choice = choice_of(decode)
    assert [each.worker_id for each in choice.scored] == ["d", "d0"]
    verdict = choice.verdict()
    assert (verdict.term, verdict.term_difference) == ("small_batch", pytest.approx(1.0))
    assert verdict.score_difference == pytest.approx(1.5), "and it is on the same host"
    assert verdict.step_ms == pytest.approx(8.0)


def test_an_unsplit_sequence_is_told_from_a_handoff() -> None:
    bench = Bench()
    bench.join("d", Role.DECODE)
    bench.submit()
    choice = choice_of(bench.take_leg(Role.DECODE))
    assert (choice.phase, choice.verdict().decider) == (PlacedPhase.UNSPLIT, Decider.ONLY)


def test_what_a_prompt_waited_for_is_remembered(bench: Bench) -> None:
    bench.load("p", **FULL)
    bench.submit()
    waiting = bench.coordinator.wait_of("r")
    assert waiting is not None
    since_s, vain = waiting
    assert since_s == bench.now
    assert vain is not None
    assert vain.left_out.named == (LeftOut("p", WhyNot.NO_BLOCKS),)
    bench.wait(0.4)
    bench.load("p", blocks_free=64, blocks_active=0)
    choice = choice_of(bench.take_leg(Role.PREFILL))
    assert choice.waited_s == pytest.approx(0.4)
    assert choice.before is not None
    assert choice.before.left_out.named == (LeftOut("p", WhyNot.NO_BLOCKS),)
    assert bench.coordinator.wait_of("r") is None


def test_why_it_waits_is_noted_once_a_second() -> None:
    bench = Bench(overtake_limit_s=60.0)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    bench.load("p", **FULL)
    bench.submit()

    def noted() -> WhyNot:
        waiting = bench.coordinator.wait_of("r")
        assert waiting is not None
        assert waiting[1] is not None
        return waiting[1].left_out.named[0].why

    assert noted() is WhyNot.NO_BLOCKS
    bench.wait(0.5)
    bench.load("p", blocks_free=63, blocks_active=1, queued_prefill_tokens=8192)
    assert noted() is WhyNot.NO_BLOCKS, "it is tried in every turn, and noting it is not for nothing"
    bench.wait(0.5)
    assert noted() is WhyNot.QUEUE_LIMIT


def test_a_request_that_ends_in_the_queue_says_what_it_waited_for(bench: Bench) -> None:
    bench.load("p", **FULL)
    bench.submit()
    bench.cancel()
    ended = [stage for stage in bench.take_all(StageEnded) if stage.stage is Stage.QUEUE]
    assert [stage.vain_attempt.left_out.number for stage in ended if stage.vain_attempt] == [1]


def test_a_refused_handoff_says_who_refused_it_and_each_placement_is_told(bench: Bench) -> None:
    bench.join("d0", Role.DECODE)
    prefill, decode = bench.handed_over()
    assert decode.worker_id == "d"
    bench.say("d", DecodeRefused(decode.leg))
    again = bench.take_leg(Role.DECODE)
    choice = choice_of(again)
    assert (again.worker_id, choice.verdict().decider) == ("d0", Decider.ONLY)
    assert choice.left_out.named == (LeftOut("d", WhyNot.REFUSED),)
    bench.say("d0", DecodeAdmitted(again.leg))
    bench.say("p", tokens(prefill, 1))
    placed = next(stage for stage in bench.take_all(StageEnded) if stage.stage is Stage.PLACE)
    assert (placed.choice, placed.num_refusals) == (choice, 1)


def test_an_aged_handoff_goes_to_the_nearest_worker_whatever_its_score(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.load("d", **FULL, num_running=1)
    bench.say("p", started(prefill))
    assert not bench.take_legs(Role.DECODE)
    bench.wait(1.1)
    choice = choice_of(bench.take_leg(Role.DECODE))
    assert choice.verdict().decider is Decider.AGED
    assert (choice.winner.worker_id, choice.num_candidates, choice.left_out.number) == ("d", 0, 0)
    assert choice.before is not None
    assert choice.before.left_out.named == (LeftOut("d", WhyNot.NO_BLOCKS),)


def test_what_a_handoff_waited_for_is_no_reason_of_the_prompt_that_is_computed_again(bench: Bench) -> None:
    bench.load("d", **FULL, num_running=1)
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill))
    waiting = bench.coordinator.wait_of("r")
    assert waiting is not None
    assert waiting[1] is not None
    assert waiting[1].phase is PlacedPhase.DECODE
    bench.say("p", LeaseEnded(prefill.leg, LeaseEnd.EXPIRED))
    again = choice_of(bench.take_leg(Role.PREFILL))
    assert (again.before, again.waited_s) == (None, 0.0)


def test_a_record_of_another_worker_is_noticed(bench: Bench) -> None:
    """The check of the bench is no check that cannot fail."""
    bench.join("p0", Role.PREFILL)
    bench.submit()
    command = bench.take_leg(Role.PREFILL)
    check_choice(command, bench.coordinator)
    wrong = bench.coordinator.workers.get("p0" if command.worker_id == "p" else "p").info
    with pytest.raises(AssertionError):
        check_choice(replace(command, worker=wrong), bench.coordinator)


def test_the_clock_of_a_record_is_the_caller_s() -> None:
    bench = Bench()
    bench.clock = ManualClock(5000.0)
    bench.join("d", Role.DECODE)
    bench.submit()
    assert choice_of(bench.take_leg(Role.DECODE)).at_s == 5000.0


@pytest.mark.parametrize("name", PRESETS)
def test_the_terms_of_each_preset_add_up_to_the_scores_that_were_compared(name: str) -> None:
    """Some compare the candidates with one another, and would say something else of each alone."""
    bench = Bench(policy=PRESETS[name])
    for number in range(3):
        bench.join(f"p{number}", Role.PREFILL)
        bench.join(f"d{number}", Role.DECODE)
        bench.load(f"p{number}", queued_prefill_tokens=300 * number, ms_per_prefill_token=0.5)
        bench.load(f"d{number}", num_running=number, ms_per_decode_step=10.0)
    for number in range(4):
        bench.submit(f"r{number}")
        choice = choice_of(bench.take_leg(Role.PREFILL))
        assert len(choice.scored) == 3
        for each in choice.scored:
            assert sum(value for _, value in choice.weighted(each)) == pytest.approx(each.score)
        assert len({name for name, _ in choice.weighted(choice.winner)}) == len(choice.terms)
