"""Tests requests for several answers in the coordinator: one leg of each phase carries all, until some of it must be
computed again; then each answer that has not ended goes on by itself."""

from __future__ import annotations

import pytest

from services.core.errors import (
    ConstraintUnsatisfied,
    DeadlineExceeded,
    InvalidRequest,
    ProtocolViolation,
)
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegFailed,
    SendLeg,
    Stage,
    StageEnded,
)
from services.router.coordinator.request import Phase
from services.router.policy import Role
from tests.support.router_bench import Bench, started, tokens, two_of_each


def sampled(leg: SendLeg, *token_ids: int) -> list[object]:
    """Returns the first tokens of a leg's answers."""
    return [tokens(leg, token_id, index=index) for index, token_id in enumerate(token_ids)]


def decoding(bench: Bench, num_answers: int = 3, **spec: float) -> tuple[SendLeg, SendLeg]:
    """Returns the legs of a request whose decode worker has the blocks, and which has the token 10 * i of answer i."""
    bench.submit(num_answers=num_answers, **spec)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say(prefill.worker_id, started(prefill))
    decode = bench.take_leg(Role.DECODE)
    first = [10 * index for index in range(num_answers)]
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.say(prefill.worker_id, *sampled(prefill, *first))
    bench.say(decode.worker_id, ImportReady(decode.leg), *sampled(decode, *first))
    bench.say(prefill.worker_id, LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    return prefill, decode


def outputs(bench: Bench, num_answers: int = 3) -> list[list[int]]:
    return [bench.output_of("r", index) for index in range(num_answers)]


def test_one_leg_of_each_phase_carries_all(bench: Bench) -> None:
    prefill, decode = decoding(bench)
    assert (prefill.num_answers, decode.num_answers) == (3, 3)
    bench.say("d", tokens(decode, 1, 2, at=1), tokens(decode, 11, at=1, index=1, finish=FinishReason.STOP))
    assert outputs(bench) == [[0, 1, 2], [10, 11], [20]]
    assert bench.ended["r", 1].reason is FinishReason.STOP
    assert not bench.ended["r", 1].is_last
    assert bench.phase() is Phase.DECODING
    bench.say("d", tokens(decode, 3, at=3, finish=FinishReason.LENGTH))
    bench.say("d", tokens(decode, 21, at=1, index=2, finish=FinishReason.LENGTH))
    assert [bench.ended["r", index].is_last for index in range(3)] == [False, False, True]
    assert [bench.ended["r", index].summary.num_output_tokens for index in range(3)] == [4, 2, 2]
    assert not bench.take_all(CancelLeg)
    bench.assert_idle()


def test_the_lease_is_sealed_by_the_last_first_token(bench: Bench) -> None:
    bench.submit(num_answers=2)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), tokens(prefill, 7))
    assert not [each for each in bench.take_all(StageEnded) if each.stage is Stage.PREFILL]
    bench.say("p", tokens(prefill, 8, index=1))
    [sealed] = [each for each in bench.take_all(StageEnded) if each.stage is Stage.PREFILL]
    assert sealed.outcome == "done"
    bench.cancel()
    bench.assert_idle()


def test_first_tokens_that_end_all_answers_end_the_lease(bench: Bench) -> None:
    bench.submit(num_answers=2, max_tokens=1)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    ends = [tokens(prefill, 7 + index, index=index, finish=FinishReason.LENGTH) for index in range(2)]
    bench.say("p", *ends)
    assert bench.finished["r"].index == 1
    assert [cancel.leg for cancel in bench.take_all(CancelLeg)] == [decode.leg], "the source has closed its own"
    bench.assert_idle()


@pytest.mark.parametrize("index", [-1, 3, 99])
def test_tokens_of_no_answer_fail_the_leg(bench: Bench, index: int) -> None:
    bench.submit(num_answers=3)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), tokens(prefill, 7, index=index))
    assert prefill.leg in {cancel.leg for cancel in bench.take_all(CancelLeg)}
    bench.cancel()


def test_a_first_token_that_comes_twice_fails_the_leg(bench: Bench) -> None:
    bench.submit(num_answers=2)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill), tokens(prefill, 7), tokens(prefill, 7))
    assert prefill.leg in [cancel.leg for cancel in bench.take_all(CancelLeg)]
    bench.cancel()


