"""Tests the health state machine, as tables of what happens and what follows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router import main
from services.router.config import RouterConfig
from services.router.policy import PolicyConfig
from services.router.policy.health import TRANSITIONS, Health, HealthConfig, HealthRecord

SHALLOW = HealthConfig()
WITH_CANARIES = HealthConfig(canaries=True)

# f failure, F failure beyond doubt, s success, r restart: at one moment, but for - 0.2 s, . 1 s, : 31 s.
CASES = {
    "innocent until proven guilty": (SHALLOW, "", Health.UP),
    "new until proven able": (WITH_CANARIES, "", Health.NEW),
    "one success proves it": (WITH_CANARIES, "s", Health.UP),
    "a failure makes it suspect": (SHALLOW, "f", Health.SUSPECT),
    "two failures too": (SHALLOW, "f-f", Health.SUSPECT),
    "three failures take it down": (SHALLOW, "f-f-f", Health.DOWN),
    "failures of one moment are one": (SHALLOW, "fff", Health.SUSPECT),
    "successes between are no row": (SHALLOW, "f-fss-f-f", Health.SUSPECT),
    "one success is not enough": (SHALLOW, "fs", Health.SUSPECT),
    "two are": (SHALLOW, "fss", Health.UP),
    "a lone success does not wash failures off": (SHALLOW, "f-fs-f", Health.DOWN),
    "a suspect is forgiven in time": (SHALLOW, "f:", Health.UP),
    "new and failing": (WITH_CANARIES, "f-f", Health.NEW),
    "new and failing for good": (WITH_CANARIES, "f-f-f", Health.DOWN),
    "stuck is down at once": (SHALLOW, "F", Health.DOWN),
    "what is down stays down for a while": (SHALLOW, "f-f-f-ss", Health.DOWN),
    "and is probed after it": (SHALLOW, "f-f-f.", Health.PROBING),
    "as long as it is stuck it is not": (SHALLOW, "F-F-F-F-F-F-F-F-F", Health.DOWN),
    "but soon after that": (SHALLOW, "F-F-F-F-F-F-F.", Health.PROBING),
    "one probe answered": (SHALLOW, "F.s", Health.PROBING),
    "two probes answered": (SHALLOW, "F.ss", Health.RISING),
    "a failed probe": (SHALLOW, "F.f", Health.DOWN),
    "the pause doubles": (SHALLOW, "F.f.", Health.DOWN),
    "doubled": (SHALLOW, "F.f..", Health.PROBING),
    "slow start ends": (SHALLOW, "F.ss:", Health.UP),
    "a failure in slow start": (SHALLOW, "F.ss.f", Health.DOWN),
    "a new process is new": (WITH_CANARIES, "sr", Health.NEW),
    "a new process without canaries": (SHALLOW, "fr", Health.SUSPECT),
    "a new process does not end the pause": (WITH_CANARIES, "f-f-fr", Health.DOWN),
}
_SECONDS = {"-": 0.2, ".": 1.0, ":": 31.0}


class Life:
    def __init__(self, config: HealthConfig) -> None:
        self.now = 100.0
        self.record = HealthRecord(config, self.now)

    def play(self, letters: str) -> Health:
        for letter in letters:
            self.now += _SECONDS.get(letter, 0.0)
            self.act(letter)
            self.record.tick(self.now)
        return self.record.state

    def act(self, letter: str) -> None:
        record, now = self.record, self.now
        match letter:
            case "f":
                record.failed("broken", now)
            case "F":
                record.failed("stuck", now, at_once=True)
            case "s":
                record.succeeded(now)
            case "r":
                record.restarted(now)
            case "p":
                record.probed(now)


@pytest.mark.parametrize("case", CASES)
def test_table(case: str) -> None:
    config, letters, expected = CASES[case]
    assert Life(config).play(letters) is expected


def test_reasons_last_until_it_is_up() -> None:
    life = Life(SHALLOW)
    life.play("f")
    assert (life.record.reason, life.record.num_failures) == ("broken", 1)
    life.play("ss")
    assert (life.record.reason, life.record.num_failures) == ("", 0)


def test_slow_start_is_a_ramp() -> None:
    life = Life(SHALLOW)
    life.play("F.ss")
    ramp = life.record.ramp
    assert ramp is not None
    assert [ramp.at(life.now + seconds) for seconds in (-1, 0, 5, 10, 99)] == [0, 0, 0.5, 1, 1]
    life.play(":")
    assert life.record.ramp is None


@pytest.mark.parametrize("deep", [True, False])
def test_what_is_new_or_restarted_starts_slowly(deep: bool) -> None:
    life = Life(HealthConfig(canaries=deep, starts_slowly=True))
    for letters in ("s", ":rs"):
        assert life.play(letters) is Health.UP
        ramp = life.record.ramp
        assert ramp is not None
        assert [ramp.at(life.now + seconds) for seconds in (0, 5, 10, 99)] == [0, 0.5, 1, 1]
    assert life.play("f") is Health.SUSPECT, "its first failure is no more than another's"
    life.play("ss")
    assert life.record.ramp is None


def test_what_is_up_is_probed_again_and_later_while_it_is_busy() -> None:
    life = Life(HealthConfig(canaries=True, recheck_s=30.0))
    life.play("s")
    first = next(second for second in range(100) if life.record.wants_probe(life.now + second))
    assert 22 <= first <= 38
    busy = next(second for second in range(100) if life.record.wants_probe(life.now + second, busy=True))
    assert busy == first + 30
    life.record.probed(life.now + first)
    assert not life.record.wants_probe(life.now + first + 22)
    life.record.wants_one_now(life.now + first)
    assert life.record.wants_probe(life.now + first)


def test_probes_keep_their_distance_and_longer_the_less_they_say() -> None:
    life = Life(WITH_CANARIES)
    starts = []
    for tenths in range(40):
        now = 100.0 + tenths / 10
        if life.record.wants_probe(now):
            life.record.probed(now)
            starts.append(tenths)
    assert starts == [0, 3, 8, 18, 38]
    assert not Life(SHALLOW).record.wants_probe(100.0)


def test_only_a_half_open_one_without_canaries_takes_one_request() -> None:
    shallow, deep = Life(SHALLOW), Life(WITH_CANARIES)
    for life in (shallow, deep):
        assert life.play("F.") is Health.PROBING
        assert not life.record.usable
    assert shallow.record.takes_one
    assert not deep.record.takes_one


@given(
    events=st.lists(st.tuples(st.sampled_from("fFsrp"), st.sampled_from([0.0, 0.05, 0.5, 3.0, 40.0])), max_size=60),
    deep=st.booleans(),
)
def test_any_life(events: list[tuple[str, float]], deep: bool) -> None:
    """Moves are the table's (asserted inside); bad news never raises trust, and quiet always ends in use or a probe."""
    life = Life(WITH_CANARIES if deep else SHALLOW)
    record = life.record
    for letter, seconds in events:
        before, trusted = record.state, record.trusted
        life.act(letter)
        assert record.state is before or record.state in TRANSITIONS[before]
        assert not (letter in "fF" and record.trusted and not trusted)
        assert not (letter == "F" and record.usable)
        assert (record.ramp is None) == (record.state not in (Health.RISING, Health.SUSPECT))
        life.now += seconds
        record.tick(life.now)
    record.tick(life.now + 60.0)
    assert record.usable or record.takes_one or record.wants_probe(life.now + 60.0)


def test_a_router_checks_deeply_again_and_again_and_trusts_what_is_new_slowly() -> None:
    """The configuration is the default of `baton router`."""
    text: Any = SimpleNamespace(context_tokens=8, vocab_size=8)
    health = main._coordinator_config(RouterConfig(model="m"), text, PolicyConfig()).health
    assert (health.canaries, health.starts_slowly) == (True, True)
    assert health.recheck_s == RouterConfig(model="m").canary_period_s > 0
    without = main._coordinator_config(RouterConfig(model="m", canaries=False), text, PolicyConfig()).health
    assert (without.canaries, without.starts_slowly) == (False, True)
