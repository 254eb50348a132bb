"""Tests what waits for a worker that loads, and for how long."""

from __future__ import annotations

import pytest

from services.core.errors import DeadlineExceeded, NoWorker
from services.router.policy import Role
from tests.support.router_bench import Bench, tokens

LOAD_S = 90.0


@pytest.fixture
def bench() -> Bench:
    bench = Bench(no_worker_timeout_s=5.0, queue_timeout_s=20.0)
    bench.join("p", Role.PREFILL)
    bench.join("d", Role.DECODE)
    return bench


def load(bench: Bench, seconds: float, *, left_s: float, worker_id: str = "d", role: Role = Role.DECODE) -> float:
    """Lets the worker announce each second that it loads; returns what is left of the time that it expects to take."""
    for _ in range(round(seconds)):
        bench.loading(worker_id, role, max(0.0, left_s))
        bench.wait(1.0)
        left_s -= 1.0
    return left_s


def test_a_stream_goes_on_when_the_only_decode_worker_is_back(bench: Bench) -> None:
    """It has waited for longer than for a missing or a busy worker."""
    _, decode = bench.decoding()
    bench.say("d", tokens(decode, 101, at=1))
    bench.lose("d")
    bench.wait(4.0)
    load(bench, LOAD_S - 10.0, left_s=LOAD_S)
    assert not bench.failed
    assert not bench.take_legs(Role.PREFILL), "nobody could take its handoff"
    bench.join("d", Role.DECODE, incarnation=2)
    bench.wait(0.1)
    bench.finish(bench.take_leg(Role.PREFILL), [100, 101, 201, 202])


def test_a_worker_that_was_loaded_has_time_to_become_ready(bench: Bench) -> None:
    bench.lose("d")
    bench.submit()
    load(bench, 60.0, left_s=LOAD_S)
    bench.coordinator.worker_joined(bench.infos["d"], bench.now)  # its session does not open yet
    bench.wait(4.0)
    assert not bench.failed
    bench.wait(2.0)
    assert isinstance(bench.failed["r"], NoWorker)


def test_one_that_takes_longer_than_it_announced_is_waited_for_no_longer(bench: Bench) -> None:
    bench.lose("d")
    bench.submit()
    left_s = load(bench, LOAD_S, left_s=LOAD_S)
    assert not bench.failed
    load(bench, 6.0, left_s=left_s)
    assert isinstance(bench.failed["r"], NoWorker)


def test_one_that_dies_while_it_loads_again_and_again_is_waited_for_once(bench: Bench) -> None:
    bench.lose("d")
    bench.submit()
    for _ in range(7):
        assert not bench.failed
        load(bench, 15.0, left_s=LOAD_S)
    assert isinstance(bench.failed["r"], NoWorker)


def test_one_that_is_overdue_hides_no_other(bench: Bench) -> None:
    bench.lose("d")
    bench.loading("d", Role.DECODE, 0.0)
    bench.submit()
    bench.wait(1.0)
    load(bench, 30.0, left_s=LOAD_S, worker_id="d2")
    assert not bench.failed


def test_one_that_falls_silent_is_gone(bench: Bench) -> None:
    bench.lose("d")
    bench.submit()
    load(bench, 3.0, left_s=LOAD_S)
    for _ in range(12):
        assert not bench.failed
        bench.wait(1.0)
    bench.wait(4.0)
    assert isinstance(bench.failed["r"], NoWorker)
    assert not bench.coordinator.loading.all()


def test_the_deadline_ends_the_wait(bench: Bench) -> None:
    bench.lose("d")
    bench.submit(deadline_s=bench.now + 30.0)
    load(bench, 29.0, left_s=LOAD_S)
    assert not bench.failed
    load(bench, 1.0, left_s=LOAD_S)
    assert isinstance(bench.failed["r"], DeadlineExceeded)


@pytest.mark.parametrize("role", [Role.PREFILL, Role.STORE])
def test_one_that_would_not_help_is_not_waited_for(bench: Bench, role: Role) -> None:
    bench.lose("d")
    bench.submit()
    load(bench, 6.0, left_s=LOAD_S, worker_id="other", role=role)
    assert isinstance(bench.failed["r"], NoWorker)


def test_a_late_announcement_of_one_that_serves_means_nothing(bench: Bench) -> None:
    bench.loading("d", Role.DECODE, LOAD_S)
    assert not bench.coordinator.loading.all()
    bench.loading("d2", Role.DECODE, LOAD_S)
    bench.join("d2", Role.DECODE)
    assert not bench.coordinator.loading.all()
