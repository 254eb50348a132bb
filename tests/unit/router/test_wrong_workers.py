"""Tests verdicts: from one on nothing that the worker has computed is found or goes on, and all else does."""

from __future__ import annotations

from typing import Any

import pytest

from baton.v1 import types_pb2
from services.core.errors import WrongOutput
from services.core.hashing import block_hashes, short_hashes
from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    FinishReason,
    ImportReady,
    PromptTokens,
    SendLeg,
)
from services.router.coordinator.request import Phase
from services.router.policy import Fingerprint, Role
from services.router.policy.health import Health, HealthConfig
from tests.support.router_bench import BUSY, Bench, Deep, is_canary, parked, started, tokens

INCARNATIONS = {"p1": 11, "p2": 12, "d1": 21, "d2": 22, "s": 31}
ROLES = {"p": Role.PREFILL, "d": Role.DECODE, "s": Role.STORE}
"""By the first letters of names."""


def joined(*worker_ids: str, **facts: Any) -> Bench:
    bench = Bench()
    for worker_id in worker_ids:
        bench.join(worker_id, ROLES[worker_id[0]], incarnation=INCARNATIONS[worker_id], **facts)
    return bench


@pytest.fixture
def bench() -> Bench:
    """Has two workers of each kind; "p1" and "d1" are chosen first."""
    return joined("p1", "p2", "d1", "d2")


def hear(bench: Bench, worker_id: str, number: int = 1) -> None:
    """Tells of a verdict, as a worker does that has heard of it from another router."""
    bench.coordinator.verdicts_heard({INCARNATIONS[worker_id]: number}, bench.now)
    bench._absorb()


def health(bench: Bench, worker_id: str) -> Health:
    return bench.coordinator.workers.get(worker_id).health.state


class Judged(Deep):
    """Answers its workers' canaries, all alike but for the first tokens of "p1"."""

    def __init__(self, first_token: int = 7) -> None:
        super().__init__(health=HealthConfig(canaries=True, recheck_s=30.0))
        self.first_token = first_token
        """What "p1" answers."""

    def meet(self, *worker_ids: str) -> None:
        """Has workers join one after the other, and answer."""
        for worker_id in worker_ids:
            self.join(worker_id, ROLES[worker_id[0]], incarnation=INCARNATIONS[worker_id])
            self.reply()

    def reply(self) -> None:
        """Answers all canaries that are asked, and those that are asked thereupon."""
        for _ in range(20):
            asked = [*self.take_legs(Role.PREFILL), *self.take_legs(Role.DECODE)]
            if not asked:
                return
            for command in asked:
                self._answer(command)
        raise AssertionError("canaries are asked on and on")

    def _answer(self, command: SendLeg) -> None:
        assert is_canary(command)
        first = self.first_token if command.worker_id == "p1" else 7
        if command.phase is Role.PREFILL:
            finish = FinishReason.LENGTH if command.max_tokens == 1 else None
            self.say(command.worker_id, started(command), tokens(command, first, finish=finish))
        elif command.handoff is None:
            self.say(command.worker_id, DecodeAdmitted(command.leg))
            self.say(command.worker_id, tokens(command, 7, 8, finish=FinishReason.LENGTH))
        else:
            self.say(command.worker_id, DecodeAdmitted(command.leg), ImportReady(command.leg))
            self.say(command.worker_id, tokens(command, 7, 8, finish=FinishReason.LENGTH))

    def judge(self) -> None:
        """Waits until "p1" was asked again, and has answered."""
        for _ in range(60):
            if health(self, "p1") is Health.DOWN:
                return
            self.wait(1.0)
            self.reply()
        raise AssertionError("it is never found wrong")


def test_a_worker_is_judged_once_until_it_is_used_again() -> None:
    """It may have computed for other routers, also if it has not for this one."""
    bench = Judged()
    bench.meet("p1", "p2", "d1")
    bench.first_token = 9
    bench.judge()
    assert bench.coordinator.verdicts.num_of == {11: 1}
    epoch = bench.coordinator.verdicts.epoch
    for _ in range(60):  # it is asked again and again, and nothing was placed there meanwhile
        bench.wait(1.0)
        bench.reply()
    assert bench.coordinator.verdicts.epoch == epoch != ""
    for first_token in (7, 9):
        bench.first_token = first_token
        for _ in range(60):
            bench.wait(1.0)
            bench.reply()
    assert bench.coordinator.verdicts.num_of == {11: 2}, "it was mended, and is wrong again"


