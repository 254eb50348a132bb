"""Tests which workers are ejected since they are slower than their peers, and for how long."""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import replace

import pytest

from services.core.step_average import StepAverage
from services.router.policy import Cluster, Fingerprint, Job, Load, Role, WorkerView
from services.router.policy.outliers import Ejection, OutlierConfig, OutlierDetection
from tests.support.worker_views import view

CONFIG = OutlierConfig(slow_factor=2.0, sustained_s=5.0, fewest_steps=20, base_ejection_s=30.0, max_ejection_s=100.0)
STEPS_A_SECOND = 10


class Group:
    """Is a group of workers that compute all the time, each step in as many milliseconds as the test says."""

    def __init__(self, *workers: WorkerView, config: OutlierConfig = CONFIG) -> None:
        self.outliers = OutlierDetection(config)
        self.workers = {worker.worker_id: worker for worker in workers}
        self.now = 1000.0
        self.changes: list[str] = []

    def work(self, seconds: float, *, idle: Collection[str] = (), **ms: float) -> None:
        """Lets time pass in which the workers report so many milliseconds; those that are not named as before."""
        for _ in range(round(seconds)):
            self.now += 1.0
            for worker_id, worker in self.workers.items():
                load = worker.load
                if worker_id in ms:
                    load = replace(
                        load,
                        prefill_step=replace(load.prefill_step, ms=ms[worker_id]),
                        decode_step=replace(load.decode_step, ms=ms[worker_id]),
                    )
                if worker_id not in idle:
                    load = replace(load, prefill_step=_later(load.prefill_step), decode_step=_later(load.decode_step))
                self.workers[worker_id] = replace(worker, load=load)
            self.changes += self.outliers.tick(self.workers.values, self.now)

    def ejection(self, worker_id: str) -> Ejection | None:
        return self.outliers.ejection(worker_id)

    @property
    def ejected(self) -> set[str]:
        return {worker_id for worker_id in self.workers if self.ejection(worker_id) is not None}


def _later(step: StepAverage) -> StepAverage:
    """Returns the same averages a second later."""
    return replace(step, num_steps=step.num_steps + STEPS_A_SECOND)


def alike(number: int, role: Role = Role.DECODE, **changes: object) -> list[WorkerView]:
    step = StepAverage(10.0, 8.0, 8000.0)
    load = Load(1, blocks_free=64, prefill_step=step, decode_step=step)
    return [view(f"w{index}", role, load=load, **changes) for index in range(number)]


def changed(workers: list[WorkerView], index: int, **facts: object) -> None:
    workers[index] = replace(workers[index], **facts)  # type: ignore[arg-type]


def stepping(workers: list[WorkerView], index: int, ms: float, tokens: float, each: float) -> None:
    """Lets a worker's steps compute so many tokens, each of which attends to `each` tokens."""
    step = StepAverage(ms, tokens, tokens * each)
    workers[index] = replace(workers[index], load=replace(workers[index].load, prefill_step=step, decode_step=step))


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
def test_a_worker_that_is_slow_for_long_is_ejected_and_it_is_said_why(role: Role) -> None:
    group = Group(*alike(4, role))
    group.work(60, w0=10.0, w1=10.0, w2=11.0, w3=10.0)
    assert group.ejected == set()
    group.work(5, w2=20.0)
    assert group.ejected == set(), "it was found slow 4 s ago"
    group.work(1)
    assert group.ejected == {"w2"} == set(group.changes)
    ejection = group.ejection("w2")
    assert ejection is not None
    what = "a step with prompts" if role.can_prefill else "a decode step"
    assert ejection.reason(group.now + 7) == (
        f"ejected for 23 s: {what}, of 8 tokens that attend to 1000 each, takes 20 ms, the median of its peers 10 ms"
    )


def test_what_comes_and_goes_ejects_nobody() -> None:
    group = Group(*alike(4))
    for _ in range(40):
        group.work(5, w0=30.0)
        group.work(1, w0=19.0)
    assert group.changes == []
    assert set(group.outliers._records["w0"].slow_since) == set(), "nothing adds up"


def test_a_few_steps_prove_nothing_however_long_they_are_ago() -> None:
    group = Group(*alike(4))
    group.work(1, w0=30.0)
    group.work(600, idle={"w0"})
    assert group.ejected == set()
    group.work(2)
    assert group.ejected == {"w0"}


def test_where_all_are_slow_nobody_is() -> None:
    group = Group(*alike(4))
    group.work(30)
    group.work(60, w0=40.0, w1=40.0, w2=41.0, w3=42.0)
    assert group.changes == []


def test_two_workers_cannot_tell_which_of_them_is_slow() -> None:
    group = Group(*alike(2))
    group.work(60, w0=100.0)
    assert group.changes == []


@pytest.mark.parametrize(("number", "ejected"), [(3, 1), (4, 2), (5, 2), (6, 3), (7, 3)])
def test_at_most_half_are_ejected_and_two_are_left(number: int, ejected: int) -> None:
    """Makes all but two slow, one after the other."""
    group = Group(*alike(number))
    for index in range(number - 2):
        group.work(6, **{f"w{index}": 50.0})
    assert group.ejected == {f"w{index}" for index in range(ejected)}


