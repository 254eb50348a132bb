"""Tests the filters as tables: what stands in a worker's way, and that whoever is asked for the words hears the filter
by which the worker was left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.router.policy import (
    Cluster,
    Fingerprint,
    HandoffsInFlight,
    Job,
    PlacedPhase,
    PolicyConfig,
    Ranking,
    Role,
    Source,
    WhyNot,
    WorkerView,
    place_decode,
    place_prefill,
)
from services.router.policy.filter import (
    Reasons,
    decode_obstacle,
    decode_shortage,
    park_obstacle,
    park_shortage,
    prefill_obstacle,
    prefill_shortage,
    unless_all,
)
from tests.support.worker_views import decode, mixed, prefill, view

NOW, CONFIG = 1000.0, PolicyConfig()
JOB = Job(num_tokens=64, total_tokens=128)  # four blocks, and eight in the end
SOURCE = Source("p", "h1", Fingerprint("L"))
HERE = Source("m", "h1", Fingerprint("L"))
OTHER = Fingerprint("L", "other")
BOUND = replace(JOB, fingerprint=Fingerprint("L"))

PREFILL_OBSTACLES: dict[str, tuple[Job, WorkerView, WhyNot | None]] = {
    "none": (JOB, prefill(busy=64), None),
    "it is not ready": (JOB, prefill(ready=False), WhyNot.NOT_READY),
    "it is on trial": (JOB, prefill(ready=False, on_trial=True), WhyNot.NOT_READY),
    "a prompt of its context leaves no room for a token": (JOB, prefill(max_model_len=64), WhyNot.TOO_LONG),
    "the output is not its concern": (JOB, prefill(max_model_len=65), None),
    "another model": (JOB, prefill(model="other"), WhyNot.OTHER_FINGERPRINT),
    "other numerics, before a token": (JOB, prefill(fingerprint=OTHER), None),
    "other numerics, after a token": (BOUND, prefill(fingerprint=OTHER), WhyNot.OTHER_FINGERPRINT),
    "its engine does not serve it": (
        replace(JOB, unserved_by=frozenset({"torch"})),
        prefill(fingerprint=Fingerprint("L", engine="torch")),
        WhyNot.OTHER_FINGERPRINT,
    ),
}


@pytest.mark.parametrize("case", PREFILL_OBSTACLES)
def test_what_keeps_a_worker_from_prompts_for_good(case: str) -> None:
    job, worker, why = PREFILL_OBSTACLES[case]
    assert prefill_obstacle(job, worker) is why


DECODE_OBSTACLES: dict[str, tuple[Job, Source | None, WorkerView, WhyNot | None]] = {
    "none": (JOB, SOURCE, decode(busy=64), None),
    "it is not ready": (JOB, SOURCE, decode(ready=False, on_trial=True), WhyNot.NOT_READY),
    "it is on trial, and has the lease": (JOB, HERE, mixed(ready=False, on_trial=True), None),
    "it has the lease, and is not ready": (JOB, HERE, mixed(ready=False), WhyNot.NOT_READY),
    "the whole sequence is too long": (JOB, SOURCE, decode(max_model_len=127), WhyNot.TOO_LONG),
    "too long in place": (JOB, HERE, mixed(max_model_len=127), WhyNot.TOO_LONG),
    "the prompt fills its pool": (replace(JOB, total_tokens=64), SOURCE, decode(num_blocks=4), WhyNot.TOO_LONG),
    "the prompt fills its own pool": (replace(JOB, total_tokens=64), HERE, mixed(num_blocks=4), None),
    "its transfers from the source fail": (JOB, SOURCE, decode(barred=frozenset("p")), WhyNot.BARRED),
    "all of it runs there": (JOB, None, decode(barred=frozenset("p")), None),
    "other KV": (JOB, SOURCE, decode(fingerprint=Fingerprint("M")), WhyNot.OTHER_FINGERPRINT),
    "other numerics take KV over": (BOUND, SOURCE, decode(fingerprint=OTHER), None),
    "other numerics compute no second prompt": (BOUND, None, decode(fingerprint=OTHER), WhyNot.OTHER_FINGERPRINT),
    "another model": (JOB, SOURCE, decode(model="other"), WhyNot.OTHER_FINGERPRINT),
    "another model in place": (JOB, HERE, mixed(model="other"), WhyNot.OTHER_FINGERPRINT),
}


@pytest.mark.parametrize("case", DECODE_OBSTACLES)
def test_what_keeps_a_worker_from_decoding_for_good(case: str) -> None:
    job, source, worker, why = DECODE_OBSTACLES[case]
    assert decode_obstacle(job, source, worker) is why


STORE = view("s", Role.STORE)
PARK_OBSTACLES: dict[str, tuple[WorkerView, WhyNot | None]] = {
    "none": (replace(STORE, max_model_len=1), None),
    "it is not ready": (replace(STORE, ready=False), WhyNot.NOT_READY),
    "it is smaller than the prompt": (replace(STORE, num_blocks=3), WhyNot.TOO_LONG),
    "its transfers from the source fail": (replace(STORE, barred=frozenset("p")), WhyNot.BARRED),
    "other KV": (replace(STORE, fingerprint=Fingerprint("M")), WhyNot.OTHER_FINGERPRINT),
    "another model": (replace(STORE, model="other"), WhyNot.OTHER_FINGERPRINT),
}


@pytest.mark.parametrize("case", PARK_OBSTACLES)
def test_what_keeps_a_store_from_a_handoff_for_good(case: str) -> None:
    store, why = PARK_OBSTACLES[case]
    assert park_obstacle(JOB, SOURCE, store) is why


QUARTER = replace(JOB, headroom=0.25)  # of 64 blocks and 8 places, so far as the job leaves any
PREFILL_SHORTAGES: dict[str, tuple[Job, WorkerView, int, WhyNot | None]] = {
    "none": (JOB, prefill(busy=60), 0, None),
    "too few blocks": (JOB, prefill(busy=61), 0, WhyNot.NO_BLOCKS),
    "too long a queue": (JOB, prefill(busy=1), 1000, WhyNot.QUEUE_LIMIT),
    "blocks before the queue": (JOB, prefill(busy=64), 1000, WhyNot.NO_BLOCKS),
    "an idle worker evicts": (JOB, prefill(predicted_blocks=64), 0, None),
    "it is for shorter prompts": (replace(JOB, kept_off=frozenset("p")), prefill(), 0, WhyNot.KEPT),
    "more than its tenant's share of blocks": (QUARTER, prefill(busy=45), 0, WhyNot.OVER_SHARE),
    "its tenant's share of blocks": (QUARTER, prefill(busy=44), 0, None),
    "more than its tenant's share of the queue": (QUARTER, prefill(busy=1), 500, WhyNot.OVER_SHARE),
    "its tenant's share of the queue": (QUARTER, prefill(busy=1), 499, None),
    "too few blocks for anybody": (QUARTER, prefill(busy=61), 0, WhyNot.NO_BLOCKS),
    "too long a queue for anybody": (QUARTER, prefill(busy=1), 1000, WhyNot.QUEUE_LIMIT),
}


@pytest.mark.parametrize("case", PREFILL_SHORTAGES)
def test_what_a_prompt_lacks_now(case: str) -> None:
    job, worker, queued_tokens, why = PREFILL_SHORTAGES[case]
    worker = replace(worker, load=replace(worker.load, queued_prefill_tokens=queued_tokens))
    assert prefill_shortage(job, worker, max_queued_tokens=1000) is why


DECODE_SHORTAGES: dict[str, tuple[Job, WorkerView, int, WhyNot | None]] = {
    "none": (JOB, decode(busy=59), 7, None),
    "too few blocks": (JOB, decode(busy=60), 1, WhyNot.NO_BLOCKS),
    "a full batch": (JOB, decode(busy=1), 8, WhyNot.FULL_BATCH),
    "blocks before the batch": (JOB, decode(busy=64), 8, WhyNot.NO_BLOCKS),
    "it has the lease": (JOB, mixed("p", busy=64), 8, None),
    "more than its tenant's share of blocks": (QUARTER, decode(busy=44), 1, WhyNot.OVER_SHARE),
    "its tenant's share of blocks": (QUARTER, decode(busy=43), 1, None),
    "more than its tenant's share of the batch": (QUARTER, decode(busy=1), 6, WhyNot.OVER_SHARE),
    "its tenant's share of the batch": (QUARTER, decode(busy=1), 5, None),
    "a full batch for anybody": (QUARTER, decode(busy=1), 8, WhyNot.FULL_BATCH),
    "no place for all answers": (replace(JOB, num_answers=3), decode(busy=1), 6, WhyNot.FULL_BATCH),
    "more answers than places, and all of these free": (replace(JOB, num_answers=9), decode(busy=1), 0, None),
}


@pytest.mark.parametrize("case", DECODE_SHORTAGES)
def test_what_a_handoff_lacks_now(case: str) -> None:
    job, worker, num_running, why = DECODE_SHORTAGES[case]
    worker = replace(worker, load=replace(worker.load, num_running=num_running))
    assert decode_shortage(job, SOURCE, worker) is why


def test_what_a_parked_handoff_lacks_now() -> None:
    assert park_shortage(JOB, STORE) is None
    assert park_shortage(JOB, view("s", Role.STORE, busy=61)) is WhyNot.NO_BLOCKS
    assert park_shortage(JOB, replace(STORE, load=replace(STORE.load, num_running=8))) is WhyNot.FULL_BATCH


def test_a_last_resort_is_left_out_while_there_is_another() -> None:
    workers, left_out = [decode("a"), decode("b")], Reasons()
    assert unless_all(workers, {"a", "c"}, WhyNot.BLAMED, left_out) == workers[1:]
    assert left_out == {"a": WhyNot.BLAMED}
    assert unless_all(workers, {"a", "b"}, WhyNot.UNTRIED, left_out) == workers
    assert left_out == {"a": WhyNot.BLAMED}, "nobody was left out"


def test_one_that_nobody_has_tried_comes_before_one_on_which_the_job_has_failed() -> None:
    job = replace(JOB, avoid=frozenset("b"))
    assert place_decode(job, SOURCE, [decode("b"), decode("u", untried=frozenset("p"))], NOW, CONFIG) == "u"
    workers = [prefill("b"), prefill("u"), decode(untried=frozenset("u"))]
    assert [start.worker_id for start in Cluster(workers).everyone.fit(job).starts] == ["u"]


UNTRIED = decode(untried=frozenset("x"))


@pytest.mark.parametrize(
    ("job", "workers"),
    {
        "all are ejected": (JOB, [prefill("x", ejected=True), prefill("y", ejected=True), UNTRIED]),
        "it has failed on all": (replace(JOB, avoid=frozenset("xy")), [prefill("x"), prefill("y"), UNTRIED]),
    }.values(),
)
def test_a_filter_that_left_nobody_out_is_no_reason(job: Job, workers: list[WorkerView]) -> None:
    """What has kept the prompt from "x" is that no transfer from there has been tried."""
    left_out = Cluster(workers).everyone.fit(job).left_out(PlacedPhase.PREFILL, None)
    assert left_out.named == (("x", WhyNot.UNTRIED),)


def test_placing_says_by_which_filter_each_was_left_out() -> None:
    ranking = Ranking()
    job = replace(JOB, avoid=frozenset("b"))
    able = [decode("b"), decode("u", untried=frozenset("p")), decode("f", busy=64), decode("d")]
    assert place_decode(job, SOURCE, able, NOW, CONFIG, ranking) == "d"
    assert ranking.left_out == {"b": WhyNot.BLAMED, "u": WhyNot.UNTRIED, "f": WhyNot.NO_BLOCKS}
    ranking, in_flight = Ranking(), HandoffsInFlight([1000])
    workers = [prefill("f", busy=64), prefill("p"), mixed("m", barred=frozenset("fp")), decode("d", busy=64)]
    assert place_prefill(JOB, Cluster(workers).everyone, in_flight, NOW, CONFIG, ranking) == "m"
    assert ranking.left_out == {"f": WhyNot.NO_BLOCKS, "p": WhyNot.NO_DECODE_ROOM}, "its own room comes first"