def test_a_worker_that_was_never_used_spoils_nothing() -> None:
    bench = Judged(first_token=9)
    bench.meet("p2", "d1", "p1")
    assert health(bench, "p1") is Health.DOWN
    assert bench.coordinator.verdicts.epoch == ""


def test_blocks_are_named_anew_from_a_verdict_on(bench: Bench) -> None:
    """So what is cached anywhere, whoever has computed it on the ground of what, is not found."""
    hear(bench, "p1")
    bench.submit(block_hashes={16: short_hashes(block_hashes(range(20), 16))})
    prefill = bench.take_leg(Role.PREFILL)
    assert prefill.worker_id == "p2"
    assert prefill.spec.epoch == bench.coordinator.verdicts.epoch != ""
    assert not prefill.spec.block_hashes, "they name blocks as they were named before"
    bench.say("p2", started(prefill), tokens(prefill, 100))
    assert bench.take_leg(Role.DECODE).spec.epoch == prefill.spec.epoch


def test_what_waits_in_the_queue_is_named_anew(bench: Bench) -> None:
    for worker_id in ("p1", "p2"):
        bench.load(worker_id, num_waiting=9, queued_prefill_tokens=100_000, blocks_free=0, blocks_active=64)
    bench.submit()
    assert bench.phase() is Phase.QUEUED
    hear(bench, "p1")
    bench.load("p2", num_waiting=0, queued_prefill_tokens=0, blocks_free=64, blocks_active=0)
    assert bench.take_leg(Role.PREFILL).spec.epoch == bench.coordinator.verdicts.epoch != ""


def test_all_who_have_heard_the_same_are_in_one_epoch() -> None:
    one, other = joined("p1", "p2"), joined("p1", "p2")
    hear(one, "p1")
    hear(one, "p2")
    hear(other, "p2")
    assert one.coordinator.verdicts.epoch != other.coordinator.verdicts.epoch
    hear(other, "p1")
    assert one.coordinator.verdicts.epoch == other.coordinator.verdicts.epoch
    again = one.coordinator.verdicts.epoch
    hear(one, "p1", number=2)
    assert one.coordinator.verdicts.epoch != again, "it was mended, and is wrong again"


def test_what_another_router_has_found_wrong_is_out_of_use_here_too(bench: Bench) -> None:
    hear(bench, "p1")
    assert health(bench, "p1") is Health.DOWN
    hear(bench, "p1")
    bench.wait(1.1)
    assert health(bench, "p1") is Health.PROBING, "the same verdict is no news"


def test_a_request_without_output_is_begun_again(bench: Bench) -> None:
    prefill, decode = bench.handed_over()
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.take_all(CancelLeg)
    hear(bench, prefill.worker_id)
    assert {each.leg for each in bench.take_all(CancelLeg)} == {prefill.leg, decode.leg}
    again = bench.take_leg(Role.PREFILL)
    assert (again.worker_id, again.spec.epoch) == ("p2", bench.coordinator.verdicts.epoch)
    bench.finish(again, [201, 202])


def test_a_request_that_has_output_of_it_ends_with_data_loss(bench: Bench) -> None:
    prefill, decode = bench.decoding()
    hear(bench, prefill.worker_id)
    assert isinstance(bench.failed["r"], WrongOutput)
    assert decode.leg in {each.leg for each in bench.take_all(CancelLeg)}
    bench.assert_idle()


def test_a_request_that_others_have_computed_goes_on(bench: Bench) -> None:
    prefill, decode = bench.decoding()
    hear(bench, "p2")
    assert (prefill.worker_id, bench.failed) == ("p1", {})
    bench.say(decode.worker_id, tokens(decode, 101, at=1, finish=FinishReason.STOP))
    assert bench.output["r"] == [100, 101]


