"""Tests the records of choices as tables: what they say of the winner, of the others, and of who was left out."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from services.router import policy
from services.router.policy import (
    Cluster,
    Fingerprint,
    HandoffsInFlight,
    Job,
    KnownCache,
    LeftOut,
    Load,
    PlacedPhase,
    PlacementChoice,
    PolicyConfig,
    Ranking,
    Role,
    Source,
    WhyNot,
    WorkerView,
    explain_choice,
)
from services.router.policy.explanation import MOST_SCORED, Decider, Verdict
from services.router.policy.filter import MOST_NAMED
from services.router.policy.terms import TERMS, Question, Term
from tests.support.worker_views import decode, mixed, prefill, view

NOW = 1000.0
JOB = Job(num_tokens=64, total_tokens=128)
SOURCE = Source("p", "h1", Fingerprint("L"))


def load(**fields: Any) -> Load:
    return Load(1, **{"blocks_active": 1, "blocks_free": 63, **fields})


def start(
    workers: list[WorkerView],
    *,
    job: Job = JOB,
    in_flight: Iterable[int] = (),
    claimed: Iterable[str] = (),
    config: PolicyConfig | None = None,
) -> PlacementChoice | None:
    """Places a prompt as the coordinator does, and returns the record of it."""
    config = config or PolicyConfig()
    cluster = Cluster(workers)
    left, ranking = cluster.without(frozenset(claimed)), Ranking()
    worker_id = policy.place_prefill(job, left, HandoffsInFlight(in_flight), NOW, config, ranking)
    assert worker_id == policy.place_prefill(job, left, HandoffsInFlight(in_flight), NOW, config), "as without a record"
    if worker_id is None:
        assert not ranking.best
        return None
    kept = {name: WhyNot.CLAIMED for name in claimed if cluster.views[name].roles.can_prefill}
    left_out = left.fit(job).left_out(PlacedPhase.PREFILL, None).after(ranking.left_out | kept)
    terms = config.prefill_terms
    chosen = left.view(worker_id)
    return explain_choice(PlacedPhase.PREFILL, job, None, chosen, ranking, terms, NOW, waited_s=0.0, left_out=left_out)


def constant(name: str, **values: float) -> Term:
    """Returns a term with a value for each worker."""

    def term(workers: Sequence[WorkerView], asked: Question) -> list[float]:
        return [values[worker.worker_id] for worker in workers]

    term.__name__ = name
    return term


A, B = {"a": 1.0, "b": 0.5}, {"a": 0.0, "b": 1.0}
VERDICTS = {
    "one term": (((2.0, constant("x", **A)),), Verdict(Decider.TERM, "x", 1.0, 1.0)),
    "the largest weighted difference, not the largest value": (
        ((4.0, constant("x", **A)), (1.0, constant("y", **B)), (1.0, constant("z", a=9.0, b=9.0))),
        Verdict(Decider.TERM, "x", 2.0, 1.0),
    ),
    "of several that favour it, the one that weighs most": (
        ((1.0, constant("x", **A)), (3.0, constant("y", **A))),
        Verdict(Decider.TERM, "y", 1.5, 2.0),
    ),
    "a tie": (((2.0, constant("x", a=0.5, b=0.5)),), Verdict(Decider.TIE)),
    "a tie of different values": (
        ((1.0, constant("x", a=1.0, b=0.0)), (1.0, constant("y", **B))),
        Verdict(Decider.TIE),
    ),
    "no terms": ((), Verdict(Decider.TIE)),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_the_reason_that_decided(case: str) -> None:
    terms, expected = VERDICTS[case]
    choice = start([prefill("b"), prefill("a"), decode()], config=PolicyConfig(prefill_terms=terms))
    assert choice is not None
    assert [each.worker_id for each in choice.scored] == ["a", "b"]
    assert choice.verdict() == expected


def test_an_only_candidate_had_no_rival() -> None:
    choice = start([prefill("a"), decode()])
    assert choice is not None
    assert (choice.verdict(), choice.runner_up, choice.num_candidates) == (Verdict(Decider.ONLY), None, 1)


COSTS = [
    ((100, 0.5), (300, 0.5), 100.0),
    ((100, 0.5), (300, 0.25), 25.0),
    ((100, 0.5), (20, 0.5), -40.0),
    ((100, 0.0), (300, 0.5), None),
    ((100, 0.5), (300, 0.0), None),
]


@pytest.mark.parametrize(("winner", "other", "expected"), COSTS)
def test_a_runner_up_costs_the_difference_of_the_queues(
    winner: tuple[int, float], other: tuple[int, float], expected: float | None
) -> None:
    workers = [
        prefill(name, load=load(queued_prefill_tokens=tokens, ms_per_prefill_token=ms))
        for name, (tokens, ms) in (("a", winner), ("b", other))
    ]
    only = PolicyConfig(prefill_terms=((1.0, constant("x", **A)),))
    choice = start([*workers, decode()], config=only)
    assert choice is not None
    verdict = choice.verdict()
    assert verdict.queue_ms == (None if expected is None else pytest.approx(expected))
    assert verdict.step_ms is None, "a prefill has no decode steps"


@pytest.mark.parametrize(
    ("phase", "queue_ms", "step_ms"),
    [(PlacedPhase.PREFILL, 20.0, None), (PlacedPhase.DECODE, None, 4.0), (PlacedPhase.UNSPLIT, 20.0, 4.0)],
)
def test_a_runner_up_costs_the_difference_of_the_steps(
    phase: PlacedPhase, queue_ms: float | None, step_ms: float | None
) -> None:
    figures = {"ms_per_prefill_token": 1.0, "ms_per_decode_step": 10.0, "ms_per_decode_sequence": 2.0}
    a, b = (
        decode(name, load=load(num_running=running, queued_prefill_tokens=10 * running, **figures))
        for name, running in (("a", 1), ("b", 3))
    )
    ranking = Ranking()
    ranking.num_candidates, ranking.best = 2, ((a, 1.0, (1.0,)), (b, 0.5, (0.5,)))
    terms = ((1.0, constant("x", **A)),)
    choice = explain_choice(phase, JOB, None, a, ranking, terms, NOW, waited_s=0.0, left_out=policy.LeftOutWorkers())
    verdict = choice.verdict()
    assert (verdict.queue_ms, verdict.step_ms) == (queue_ms, step_ms)


def test_one_that_was_not_compared_says_so() -> None:
    worker, terms = prefill("a"), ((2.0, TERMS["dedicated"]), (1.0, TERMS["trusted"]))
    choice = explain_choice(
        PlacedPhase.PREFILL, JOB, None, worker, Ranking(), terms, NOW, waited_s=2.0, left_out=policy.LeftOutWorkers()
    )
    assert choice.verdict() == Verdict(Decider.AGED)
    assert (choice.winner.score, choice.weighted(choice.winner)) == (3.0, [("dedicated", 2.0), ("trusted", 1.0)])


FULL = load(blocks_active=64, blocks_free=0, num_waiting=1)
LEFT_OUT_OF_START: dict[str, tuple[WorkerView, dict[str, Any], WhyNot]] = {
    "not ready": (prefill("x", ready=False), {}, WhyNot.NOT_READY),
    "too short": (prefill("x", max_model_len=64), {}, WhyNot.TOO_LONG),
    "another fingerprint": (
        prefill("x", fingerprint=Fingerprint("L", "other")),
        {"job": replace(JOB, fingerprint=Fingerprint("L"))},
        WhyNot.OTHER_FINGERPRINT,
    ),
    "nobody takes over": (prefill("x", fingerprint=Fingerprint("M")), {}, WhyNot.NO_TAKER),
    "blamed": (prefill("x"), {"job": replace(JOB, avoid=frozenset("x"))}, WhyNot.BLAMED),
    "untried": (prefill("x"), {}, WhyNot.UNTRIED),
    "claimed": (prefill("x"), {"claimed": ["x"]}, WhyNot.CLAIMED),
    "no blocks": (prefill("x", load=FULL), {}, WhyNot.NO_BLOCKS),
    "a full queue": (prefill("x", load=load(queued_prefill_tokens=8192)), {}, WhyNot.QUEUE_LIMIT),
}


@pytest.mark.parametrize("case", LEFT_OUT_OF_START)
def test_who_could_not_start_it_and_why(case: str) -> None:
    worker, how, why = LEFT_OUT_OF_START[case]
    taker = decode(untried=frozenset("x") if case == "untried" else frozenset())
    choice = start([worker, prefill("a"), taker], **how)
    assert choice is not None
    assert choice.winner.worker_id == "a"
    assert (choice.left_out.named, choice.left_out.number) == ((LeftOut("x", why),), 1)


def test_no_room_for_the_handoff_is_told_from_no_room_for_the_prompt() -> None:
    """Only what runs on "x" could go to "d", which is full; a mixed worker needs nobody."""
    taker = decode("d", load=FULL)
    choice = start([prefill("x"), mixed("m", barred=frozenset("x")), taker], in_flight=[1000])
    assert choice is not None
    assert choice.winner.worker_id == "m"
    assert choice.left_out.named == (LeftOut("x", WhyNot.NO_DECODE_ROOM),)


LEFT_OUT_OF_DECODE: dict[str, tuple[WorkerView, Job, WhyNot]] = {
    "blamed": (decode("x"), replace(JOB, avoid=frozenset("x")), WhyNot.BLAMED),
    "untried": (decode("x", untried=frozenset("p")), JOB, WhyNot.UNTRIED),
    "no blocks": (decode("x", load=FULL), JOB, WhyNot.NO_BLOCKS),
    "a full batch": (decode("x", load=load(num_running=8)), JOB, WhyNot.FULL_BATCH),
}
NEVER: dict[str, tuple[WorkerView, Source | None, WhyNot]] = {
    "not ready": (decode("x", ready=False), SOURCE, WhyNot.NOT_READY),
    "too short": (decode("x", max_model_len=127), SOURCE, WhyNot.TOO_LONG),
    "barred": (decode("x", barred=frozenset("p")), SOURCE, WhyNot.BARRED),
    "another fingerprint": (decode("x", fingerprint=Fingerprint("M")), SOURCE, WhyNot.OTHER_FINGERPRINT),
    "not ready for all of it": (decode("x", ready=False), None, WhyNot.NOT_READY),
    "too short for all of it": (decode("x", max_model_len=127), None, WhyNot.TOO_LONG),
    "another model": (decode("x", model="other"), None, WhyNot.OTHER_FINGERPRINT),
}


@pytest.mark.parametrize("case", LEFT_OUT_OF_DECODE)
def test_who_had_to_leave_a_handoff_and_why(case: str) -> None:
    worker, job, why = LEFT_OUT_OF_DECODE[case]
    able, ranking = [worker, decode("a")], Ranking()
    assert policy.place_decode(job, SOURCE, able, NOW, PolicyConfig(), ranking) == "a"
    assert ranking.left_out == {"x": why}


@pytest.mark.parametrize("case", NEVER)
def test_who_could_never_take_it_over_and_why(case: str) -> None:
    worker, source, why = NEVER[case]
    fit = Cluster([worker, decode("a"), prefill("p")]).everyone.fit(JOB)
    left_out = fit.left_out(PlacedPhase.UNSPLIT if source is None else PlacedPhase.DECODE, source)
    assert (left_out.named, left_out.number) == ((LeftOut("x", why),), 1)


def test_a_record_is_bounded_and_keeps_the_best() -> None:
    workers = [prefill(f"p{n:02}", load=load(queued_prefill_tokens=100 * n)) for n in range(40)]
    down = [prefill(f"x{n:02}", ready=False) for n in range(30)]
    full = [prefill(f"y{n:02}", load=FULL) for n in range(5)]
    choice = start([*reversed(workers), *down, *full, decode()])
    assert choice is not None
    assert [each.worker_id for each in choice.scored] == [f"p{n:02}" for n in range(MOST_SCORED)]
    assert (choice.num_candidates, choice.left_out.number) == (40, 35)
    assert len(choice.left_out.named) == MOST_NAMED
    assert [each.why for each in choice.left_out.named] == [WhyNot.NO_BLOCKS] * 5 + [WhyNot.NOT_READY] * 3


def test_what_a_record_says_of_its_size_is_about_its_size() -> None:
    def record() -> PlacementChoice:
        loads = [load(queued_prefill_tokens=1000 * n, ms_per_prefill_token=0.5 + n) for n in range(MOST_SCORED)]
        choice = start([*(prefill(f"p{n}", load=each) for n, each in enumerate(loads)), decode()])
        assert choice is not None
        assert len(choice.scored) == MOST_SCORED
        return choice

    record()
    tracemalloc.start()
    try:
        choices = [record() for _ in range(50)]
        num_bytes = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert 0.5 <= 50 * choices[0].num_bytes / num_bytes <= 5.0


def test_a_record_tells_what_was_known_then() -> None:
    """A prefix cache changes after the choice; the views and the job do not."""
    cache = KnownCache(64, NOW)
    job = replace(JOB, conversation="c")
    config = PolicyConfig(hash_prompts=True, prefill_terms=((1.0, TERMS["same_conversation"]),))
    choice = start(
        [prefill("a", cache=cache), prefill("b", cache=KnownCache(64, NOW)), decode()], job=job, config=config
    )
    cache.expect((), "c")
    assert choice is not None
    assert [each.values for each in choice.scored] == [(0.0,), (0.0,)]
    assert cache.has_conversation("c")


def random_worker(draw: random.Random, name: str) -> WorkerView:
    free = draw.choice([0, 3, 20, 63])
    return view(
        name,
        draw.choice([Role.PREFILL, Role.DECODE, Role.MIXED]),
        ready=draw.random() < 0.8,
        fingerprint=Fingerprint(draw.choice("LLLM")),
        max_model_len=draw.choice([64, 127, 1024]),
        load=Load(
            1,
            blocks_active=64 - free,
            blocks_free=free,
            num_running=draw.choice([0, 3, 8]),
            num_waiting=1,
            queued_prefill_tokens=draw.choice([0, 100, 8192]),
        ),
        barred=frozenset(draw.sample("abcdefgh", draw.choice([0, 0, 2]))),
        untried=frozenset(draw.sample("abcdefgh", draw.choice([0, 2, 8]))),
    )


def test_every_worker_is_a_candidate_or_was_left_out() -> None:
    """The clusters are random. Scores are the sums of their terms, in order, and nobody is missing or named twice."""
    draw, num_chosen = random.Random(1), 0
    for _ in range(1500):
        workers = [random_worker(draw, name) for name in "abcdefgh"]
        avoid = frozenset(draw.sample("abcdefgh", draw.choice([0, 0, 3])))
        in_flight = draw.choice([[], [200]])
        claimed = draw.sample("abcdefgh", draw.choice([0, 0, 2]))
        choice = start(workers, job=replace(JOB, avoid=avoid), in_flight=in_flight, claimed=claimed)
        if choice is None:
            continue
        num_chosen += 1
        for each in choice.scored:
            assert each.score == pytest.approx(sum(value for _, value in choice.weighted(each)))
        ranks = [(-each.score, each.worker_id) for each in choice.scored]
        assert ranks == sorted(ranks)
        able = {worker.worker_id for worker in workers if worker.roles.can_prefill}
        named = [each.worker_id for each in choice.scored] + [each.worker_id for each in choice.left_out.named]
        assert len(named) == len(set(named))
        assert set(named) <= able
        assert choice.num_candidates + choice.left_out.number == len(able)
    assert num_chosen > 300
