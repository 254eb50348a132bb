"""Tests placement as tables: (workers, job) -> worker."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from services.core.errors import ContextLengthExceeded
from services.router.policy import (
    Cluster,
    Fingerprint,
    HandoffsInFlight,
    Job,
    Load,
    PolicyConfig,
    Role,
    Source,
    WorkerView,
    nearest_to_room,
    place_decode,
    place_prefill,
    resolve_max_tokens,
)
from services.router.policy.health import Ramp
from services.router.policy.terms import Question
from tests.support.worker_views import decode, mixed, prefill, view

NOW = 1000.0
CONFIG = PolicyConfig()
MAKERS = {"p": prefill, "d": decode, "m": mixed}
JOB = Job(num_tokens=64, total_tokens=128)
OTHER_NUMERICS = Fingerprint("L", "int8 weights")
REPLAY = replace(JOB, fingerprint=Fingerprint("L"))


def queue(num_tokens: int) -> Load:
    return Load(1, blocks_active=1, blocks_free=63, queued_prefill_tokens=num_tokens)


def _place_prefill(job: Job, workers: list[WorkerView], in_flight: Iterable[int] = ()) -> str | None:
    return place_prefill(job, Cluster(workers).everyone, HandoffsInFlight(in_flight), NOW, CONFIG)


def _place_decode(job: Job, source: Source | None, workers: list[WorkerView]) -> str | None:
    return place_decode(job, source, Cluster(workers).everyone.able(job, source), NOW, CONFIG)


def _nearest(job: Job, source: Source | None, workers: list[WorkerView]) -> str | None:
    return nearest_to_room(job, source, Cluster(workers).everyone.able(job, source))


PREFILL_CASES = {
    "no worker": ([], [], None),
    "decode alone": ([decode()], [], None),
    "nobody could take the handoff": ([prefill()], [], None),
    "handoff of another layout": ([prefill(), decode(fingerprint=Fingerprint("M"))], [], None),
    "not ready": ([prefill(ready=False), decode()], [], None),
    "tie goes to the lower id": ([prefill("p2"), prefill("p1"), decode()], [], "p1"),
    "shorter queue": ([prefill("p1", load=queue(2000)), prefill("p2", load=queue(100)), decode()], [], "p2"),
    "predicted queue counts": ([prefill("p1", predicted_tokens=900), prefill("p2"), decode()], [], "p2"),
    "full queue waits": ([prefill(load=queue(CONFIG.max_queued_tokens)), decode()], [], None),
    "no room in the pool": ([prefill(busy=61), decode()], [], None),
    "just room": ([prefill(busy=60), decode()], [], "p"),
    "predicted blocks count": ([prefill(busy=50, predicted_blocks=11, predicted_sequences=1), decode()], [], None),
    "too long for its context": ([prefill(max_model_len=64), decode()], [], None),
    "too long for its pool": ([prefill(num_blocks=4), decode()], [], None),
    "dedicated before mixed": ([mixed(), prefill(), decode()], [], "p"),
    "mixed when it is alone": ([mixed()], [], "m"),
    "decode room covers it": ([prefill(), decode(busy=59)], [20], None),
    "decode room covers both": ([prefill(), decode(busy=56)], [20], "p"),
    "a prompt that no decode worker could import": (
        [prefill(), decode(num_blocks=8, max_model_len=128), prefill("q")],
        [],
        "p",
    ),
    "nor with a block to grow into": ([prefill(), decode(num_blocks=4, max_model_len=999)], [], None),
    "one is always let through": ([prefill(), decode(busy=64)], [], "p"),
    "a mixed source needs no decode room": ([mixed(busy=8), decode(busy=64)], [20], "m"),
    "lately failed": ([prefill("p1", ramp=Ramp(NOW, 30.0)), prefill("p2"), decode()], [], "p2"),
    "slow start is over": ([prefill("p1", ramp=Ramp(NOW - 10.0, 10.0)), prefill("p2"), decode()], [], "p1"),
    "slow start gives way to little": (
        [prefill("p1", ramp=Ramp(NOW - 9.9, 10.0)), prefill("p2", load=queue(2000)), decode()],
        [],
        "p1",
    ),
    "nobody who takes it over from there": ([prefill("p1"), prefill("p2"), decode(barred=frozenset({"p1"}))], [], "p2"),
    "nobody at all": ([prefill("p1"), decode(barred=frozenset({"p1"}))], [], None),
    "an untried way is the last resort": (
        [prefill("p1"), prefill("p2", load=queue(2000)), decode(untried=frozenset({"p1"}))],
        [],
        "p2",
    ),
    "all are untried": ([prefill("p1"), decode(untried=frozenset({"p1"}))], [], "p1"),
}


@pytest.mark.parametrize("case", PREFILL_CASES)
def test_place_prefill(case: str) -> None:
    workers, in_flight, expected = PREFILL_CASES[case]
    assert _place_prefill(JOB, workers, in_flight) == expected


@pytest.mark.parametrize("small", ["a", "c"])
def test_the_room_for_several_answers_is_that_of_whoever_takes_them_over(small: str) -> None:
    """They take 20 blocks there, where 13 are left, however small a prefill worker is, and whoever is asked first."""
    job = replace(JOB, num_answers=16)
    assert _place_prefill(job, [prefill("b"), prefill(small, num_blocks=5), decode(busy=49)], [16]) is None
    assert _place_prefill(job, [prefill("b"), prefill(small, num_blocks=5), decode(busy=42)], [16])


SOURCE = Source("p", "h1", Fingerprint("L"))
DECODE_CASES = {
    "prefill workers do not decode": ([prefill()], SOURCE, None),
    "only one": ([decode()], SOURCE, "d"),
    "other layout": ([decode(fingerprint=Fingerprint("M"))], SOURCE, None),
    "draining": ([decode(ready=False)], SOURCE, None),
    "no room": ([decode(busy=60)], SOURCE, None),
    "room for one token more": ([decode(busy=59)], SOURCE, "d"),
    "idle evicts its cache": ([decode(load=Load(1, blocks_cached=64))], SOURCE, "d"),
    "more free memory": ([decode("d1", busy=40), decode("d2", busy=10)], SOURCE, "d2"),
    "same host": ([decode("d1", host_id="h2"), decode("d2")], SOURCE, "d2"),
    "batch is full": ([decode(load=Load(1, blocks_active=8, blocks_free=56, num_running=8))], SOURCE, None),
    "imports fill the batch": (
        [decode(load=Load(1, blocks_active=8, blocks_free=56, num_running=6, num_importing=2))],
        SOURCE,
        None,
    ),
    "commands in flight fill the batch": ([decode(busy=8, predicted_sequences=7)], SOURCE, None),
    "decode before mixed": ([decode(busy=30), mixed("p")], SOURCE, "d"),
    "in place when all others are full": ([decode(busy=64), mixed("p", busy=64)], SOURCE, "p"),
    "in place rather than on another mixed worker": ([mixed("a"), mixed("p")], SOURCE, "p"),
    "unsplit sequence": ([decode("d1", fingerprint=Fingerprint("M")), prefill()], None, "d1"),
    "cannot fetch from there": ([decode("d1", barred=frozenset({"p"})), decode("d2", busy=40)], SOURCE, "d2"),
    "cannot fetch from elsewhere": ([decode("d1", barred=frozenset({"q"})), decode("d2", busy=40)], SOURCE, "d1"),
    "perhaps cannot fetch": ([decode("d1", untried=frozenset({"p"})), decode("d2", busy=40)], SOURCE, "d2"),
    "perhaps is better than never": ([decode("d1", untried=frozenset({"p"}))], SOURCE, "d1"),
    "too small for what it may become": ([decode(num_blocks=7)], SOURCE, None),
}


@pytest.mark.parametrize("case", DECODE_CASES)
def test_place_decode(case: str) -> None:
    workers, source, expected = DECODE_CASES[case]
    assert _place_decode(JOB, source, workers) == expected


REPLAYS = {
    "its like": ([prefill(), decode()], "p", "d"),
    "other weights": ([prefill(fingerprint=Fingerprint("M")), decode(fingerprint=Fingerprint("M"))], None, None),
    "other numerics": ([prefill(fingerprint=OTHER_NUMERICS), decode(fingerprint=OTHER_NUMERICS)], None, None),
    "other numerics do not compute, but take over": ([prefill(), decode(fingerprint=OTHER_NUMERICS)], "p", None),
    "its like among others": (
        [prefill("a", fingerprint=Fingerprint("M")), prefill(), decode("b", fingerprint=OTHER_NUMERICS), decode()],
        "p",
        "d",
    ),
}


@pytest.mark.parametrize("case", REPLAYS)
def test_a_replay_goes_to_what_began_the_stream(case: str) -> None:
    workers, runs_prompt, runs_unsplit = REPLAYS[case]
    assert _place_prefill(REPLAY, workers) == runs_prompt
    assert _place_decode(REPLAY, None, workers) == runs_unsplit


@pytest.mark.parametrize("wanted", ["", "x", "y"])
def test_no_worker_of_another_model_is_chosen(wanted: str) -> None:
    """It is not chosen even if it could take the KV over, has all the room, or is the only one."""
    job = replace(JOB, model=wanted)
    workers = [make(f"{kind}-{model}", model=model) for kind, make in MAKERS.items() for model in ("x", "y")]
    runs_prompt, runs_unsplit = _place_prefill(job, workers), _place_decode(job, None, workers)
    takes_over = _place_decode(job, SOURCE, workers)
    if wanted:
        assert (runs_prompt, runs_unsplit, takes_over) == (f"p-{wanted}", f"d-{wanted}", f"d-{wanted}")
        assert _nearest(job, SOURCE, [decode("d-y", model="y"), decode("d-x", model="x", busy=64)]) == f"d-{wanted}"
    else:
        assert (runs_prompt, runs_unsplit, takes_over) == (None, None, None)
    in_place = mixed("p", model="z")
    assert _place_decode(job, SOURCE, [in_place]) is None, "nor its own lease"


def test_a_worker_that_comes_back_with_another_model_takes_no_more_of_the_first() -> None:
    cluster, job = Cluster([mixed(model="x")]), replace(JOB, model="x")
    assert cluster.everyone.fit(job).can_begin
    cluster.put(mixed(model="y"))
    assert not cluster.everyone.fit(job).can_begin
    assert cluster.everyone.fit(replace(job, model="y")).can_begin


def test_kv_is_taken_over_whatever_computed_it() -> None:
    assert _place_decode(REPLAY, SOURCE, [decode(fingerprint=OTHER_NUMERICS)]) == "d"
    assert _place_decode(REPLAY, SOURCE, [decode(fingerprint=Fingerprint("M"))]) is None


def test_a_worker_to_avoid_is_the_last_resort() -> None:
    job = replace(JOB, avoid=frozenset({"d1"}))
    assert _place_decode(job, SOURCE, [decode("d1"), decode("d2", busy=40)]) == "d2"
    assert _place_decode(job, SOURCE, [decode("d1")]) == "d1"


def test_a_job_waits_for_room_rather_than_going_back_to_where_it_failed() -> None:
    """The case was found by a cut between one prefill worker and all decode workers: it held nothing, and so it looked
    the best."""
    full = decode("d2", busy=64)
    job = replace(JOB, avoid=frozenset({"d1", "p1"}))
    assert _place_decode(job, SOURCE, [decode("d1"), full]) is None
    assert _nearest(job, SOURCE, [decode("d1"), full]) == "d2"
    workers = [prefill("p1"), prefill("p2", busy=64), decode("d1")]
    assert _place_prefill(job, workers) is None
    unable = [prefill("p1"), prefill("p2", fingerprint=Fingerprint("M")), decode("d1")]
    assert _place_prefill(job, unable) == "p1", "nobody could take over what runs on p2"


def test_nearest_to_room_ignores_load_but_not_capability() -> None:
    workers = [
        decode("d1", busy=63),
        decode("d2", busy=62),
        decode("d3", num_blocks=4),
        decode("d4", fingerprint=Fingerprint("M")),
    ]
    assert _nearest(JOB, SOURCE, workers) == "d2"
    assert _nearest(JOB, SOURCE, []) is None


def test_scores_are_shares() -> None:
    crowded = view("w", Role.MIXED, busy=64, predicted_sequences=99, predicted_tokens=10**6, ramp=Ramp(NOW, 9.0))
    for worker in (crowded, prefill(), decode(), mixed()):
        for _, term in (*CONFIG.prefill_terms, *CONFIG.decode_terms):
            for source in (None, SOURCE):
                assert 0.0 <= term([worker], Question(JOB, source, NOW))[0] <= 1.0


@pytest.mark.parametrize(("num_prompt_tokens", "max_tokens", "expected"), [(10, 5, 5), (10, None, 1014), (1023, 1, 1)])
def test_resolve_max_tokens(num_prompt_tokens: int, max_tokens: int | None, expected: int) -> None:
    assert resolve_max_tokens(num_prompt_tokens, max_tokens, 1024) == expected


@pytest.mark.parametrize(
    ("num_prompt_tokens", "max_tokens", "field", "asked"),
    [
        (1024, 1, "prompt", "the prompt has 1024, and at most 1023 leave room for an output"),
        (1000, 25, "stopping.max_tokens", "1025 were asked for: 1000 in the prompt, 25 after it"),
    ],
)
def test_what_is_too_long_for_every_pool(num_prompt_tokens: int, max_tokens: int, field: str, asked: str) -> None:
    with pytest.raises(ContextLengthExceeded) as raised:
        resolve_max_tokens(num_prompt_tokens, max_tokens, 1024)
    assert raised.value.field == field
    assert raised.value.description == f"This model's maximum context length is 1024 tokens; {asked}"