def test_two_are_left_whatever_share_may_be_ejected() -> None:
    group = Group(*alike(4), config=replace(CONFIG, slow_factor=1.5, most_ejected=1.0))
    group.work(10, w0=100.0, w1=200.0)
    assert group.ejected == {"w0", "w1"}
    group.work(15, w2=400.0)
    assert group.ejected == {"w0", "w1"}


def test_a_majority_of_slow_ones_is_what_workers_are() -> None:
    group = Group(*alike(4))
    group.work(60, w0=50.0, w1=50.0, w2=50.0)
    assert group.changes == []


def test_the_slowest_goes_first() -> None:
    group = Group(*alike(6), config=replace(CONFIG, most_ejected=0.17))
    group.work(10, w1=30.0, w4=50.0)
    assert group.ejected == {"w4"}


def test_it_is_back_after_a_time_that_doubles_while_it_stays_slow() -> None:
    group = Group(*alike(4))
    lengths = []
    for _ in range(4):
        group.work(5 if lengths else 6, w0=40.0)
        found = group.ejection("w0")
        assert found is not None
        lengths.append(found.seconds)
        group.work(found.seconds - 1)
        assert group.ejected == {"w0"}
        group.work(1)
        assert group.ejected == set(), "it is judged by what it does from now on"
    assert lengths == [30.0, 60.0, 100.0, 100.0]
    assert group.changes == ["w0"] * 8


def test_a_worker_that_was_well_for_long_begins_anew() -> None:
    for well_s, seconds in ((CONFIG.max_ejection_s - 10, 60.0), (CONFIG.max_ejection_s, 30.0)):
        group = Group(*alike(4))
        group.work(36, w0=40.0)
        group.work(well_s, w0=10.0)
        group.work(6, w0=40.0)
        found = group.ejection("w0")
        assert found is not None
        assert found.seconds == seconds


def test_a_worker_that_is_ejected_is_nobodys_peer() -> None:
    """Two of five are slow. Once they are ejected, a third one has three times its peers' median, and not the median
    with theirs."""
    group = Group(*alike(7))
    group.work(6, w0=90.0, w1=90.0)
    assert group.ejected == {"w0", "w1"}
    group.work(6, w2=25.0, w3=12.0, w4=12.0)
    assert group.ejected == {"w0", "w1", "w2"}


OTHERS: dict[str, dict[str, object]] = {
    "another model": {"model": "other"},
    "another role": {"roles": Role.MIXED},
    "another fingerprint": {"fingerprint": Fingerprint("M")},
    "other numerics": {"fingerprint": Fingerprint("L", "int8")},
    "other hardware": {"hardware": "cuda"},
    "not ready": {"ready": False},
}


@pytest.mark.parametrize("facts", OTHERS.values(), ids=OTHERS)
def test_only_likes_are_compared(facts: dict[str, object]) -> None:
    workers = alike(3)
    changed(workers, 2, **facts)
    group = Group(*workers)
    group.work(60, w0=100.0)
    assert group.changes == [], "two are left, too few"
    group = Group(*alike(3))
    group.work(60, w0=100.0)
    assert group.ejected == {"w0"}


def test_half_of_the_capacity_may_take_twice_the_time() -> None:
    workers = alike(4)
    changed(workers, 0, capacity=0.5)
    group = Group(*workers)
    group.work(60, w0=35.0)
    assert group.changes == []
    group.work(6, w0=41.0)
    assert group.ejected == {"w0"}
    found = group.ejection("w0")
    assert found is not None
    assert (found.slowness.ms, found.slowness.peers_ms) == (41.0, 20.0)


def test_a_peer_of_less_capacity_does_not_excuse_a_slow_one() -> None:
    workers = alike(3)
    changed(workers, 1, capacity=0.25)
    changed(workers, 2, capacity=0.25)
    group = Group(*workers)
    group.work(60, w0=25.0, w1=40.0, w2=40.0)
    assert group.ejected == {"w0"}


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.MIXED])
def test_long_contexts_are_not_taken_for_slowness(role: Role) -> None:
    """Gives one worker two streams of 100,000 tokens, among others with sixteen of 2,000."""
    workers = alike(4, role)
    for index in range(4):
        stepping(workers, index, 20.0, 16, 2000)
    stepping(workers, 0, 100.0, 2, 100_000)
    group = Group(*workers)
    group.work(60)
    assert group.changes == []
    group.work(10, w0=260.0)
    assert group.ejected == {"w0"}, "it attends to 6.25 times as much, and takes 13 times as long"


@pytest.mark.parametrize(("tokens", "most_ms"), [(8, 20.0), (32, 80.0), (1, 20.0)])
def test_more_tokens_may_take_as_much_longer_and_fewer_as_long(tokens: float, most_ms: float) -> None:
    workers = alike(4)
    stepping(workers, 0, 10.0, tokens, 1000)
    group = Group(*workers)
    group.work(60, w0=most_ms - 1)
    assert group.changes == []
    group.work(6, w0=most_ms)
    assert group.ejected == {"w0"}