def test_output_of_others_is_kept_where_only_the_decode_worker_is_wrong(bench: Bench) -> None:
    """It has said nothing yet but what its source had said."""
    prefill, decode = bench.handed_over()
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg))
    bench.say(prefill.worker_id, tokens(prefill, 100))
    hear(bench, decode.worker_id)
    again = bench.take_leg(Role.PREFILL)
    assert again.token_ids[-1] == 100
    bench.finish(again, [100, 201, 202])


def test_output_of_a_wrong_decode_worker_is_lost_wherever_it_goes_on(bench: Bench) -> None:
    _, decode = bench.decoding()
    bench.say(decode.worker_id, tokens(decode, 101, at=1))
    bench.lose(decode.worker_id)
    hear(bench, decode.worker_id)
    assert isinstance(bench.failed["r"], WrongOutput)
    bench.assert_idle()


@pytest.mark.parametrize("where", ["at its source", "at its destination"])
def test_what_was_found_in_a_cache_may_be_anybodys(bench: Bench, where: str) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill, cached_tokens=16 if where == "at its source" else 0), tokens(prefill, 100))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg, 16 if where == "at its destination" else 0))
    bench.say(decode.worker_id, ImportReady(decode.leg), tokens(decode, 100), tokens(decode, 101, at=1))
    hear(bench, "p2")
    assert isinstance(bench.failed["r"], WrongOutput)
    bench.assert_idle()


def test_what_was_found_in_the_cache_of_workers_of_other_weights_goes_on() -> None:
    bench = joined("p1", "d1")
    bench.join("p2", Role.PREFILL, incarnation=12, fingerprint=Fingerprint("other"))
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill, cached_tokens=16), tokens(prefill, 100))
    hear(bench, "p2")
    assert not bench.failed
    decode = bench.take_leg(Role.DECODE)
    bench.say("d1", DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 100))
    bench.say("d1", tokens(decode, 101, at=1, finish=FinishReason.STOP))
    assert bench.output["r"] == [100, 101]


@pytest.mark.parametrize("moment", ["the prompt begins", "the handoff is admitted", "it was preempted"])
def test_what_is_found_later_by_an_older_name_is_begun_again(bench: Bench, moment: str) -> None:
    """A leg was sent before the verdict, and has found blocks since."""
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    if moment == "the prompt begins":
        hear(bench, "p2")
        bench.say("p1", started(prefill, cached_tokens=16))
        output = []
    else:
        bench.say("p1", started(prefill), tokens(prefill, 100))
        decode = bench.take_leg(Role.DECODE)
        if moment == "it was preempted":
            bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 100))
        hear(bench, "p2")
        bench.say(decode.worker_id, DecodeAdmitted(decode.leg, 16))
        output = [100]
    again = bench.take_leg(Role.PREFILL)
    assert again.spec.epoch == bench.coordinator.verdicts.epoch
    bench.finish(again, [*output, 201, 202])


def test_a_handoff_at_a_store_is_the_source_s_still() -> None:
    bench = joined("p1", "p2", "d1", "s")
    bench.load("d1", **BUSY)
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill), tokens(prefill, 100))
    bench.wait(0.2)
    park = bench.take_leg(Role.STORE)
    bench.say("s", DecodeAdmitted(park.leg), parked(park))
    hear(bench, "p1")
    assert isinstance(bench.failed["r"], WrongOutput), "its first token was the source's"
    bench.assert_idle()


def test_what_is_found_later_is_begun_again_from_a_store_too() -> None:
    """The store's handoff has an older name as well, and would be found there again and again."""
    bench = joined("p1", "p2", "d1", "s")
    bench.load("d1", **BUSY)
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill), tokens(prefill, 100))
    bench.wait(0.2)
    park = bench.take_leg(Role.STORE)
    bench.say("s", DecodeAdmitted(park.leg), parked(park))
    bench.load("d1", num_running=0, blocks_active=0, num_waiting=0, blocks_free=64)
    decode = bench.take_leg(Role.DECODE)
    hear(bench, "p2")
    bench.say("d1", DecodeAdmitted(decode.leg, 16))
    again = bench.take_leg(Role.PREFILL)
    assert again.spec.epoch == bench.coordinator.verdicts.epoch
    bench.finish(again, [100, 201, 202])


