"""Canaries whose answers are compared: who is right, who is outvoted, and what a tie says."""

from __future__ import annotations

import pytest

from services.router.coordinator.events import (
    CancelLeg,
    DecodeAdmitted,
    FinishReason,
    ImportReady,
    SendLeg,
)
from services.router.policy import Role
from services.router.policy.health import Health, HealthConfig
from tests.support.router_bench import Deep, is_canary, is_leg, proven_pair, tokens


@pytest.fixture
def bench() -> Deep:
    return proven_pair()


class Asked(Deep):
    """Keeps workers whose canaries give the answer that a test says; three decode workers, all right at first."""

    def __init__(self) -> None:
        super().__init__(health=HealthConfig(canaries=True, recheck_s=30.0))
        self.answer = {"d": (7, 8), "e": (7, 8), "f": (7, 8)}
        for number, worker_id in enumerate(self.answer, 1):
            self.join(worker_id, Role.DECODE, incarnation=number)
            self.reply()

    def reply_once(self) -> list[str]:
        """Answers the canaries that were asked; the workers that were."""
        commands = [each for each in self.take_legs(Role.DECODE) if is_canary(each)]
        for command in commands:
            self.say(command.worker_id, DecodeAdmitted(command.leg))
            token_ids = self.answer[command.worker_id]
            self.say(command.worker_id, tokens(command, *token_ids, finish=FinishReason.LENGTH))
        return [command.worker_id for command in commands]

    def reply(self) -> list[str]:
        """Answers the canaries that were asked, and those that are asked thereupon."""
        asked: list[str] = []
        while more := self.reply_once():
            asked += more
            assert len(asked) < 1000, "they are asked for ever"
        return asked

    def watch(self, seconds: float) -> list[str]:
        asked = []
        for _ in range(int(seconds)):
            self.wait(1.0)
            asked += self.reply()
        return asked


def test_what_is_up_is_asked_again_every_so_often() -> None:
    bench = Asked()
    asked = bench.watch(120)
    assert all(3 <= asked.count(worker_id) <= 5 for worker_id in "def"), asked
    assert {bench.health(worker_id) for worker_id in "def"} == {Health.UP}


def test_a_worker_that_is_busy_is_asked_later_and_not_never() -> None:
    bench = Asked()
    bench.load("d", num_waiting=5, num_running=8)
    assert "d" not in bench.watch(22)
    assert "d" in bench.watch(50)


def test_requests_of_a_worker_that_was_found_wrong_are_moved() -> None:
    bench = Asked()
    bench.submit()
    begun = bench.take_leg(Role.DECODE)
    assert begun.worker_id == "d"
    bench.say("d", DecodeAdmitted(begun.leg))
    bench.answer["d"] = (7, 9)
    moved: list[SendLeg] = []
    for _ in range(60):
        bench.wait(1.0)
        asked = bench.take_legs(Role.DECODE)
        bench.actions += [each for each in asked if is_canary(each)]
        bench.reply_once()
        if moved := [each for each in bench.actions if is_leg(each, Role.DECODE) and not is_canary(each)]:
            break
    assert bench.health("d") is Health.DOWN
    assert [each.worker_id for each in moved] == ["e"]
    assert bench.take(CancelLeg).leg == begun.leg


def test_a_transfer_that_brings_other_tokens_counts_against_the_pair(bench: Deep) -> None:
    bench.add("e", Role.DECODE)
    _, decode = bench.begin_transfer()
    bench.say("e", DecodeAdmitted(decode.leg), ImportReady(decode.leg))
    bench.say("e", tokens(decode, 7, 9, finish=FinishReason.LENGTH))
    pair = bench.coordinator.workers.get("e").sources.get(bench.infos["p"])
    assert pair is not None
    assert (pair.health.num_failures, pair.health.state) == (1, Health.NEW)
    assert "wrong answer" in pair.health.reason
    assert (bench.health("p"), bench.health("e")) == (Health.UP, Health.UP)


@pytest.mark.parametrize("wrong", [(9, 8), (7, 9)], ids=["in its prefill", "in its decode"])
def test_a_damaged_worker_takes_no_request(wrong: tuple[int, ...]) -> None:
    bench = Asked()
    bench.answer["d"] = wrong
    bench.watch(40)
    assert not bench.coordinator.workers.get("d").takes_requests
    assert "wrong answer: token 9 instead of" in bench.coordinator.workers.get("d").health.reason
    assert {bench.health(worker_id) for worker_id in "ef"} == {Health.UP}
    bench.watch(300)
    assert not bench.coordinator.workers.get("d").takes_requests, "each probe says so again"
    bench.answer["d"] = (7, 8)
    bench.watch(30)
    assert bench.health("d") in (Health.RISING, Health.UP)


@pytest.mark.parametrize("answer", [(), (7,)])
def test_an_answer_that_is_too_short_is_none(answer: tuple[int, ...]) -> None:
    """It is asked for two tokens, which nothing can end early. There is nothing wrong to be found in fewer."""
    bench = Deep()
    bench.join("d", Role.DECODE)
    for _ in range(3):
        bench.wait(1.1)
        decode = bench.canary(Role.DECODE)
        bench.say("d", DecodeAdmitted(decode.leg), tokens(decode, *answer, finish=FinishReason.LENGTH))
        assert bench.health("d") is not Health.UP
    assert bench.health("d") is Health.DOWN