def test_a_healthy_worker_is_never_beyond_what_its_peers_would_take() -> None:
    """Draws what steps cost and what two workers run: where both cost the same, neither is slow by the other."""
    chance = random.Random(5)
    for _ in range(1000):
        fixed, token, attended = (10 ** chance.uniform(-3, 2) for _ in range(3))
        steps = []
        for _ in range(2):
            step = StepAverage()
            for _ in range(30):
                tokens, each = chance.randint(1, 512), 10 ** chance.uniform(1, 5)
                step = step.after(fixed + tokens * (token + each * attended), tokens, tokens * each)
            steps.append(step)
        assert steps[0].ms <= steps[1].most_ms(steps[0]) * (1 + 1e-9)


def test_peers_that_have_done_nothing_since_make_nobody_an_outlier() -> None:
    """Everything becomes slower, on a shared host for example; two workers had their last steps before."""
    for ms, ejected in ((30.0, set()), (10.0, {"w0", "w3"})):
        group = Group(*alike(4))
        group.work(60)
        group.work(600, idle={"w1", "w2"}, w0=30.0, w3=30.0)
        assert group.changes == []
        group.work(1, w1=ms, w2=ms)
        assert group.changes == [], "ten steps are too few"
        group.work(10)
        assert group.ejected == ejected, ms


def test_a_peer_that_begins_anew_counts_its_steps_anew() -> None:
    group = Group(*alike(3))
    group.work(60)
    group.work(3, w0=30.0)
    for name in ("w1", "w2"):
        load = group.workers[name].load
        anew = replace(load, decode_step=replace(load.decode_step, num_steps=0))
        group.workers[name] = replace(group.workers[name], load=anew)
    group.work(1)
    group.work(600, idle={"w1", "w2"})
    assert group.changes == []
    group.work(2)
    assert group.ejected == {"w0"}


def test_who_reports_no_such_averages_is_not_judged_and_judges_nobody() -> None:
    """An older worker has only costs per token and step."""
    workers = alike(4)
    for index in (2, 3):
        load = Load(1, ms_per_prefill_token=1.0, ms_per_decode_step=10.0, tokens_per_prefill_step=512.0)
        changed(workers, index, load=load)
    group = Group(*workers)
    group.work(60, w0=100.0)
    assert group.changes == [], "one peer has reported"
    stepping(workers, 2, 10.0, 8, 1000)
    group = Group(*workers)
    group.workers["w3"] = replace(
        group.workers["w3"], load=replace(group.workers["w3"].load, ms_per_decode_step=1000.0)
    )
    group.work(10, w0=100.0)
    assert group.ejected == {"w0"}


def test_of_many_workers_some_peers_are_enough() -> None:
    group = Group(*alike(40))
    group.work(6, w39=30.0, w0=30.0)
    assert group.ejected == {"w0", "w39"}


def test_a_factor_of_0_ejects_nobody() -> None:
    group = Group(*alike(4), config=OutlierConfig(slow_factor=0.0))
    group.work(60, w0=1000.0)
    assert group.changes == []


def test_workers_are_compared_once_a_second() -> None:
    group = Group(*alike(4))
    asked = []
    for tick in range(30):
        group.outliers.tick(lambda tick=tick: asked.append(tick) or [], 1000.0 + tick / 10)  # type: ignore[misc]
    assert asked == [0, 10, 20]


def test_one_that_says_it_is_very_fast_ejects_nobody() -> None:
    """Of two peers the slower one counts; a quicker one, or a liar, makes no outlier of an honest worker."""
    group = Group(*alike(3))
    group.work(20, w0=10.1, w1=10.0, w2=0.001)
    assert group.ejected == set()
    group.work(20, w0=21.0)
    assert group.ejected == {"w0"}


def test_an_ejection_ends_with_the_peers_by_whom_it_was_judged() -> None:
    """A worker that is left with one active peer, or none, is needed, and nobody is there who could say it is slow."""
    group = Group(*alike(4))
    group.work(10, w0=40.0)
    assert group.ejected == {"w0"}
    del group.workers["w1"]
    group.work(1)
    assert group.ejected == {"w0"}, "two are left"
    del group.workers["w2"]
    group.work(1)
    assert (group.ejected, group.changes[-1]) == (set(), "w0")
    group.work(60)
    assert group.ejected == set()


def test_a_short_job_says_nothing_of_where_a_longer_one_fits() -> None:
    """The only other worker is claimed, and too small for the long job, which an ejected worker must take then."""
    small = view("small", Role.MIXED)
    large = view("large", Role.MIXED, num_blocks=256, max_model_len=4096, ejected=True)
    cluster = Cluster([small, large])
    left = cluster.without(frozenset({"small"}))
    assert left.fit(Job(100, 200)).decoders == ()
    assert left.fit(Job(3000, 3100)).decoders == ("large",)
    assert left.fit(Job(100, 201)).decoders == ()
    cluster.check()