def test_tokens_of_a_decode_worker_are_its_source_s_too(bench: Bench) -> None:
    """Its events may be the first to come, and then repeat nothing."""
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg), tokens(decode, 100))
    hear(bench, "p1")
    assert isinstance(bench.failed["r"], WrongOutput)
    bench.assert_idle()


def test_log_probabilities_of_a_prompt_are_output(bench: Bench) -> None:
    bench.submit(scores_prompt=True)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill), PromptTokens(prefill.leg, 1, [types_pb2.TokenLogprobs(logprob=-1.0)]))
    hear(bench, "p1")
    assert isinstance(bench.failed["r"], WrongOutput)
    bench.assert_idle()


def test_answers_that_have_come_apart_end_together(bench: Bench) -> None:
    bench.submit(num_answers=2)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill), tokens(prefill, 100), tokens(prefill, 200, index=1))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg))
    bench.lose(decode.worker_id)
    hear(bench, "p1")
    assert isinstance(bench.failed["r"], WrongOutput)
    bench.assert_idle()


def test_an_answer_that_has_ended_with_what_is_wrong_ends_those_that_it_came_apart_from(bench: Bench) -> None:
    bench.submit(num_answers=2)
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill), tokens(prefill, 100), tokens(prefill, 200, index=1))
    decode = bench.take_leg(Role.DECODE)
    bench.say(decode.worker_id, DecodeAdmitted(decode.leg), ImportReady(decode.leg))
    bench.lose(decode.worker_id)
    first, second = bench.take_legs(Role.PREFILL)
    assert {first.worker_id, second.worker_id} == {"p1", "p2"}
    ended, runs = (first, second) if first.worker_id == "p2" else (second, first)
    bench.say("p2", started(ended), tokens(ended, 101, at=1, finish=FinishReason.STOP))
    bench.say("p1", started(runs), tokens(runs, 201, at=1))
    hear(bench, "p2")
    assert isinstance(bench.failed["r"], WrongOutput)
    bench.assert_idle()


def test_a_verdict_on_a_worker_that_is_not_known_here_may_concern_every_cache(bench: Bench) -> None:
    bench.submit()
    prefill = bench.take_leg(Role.PREFILL)
    bench.say("p1", started(prefill, cached_tokens=16), tokens(prefill, 100))
    bench.coordinator.verdicts_heard({99: 1}, bench.now)
    bench._absorb()
    assert isinstance(bench.failed["r"], WrongOutput)


@pytest.mark.parametrize("is_mended", [False, True])
def test_a_worker_under_a_verdict_gives_no_first_answer_at_a_router_that_starts(is_mended: bool) -> None:
    """Else it would be right, and all others wrong."""
    bench = Judged(first_token=7 if is_mended else 9)
    hear(bench, "p1")
    bench.meet("p1", "d1")
    assert health(bench, "p1") is not Health.UP
    for _ in range(20):
        bench.wait(1.0)
        bench.reply()
    assert health(bench, "d1") is Health.UP
    assert (health(bench, "p1") in (Health.UP, Health.RISING)) is is_mended


@pytest.mark.parametrize("num_others", [1, 2])
def test_what_a_worker_under_a_verdict_answered_first_makes_no_other_wrong(num_others: int) -> None:
    """This router has begun while the worker computed wrong already, and had no other to compare it with."""
    bench = Judged(first_token=9)
    bench.meet("p1")
    hear(bench, "p1")
    others = ["p2", "d1"][:num_others]
    bench.meet(*others)
    for _ in range(240):
        bench.wait(1.0)
        bench.reply()
    assert bench.coordinator.verdicts.num_of == {INCARNATIONS["p1"]: 1}
    assert [health(bench, worker_id) for worker_id in others] == [Health.UP] * num_others
    assert health(bench, "p1") not in (Health.UP, Health.RISING)
