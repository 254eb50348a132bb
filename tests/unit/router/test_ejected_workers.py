"""Tests what becomes of a worker that is ejected: what it is given, what is said of it, and its return."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.core.step_average import StepAverage
from services.router.coordinator.events import EjectionChanged
from services.router.policy import (
    Cluster,
    HandoffsInFlight,
    Job,
    PlacedPhase,
    PolicyConfig,
    Role,
    Source,
    WhyNot,
    WorkerView,
    nearest_start,
    nearest_to_room,
    place_decode,
    place_prefill,
)
from services.router.policy.outliers import OutlierConfig
from tests.support.router_bench import Bench, started
from tests.support.worker_views import decode, mixed, prefill

NOW, CONFIG = 1000.0, PolicyConfig()
JOB = Job(num_tokens=64, total_tokens=128)
FULL = {"blocks_free": 0, "blocks_active": 64, "num_running": 8}
SLOW = prefill("a", ejected=True)


def source(worker: WorkerView) -> Source:
    return Source(worker.worker_id, worker.host_id, worker.fingerprint)


STARTS: dict[str, tuple[Job, list[WorkerView], str | None]] = {
    "another can": (JOB, [SLOW, prefill("b"), decode()], "b"),
    "another can, but has no room now": (JOB, [SLOW, prefill("b", busy=64), decode()], None),
    "no other": (JOB, [SLOW, decode()], "a"),
    "all are": (JOB, [SLOW, prefill("b", ejected=True), decode()], "a"),
    "no other can hold it": (replace(JOB, num_tokens=500), [SLOW, prefill("b", max_model_len=256), decode()], "a"),
    "no other is ready": (JOB, [SLOW, prefill("b", ready=False), decode()], "a"),
    "no other can hand over": (JOB, [SLOW, prefill("b"), decode(barred=frozenset({"b"}))], "a"),
    "it has failed on the other": (replace(JOB, avoid=frozenset({"b"})), [SLOW, prefill("b"), decode()], "a"),
    "only an ejected one takes over": (JOB, [prefill("b"), decode("d", ejected=True)], "b"),
}


@pytest.mark.parametrize(("job", "workers", "chosen"), STARTS.values(), ids=STARTS)
def test_prompts(job: Job, workers: list[WorkerView], chosen: str | None) -> None:
    cluster = Cluster(workers)
    assert place_prefill(job, cluster.everyone, HandoffsInFlight(), NOW, CONFIG) == chosen
    nearest = nearest_start(job, cluster.everyone, CONFIG)
    assert nearest is not None
    assert nearest.source_id == (chosen or "b")
    cluster.check()


def test_a_claim_on_the_others_does_not_send_prompts_there() -> None:
    cluster = Cluster([SLOW, prefill("b"), decode("c", ejected=True), decode("d")])
    left = cluster.without(frozenset({"b", "d"}))
    assert place_prefill(JOB, left, HandoffsInFlight(), NOW, CONFIG) is None
    assert left.able(JOB, None) == []


def test_room_of_an_ejected_decode_worker_lets_no_prompt_start() -> None:
    """Counts on the room of the decode worker that will be asked."""
    workers = [prefill("p"), decode("c", ejected=True), decode("d", busy=60)]
    in_flight = HandoffsInFlight([64])
    assert place_prefill(JOB, Cluster(workers).everyone, in_flight, NOW, CONFIG) is None
    assert place_prefill(JOB, Cluster([workers[0], decode("c"), workers[2]]).everyone, in_flight, NOW, CONFIG) == "p"


P, M = prefill("p"), mixed("m", ejected=True)
HANDOFFS: dict[str, tuple[Job, WorkerView, list[WorkerView], str | None]] = {
    "another can": (JOB, P, [P, decode("c", ejected=True), decode("d")], "d"),
    "another can, but has no room now": (JOB, P, [P, decode("c", ejected=True), decode("d", busy=64)], None),
    "no other": (JOB, P, [P, decode("c", ejected=True)], "c"),
    "no other can hold it": (
        replace(JOB, total_tokens=600),
        P,
        [P, decode("c", ejected=True), decode("d", max_model_len=512)],
        "c",
    ),
    "it has failed on the other": (
        replace(JOB, avoid=frozenset({"d"})),
        P,
        [P, decode("c", ejected=True), decode("d")],
        "c",
    ),
    "what it has it finishes": (JOB, M, [M, mixed("n", busy=64)], "m"),
    "elsewhere is better": (JOB, M, [M, decode("d")], "d"),
}


@pytest.mark.parametrize(("job", "at", "workers", "chosen"), HANDOFFS.values(), ids=HANDOFFS)
def test_handoffs(job: Job, at: WorkerView, workers: list[WorkerView], chosen: str | None) -> None:
    cluster = Cluster(workers)
    able = cluster.everyone.able(job, source(at))
    assert place_decode(job, source(at), able, NOW, CONFIG) == chosen
    assert nearest_to_room(job, source(at), able) == (chosen or "d")


def test_it_is_explained() -> None:
    cluster = Cluster([SLOW, prefill("b"), decode("c", ejected=True), decode("d")])
    everyone = cluster.everyone
    fit = everyone.fit(JOB)
    assert fit.left_out(PlacedPhase.PREFILL, None).named == (("a", WhyNot.EJECTED),)
    assert fit.left_out(PlacedPhase.DECODE, source(SLOW)).named == (("c", WhyNot.EJECTED),)
    assert fit.left_out(PlacedPhase.UNSPLIT, None).named == (("c", WhyNot.EJECTED),)
    other = everyone.fit(replace(JOB, avoid=frozenset({"a"})))
    assert other.left_out(PlacedPhase.PREFILL, None).named == (("a", WhyNot.BLAMED),)


# The coordinator


def slow_bench(*, slow: str = "d0") -> Bench:
    bench = Bench(outliers=OutlierConfig(slow_factor=2.0, base_ejection_s=20.0))
    bench.join("p", Role.PREFILL)
    for index in range(3):
        bench.join(f"d{index}", Role.DECODE)
    decode_for(bench, 8, slow)
    return bench


def decode_for(bench: Bench, seconds: int, slow: str) -> None:
    for _ in range(seconds):
        bench.wait(1.0)
        bench.load("p")
        for index in range(3):
            ms = 40 if f"d{index}" == slow else 10
            steps = bench.loads[f"d{index}"].decode_step.num_steps + 25
            bench.load(f"d{index}", decode_step=StepAverage(ms, 1, 100, steps))


def test_the_coordinator_ejects_and_takes_back() -> None:
    bench = slow_bench()
    worker = bench.coordinator.workers.get("d0")
    assert worker.ejection is not None
    assert [each.ejection is None for each in bench.take_all(EjectionChanged)] == [False]
    bench.submit()
    prompt = bench.take_leg(Role.PREFILL)
    bench.say("p", started(prompt))
    assert bench.take_leg(Role.DECODE).worker_id == "d1"
    decode_for(bench, 20, slow="")
    assert worker.ejection is None
    assert [each.ejection for each in bench.take_all(EjectionChanged)] == [None]
    ramp = worker.view().ramp
    assert ramp is not None, "its share grows from nothing"
    assert ramp.at(bench.now) < 0.5
    decode_for(bench, 12, slow="")
    assert worker.view().ramp is None


def test_a_new_process_of_the_worker_begins_anew() -> None:
    bench = slow_bench()
    bench.lose("d0")
    bench.join("d0", Role.DECODE, incarnation=2)
    assert bench.coordinator.workers.get("d0").ejection is None
    decode_for(bench, 3, slow="d0")
    assert bench.coordinator.workers.get("d0").ejection is None
    decode_for(bench, 5, slow="d0")
    assert bench.coordinator.workers.get("d0").ejection is not None


def test_a_session_that_breaks_takes_no_ejection_back() -> None:
    bench = slow_bench()
    bench.lose("d0")
    bench.join("d0", Role.DECODE)
    assert bench.coordinator.workers.get("d0").ejection is not None


def test_a_worker_that_is_forgotten_leaves_nothing() -> None:
    bench = slow_bench()
    bench.lose("d0")
    assert bench.coordinator.withdraw("d0", bench.now)
    bench.join("d0", Role.DECODE)
    bench.wait(0.5)
    assert bench.coordinator.workers.get("d0").ejection is None