def test_a_stop_string_ends_its_answer_on_the_worker_too(bench: Bench) -> None:
    _, decode = decoding(bench)
    bench.stop_string(index=1)
    cancel = bench.take(CancelLeg)
    assert (cancel.leg, cancel.index) == (decode.leg, 1)
    bench.say("d", tokens(decode, 11, 12, at=1, index=1), tokens(decode, 1, at=1))
    assert outputs(bench) == [[0, 1], [10], [20]], "what was on its way is of no interest"
    bench.stop_string(index=1)  # a second one finds nothing
    bench.stop_string(index=0)
    bench.take_all(CancelLeg)
    bench.stop_string(index=2)
    assert bench.take(CancelLeg).index is None, "the last one ends the leg"
    assert bench.finished["r"].index == 2
    bench.assert_idle()


def test_an_answer_that_ended_before_the_handoff_was_placed_is_not_begun(bench: Bench) -> None:
    bench.submit(num_answers=3)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say("d", DecodeRefused(decode.leg))
    bench.say("p", *sampled(prefill, 0, 10, 20))
    bench.stop_string(index=1)
    assert not bench.take_all(CancelLeg), "no leg has it yet"
    bench.wait(1.0)
    bench.load("d")
    again = bench.take_leg(Role.DECODE)
    cancel = bench.take(CancelLeg)
    assert (cancel.leg, cancel.index, again.num_answers) == (again.leg, 1, 3)
    bench.cancel()
    bench.assert_idle()


def test_a_fault_before_any_token_computes_all_again_together() -> None:
    bench = two_of_each()
    bench.submit(num_answers=3)
    prefill = bench.take_leg(Role.PREFILL)
    bench.lose(prefill.worker_id)
    again = bench.take_leg(Role.PREFILL)
    assert (again.num_answers, again.index, again.output_base) == (3, 0, 0)
    bench.cancel()
    bench.assert_idle()


def test_a_lost_decode_worker_that_was_importing_leaves_the_lease_for_all() -> None:
    bench = two_of_each()
    bench.submit(num_answers=2)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say(prefill.worker_id, started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.say(prefill.worker_id, *sampled(prefill, 0, 10))
    bench.lose(decode.worker_id)
    again = bench.take_leg(Role.DECODE)
    assert again.handoff == decode.handoff
    assert again.num_answers == 2
    bench.say(again.worker_id, DecodeAdmitted(again.leg), ImportReady(again.leg), *sampled(again, 0, 10))
    bench.say(again.worker_id, tokens(again, 1, at=1, finish=FinishReason.STOP))
    bench.say(again.worker_id, tokens(again, 11, at=1, finish=FinishReason.STOP, index=1))
    assert outputs(bench, 2) == [[0, 1], [10, 11]]
    bench.say(prefill.worker_id, LeaseEnded(prefill.leg, LeaseEnd.RELEASED))
    bench.assert_idle()


def come_apart(bench: Bench) -> list[SendLeg]:
    """Returns the prefill legs of the parts after answer 1 has ended and the decode worker was lost."""
    _, decode = decoding(bench)
    bench.say(decode.worker_id, tokens(decode, 1, 2, at=1), tokens(decode, 11, at=1, index=1, finish=FinishReason.STOP))
    bench.lose(decode.worker_id)
    return bench.take_legs(Role.PREFILL)


def test_a_lost_decode_worker_means_a_replay_of_what_had_not_ended() -> None:
    bench = two_of_each()
    first, second = come_apart(bench)
    prompt = tuple(range(20))
    assert (first.index, first.num_answers, first.token_ids, first.output_base) == (0, 1, (*prompt, 0, 1, 2), 3)
    assert (second.index, second.num_answers, second.token_ids, second.output_base) == (2, 1, (*prompt, 20), 1)
    for leg, token_id in ((second, 21), (first, 3)):
        bench.say(leg.worker_id, started(leg), tokens(leg, token_id))
        decode = bench.take_leg(Role.DECODE)
        assert decode.index == leg.index
        bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, token_id))
        at = decode.output_base + 1
        bench.say(decode.worker_id, tokens(decode, token_id + 1, at=at, finish=FinishReason.LENGTH))
        bench.say(leg.worker_id, LeaseEnded(leg.leg, LeaseEnd.RELEASED))
    assert outputs(bench) == [[0, 1, 2, 3, 4], [10, 11], [20, 21, 22]]
    assert [bench.ended["r", index].is_last for index in range(3)] == [True, False, False]
    assert bench.finished["r"].summary.num_retries == 1
    bench.assert_idle()


def test_parts_are_one_request_to_the_client() -> None:
    bench = two_of_each()
    legs = come_apart(bench)
    assert bench.coordinator.stage_of("r") is not None
    bench.cancel()
    assert {cancel.leg for cancel in bench.take_all(CancelLeg)} >= {leg.leg for leg in legs}
    assert set(bench.failed) == {"r"}
    bench.assert_idle()


def test_a_part_that_fails_for_good_ends_the_others() -> None:
    bench = two_of_each()
    first, second = come_apart(bench)
    bench.say(first.worker_id, LegFailed(first.leg, InvalidRequest("token_ids", "no")))
    assert second.leg in {cancel.leg for cancel in bench.take_all(CancelLeg)}
    assert set(bench.failed) == {"r"}
    bench.assert_idle()


def test_crashes_before_it_came_apart_count_for_each_part() -> None:
    bench = two_of_each()
    _, part = come_apart(bench)
    for _ in range(CoordinatorConfig.max_crashes - 1):
        assert not bench.failed
        bench.say(part.worker_id, LegFailed(part.leg, ProtocolViolation("a step raised")))
        bench.wait(CoordinatorConfig.last_chance_pause_s)
        part = next(iter(bench.take_legs(Role.PREFILL)), part)
    assert set(bench.failed) == {"r"}
    bench.assert_idle()


def test_a_stop_string_ends_a_part() -> None:
    bench = two_of_each()
    first, second = come_apart(bench)
    bench.stop_string(index=2)
    assert bench.take(CancelLeg).leg == second.leg
    assert "r" not in bench.finished
    bench.stop_string(index=0)
    assert bench.take(CancelLeg).leg == first.leg
    assert bench.finished["r"].index == 0
    bench.assert_idle()


def test_a_drained_worker_gives_each_answer_to_others() -> None:
    bench = two_of_each()
    _, decode = decoding(bench)
    assert bench.migrate(decode.worker_id) == 1
    assert [leg.index for leg in bench.take_legs(Role.PREFILL)] == [0, 1, 2]
    bench.cancel()
    bench.assert_idle()


def test_the_deadline_ends_all_parts_whatever_workers_do() -> None:
    bench = two_of_each()
    _, decode = decoding(bench, 2, deadline_s=bench.now + 5.0)
    bench.migrate(decode.worker_id)
    legs = bench.take_legs(Role.PREFILL)
    bench.wait(6.0)
    assert isinstance(bench.failed["r"], DeadlineExceeded)
    assert {cancel.leg for cancel in bench.take_all(CancelLeg)} >= {leg.leg for leg in legs}
    bench.assert_idle()


def test_the_loss_of_a_worker_under_all_parts_fails_the_request_once() -> None:
    bench = two_of_each()
    come_apart(bench)
    for worker_id in ("p1", "p2"):
        bench.lose(worker_id)
    bench.lose("d2" if bench.coordinator.workers.get("d2").has_session else "d1")
    bench.wait(120.0)
    assert set(bench.failed) == {"r"}
    bench.assert_idle()


def test_a_failed_leg_fails_for_all_its_answers(bench: Bench) -> None:
    _, decode = decoding(bench)
    bench.say("d", LegFailed(decode.leg, ProtocolViolation("a step raised")))
    assert [leg.index for leg in bench.take_legs(Role.PREFILL)] == [0, 1, 2]
    bench.cancel()
    bench.assert_idle()


def test_an_answer_that_was_given_up_fails_no_other(bench: Bench) -> None:
    """Its worker went on with it until the cancel came, and found no token."""
    _, decode = decoding(bench)
    bench.stop_string(index=1)
    unsatisfied = ConstraintUnsatisfied("nothing is left")
    bench.say("d", LegFailed(decode.leg, unsatisfied))
    assert "r" not in bench.failed
    parts = bench.take_legs(Role.PREFILL)
    assert [part.index for part in parts] == [0, 2]
    bench.say("p", LegFailed(parts[0].leg, unsatisfied))
    assert set(bench.failed) == {"r"}, "it was this one"
    bench.assert_idle()
