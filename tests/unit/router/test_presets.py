"""Tests the terms of the presets as tables, and what each preset chooses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from services.core.errors import ConfigError
from services.router.policy import (
    Cluster,
    Fingerprint,
    HandoffsInFlight,
    HandoffTime,
    Job,
    KnownCache,
    Load,
    PolicyConfig,
    Role,
    Source,
    WorkerView,
    place_decode,
    place_prefill,
    weighted,
)
from services.router.policy import terms as of
from services.router.policy.health import Ramp
from services.router.policy.presets import DEFAULT, PRESETS, preset
from services.router.policy.terms import Question, Term
from tests.support.router_bench import Bench, started
from tests.support.worker_views import decode, mixed, prefill, view

NOW = 1000.0
JOB = Job(num_tokens=64, total_tokens=128)
SOURCE = Source("p", "h1", Fingerprint("L"))
HASHES = (1, 2, 3, 4)
KNOWN = replace(JOB, block_hashes={16: HASHES})


def measured(**figures: float) -> Load:
    return Load(1, blocks_active=1, blocks_free=63, **figures)  # type: ignore[arg-type]


def has(num_blocks: int) -> KnownCache:
    cache = KnownCache(64, 0.0)
    cache.tell(whole=True, stored=HASHES[:num_blocks], removed=())
    return cache


ALONE: dict[str, tuple[Term, WorkerView, Job, Source | None, float]] = {
    "no request": (of.few_requests, prefill(), JOB, None, 1.0),
    "one of this router": (of.few_requests, prefill(num_legs=1), JOB, None, 0.5),
    "of other routers too": (of.few_requests, prefill(num_legs=1, load=measured(num_waiting=3)), JOB, None, 0.25),
    "capacity 1, idle": (of.free_capacity, prefill(), JOB, None, 1 / 2),
    "capacity 4, three": (of.free_capacity, prefill(capacity=4.0, num_legs=3), JOB, None, 1 / 2),
    "capacity 0.5, two": (of.free_capacity, prefill(capacity=0.5, num_legs=2), JOB, None, 1 / 7),
    "500 ms of its own": (of.soon_computed, prefill(load=measured(ms_per_prefill_token=500 / 64)), JOB, None, 1 / 2),
    "those before it count": (
        of.soon_computed,
        prefill(load=measured(ms_per_prefill_token=5.0, queued_prefill_tokens=36)),
        JOB,
        None,
        1 / 2,
    ),
    "a guess of 0.5 ms": (of.soon_computed, prefill(predicted_tokens=936), JOB, None, 1 / 2),
    "a step of 50 ms": (
        of.quick_steps,
        decode(load=measured(ms_per_decode_step=40.0, ms_per_decode_sequence=5.0, num_running=2)),
        JOB,
        None,
        1 / 2,
    ),
    "a guess of 20 ms": (of.quick_steps, decode(), JOB, None, 50 / 70),
    "where its KV is": (of.in_place, mixed("p"), JOB, SOURCE, 1.0),
    "elsewhere": (of.in_place, mixed("q"), JOB, SOURCE, 0.0),
    "KV is nowhere yet": (of.in_place, mixed("p"), JOB, None, 0.0),
    "usual priority": (of.room_for_urgent, decode(), JOB, None, 0.0),
    "below the usual": (of.room_for_urgent, decode(), replace(JOB, priority=-3), None, 0.0),
    "urgent, half a batch": (
        of.room_for_urgent,
        decode(load=measured(num_running=4)),
        replace(JOB, priority=3),
        None,
        3 / 8,
    ),
    "first of one": (of.least_recent, prefill(newest_leg=7), JOB, None, 1.0),
}


@pytest.mark.parametrize("case", ALONE)
def test_terms(case: str) -> None:
    term, worker, job, source, expected = ALONE[case]
    assert term([worker], Question(job, source, NOW)) == [pytest.approx(expected)]


def scores(term: Term, workers: Sequence[WorkerView], job: Job) -> list[float]:
    return list(term(workers, Question(job, None, NOW)))


def test_the_least_recent_is_the_one_that_was_placed_to_longest_ago() -> None:
    workers = [prefill("a", newest_leg=9), prefill("b", newest_leg=2), prefill("c"), prefill("d")]
    assert scores(of.least_recent, workers, JOB) == [0.25, 0.5, 1.0, 0.75]


def of_conversation(conversation: str, **changes: object) -> Job:
    return replace(JOB, conversation=conversation, **changes)  # type: ignore[arg-type]


def first(workers: Sequence[WorkerView], job: Job) -> str:
    found = scores(of.conversation_place, workers, job)
    return workers[found.index(max(found))].worker_id


def test_a_session_keeps_its_worker_and_only_sessions_of_a_worker_that_goes_move() -> None:
    workers = [prefill(f"p-{number}") for number in range(8)]
    before = {conversation: first(workers, of_conversation(conversation)) for conversation in map(str, range(800))}
    counts = Counter(before.values())
    assert len(counts) == 8
    assert max(counts.values()) < 1.4 * 100, "they are even"
    after = {conversation: first(workers[:-1], of_conversation(conversation)) for conversation in before}
    assert {conversation for conversation in before if before[conversation] != after[conversation]} == {
        conversation for conversation in before if before[conversation] == "p-7"
    }
    assert first(workers[::-1], of_conversation("5")) == before["5"], "routers know workers in different orders"
    others = [first(workers, of_conversation(conversation, tenant="t")) for conversation in before]
    assert others != list(before.values()), "another tenant's conversation of the same name is another conversation"


def test_a_worker_over_the_bound_is_passed_over_to_the_next_in_the_sessions_order() -> None:
    idle = [prefill(name) for name in "abcd"]
    job = of_conversation("s")
    order = sorted(idle, key=lambda worker: -scores(of.conversation_place, idle, job)[idle.index(worker)])
    assert sorted(scores(of.conversation_place, idle, job)) == pytest.approx([1 / 4, 1 / 3, 1 / 2, 1.0])

    def with_requests(*counts: int) -> list[WorkerView]:
        return [replace(worker, num_legs=count) for worker, count in zip(order, counts, strict=True)]

    # With n more requests than 15, the bound is 1.25 * 16 / 4 = 5 requests with the new one.
    assert first(with_requests(4, 4, 4, 3), job) == order[0].worker_id
    assert first(with_requests(5, 4, 3, 3), job) == order[1].worker_id
    assert first(with_requests(5, 5, 3, 2), job) == order[2].worker_id
    assert first([replace(order[0], num_legs=9)], job) == order[0].worker_id, "there is no other"


def test_without_a_session_no_worker_is_preferred() -> None:
    workers = [prefill("a"), prefill("b")]
    assert scores(of.conversation_place, workers, JOB) == [0.0, 0.0]


def test_hybrid_goes_from_session_to_prefix_to_neither() -> None:
    job = replace(KNOWN, conversation="s")
    own = first([prefill("a"), prefill("b")], job)
    other = "b" if own == "a" else "a"

    def found(in_own: int, in_other: int, job: Job) -> dict[str, float]:
        workers = [prefill(own, cache=has(in_own)), prefill(other, cache=has(in_other))]
        return dict(zip((own, other), scores(of.conversation_or_prefix, workers, job), strict=True))

    sticky = {own: 1.0, other: 0.5}
    assert found(0, 0, job) == sticky, "a new conversation begins where it will be found again"
    assert found(3, 4, job) == sticky, "it has three quarters of what there is"
    assert found(2, 4, job) == {own: 0.5, other: 1.0}, "its hit rate is no longer good"
    assert found(0, 1, job) == {own: 0.0, other: 0.25}
    long = replace(job, num_tokens=80)
    assert found(0, 1, long) == {own: 0.0, other: 0.0}, "a fifth is not worth going there"
    assert found(2, 3, KNOWN) == {own: 0.5, other: 0.75}, "it belongs to no conversation"
    assert found(0, 0, KNOWN) == {own: 0.0, other: 0.0}


def test_a_prefix_draws_nobody_to_a_worker_over_the_bound() -> None:
    workers = [prefill("a", cache=has(4), num_legs=9), prefill("b", cache=has(2))]
    assert scores(of.conversation_or_prefix, workers, KNOWN) == [0.0, 0.5]


def test_a_handoff_copies_only_what_its_worker_lacks() -> None:
    time = HandoffTime(token_bytes=1 << 14)  # the prompt's are 1 MiB, in 100 ms
    time.copied(1 << 20, 100.0, NOW)
    workers = [decode("a", handoff_times={"p": time}), decode("b", handoff_times={"p": time}, cache=has(3))]
    assert list(of.quick_handoff(workers, Question(KNOWN, SOURCE, NOW))) == [pytest.approx(0.5), 1.0]


def test_terms_are_shares_in_every_preset() -> None:
    crowded = view("w", Role.MIXED, busy=64, predicted_sequences=99, predicted_tokens=10**6, num_legs=99, cache=has(4))
    job = replace(KNOWN, priority=100, conversation="s")
    workers = [crowded, prefill(ramp=Ramp(NOW, 9.0)), decode(capacity=1e6), mixed(capacity=1e-3)]
    for config in PRESETS.values():
        for _, term in (*config.prefill_terms, *config.decode_terms):
            assert all(0.0 <= share <= 1.0 for share in term(workers, Question(job, SOURCE, NOW)))


def test_the_default_is_what_is_documented() -> None:
    """States today's weights, which a change of another preset must not change."""
    config = preset(DEFAULT, "--policy")
    assert config == PolicyConfig()
    assert [(weight, term.__name__) for weight, term in config.prefill_terms] == [
        (4.0, "short_queue"),
        (1.0, "free_memory"),
        (1.0, "small_batch"),
        (2.0, "dedicated"),
        (4.0, "trusted"),
    ]
    assert [(weight, term.__name__) for weight, term in config.decode_terms] == [
        (4.0, "dedicated"),
        (2.0, "free_memory"),
        (2.0, "small_batch"),
        (1.0, "near"),
        (1.0, "quick_handoff"),
        (4.0, "trusted"),
    ]


def busy(**figures: float) -> Load:
    return measured(ms_per_prefill_token=1.0, **figures)


PREFILL_CASES: dict[str, tuple[str, Job, list[WorkerView], str]] = {
    "least recent": ("round_robin", JOB, [prefill("a", newest_leg=3), prefill("b", newest_leg=2, num_legs=9)], "b"),
    "passed over after a failure": (
        "round_robin",
        JOB,
        [prefill("a", newest_leg=3), prefill("b", newest_leg=2, ramp=Ramp(NOW, 30.0))],
        "a",
    ),
    "fewer requests": ("least_loaded", JOB, [prefill("a", num_legs=2), prefill("b", num_legs=1)], "b"),
    "fewer requests, though longer": (
        "least_loaded",
        JOB,
        [prefill("a", num_legs=2), prefill("b", num_legs=1, load=busy(queued_prefill_tokens=4000))],
        "b",
    ),
    "more capacity": ("weighted", JOB, [prefill("a", num_legs=1), prefill("b", num_legs=3, capacity=4.0)], "b"),
    "capacity used up": ("weighted", JOB, [prefill("a", num_legs=1), prefill("b", num_legs=8, capacity=4.0)], "a"),
    "faster with more to do": (
        "token_aware",
        JOB,
        [prefill("a", load=measured(ms_per_prefill_token=4.0)), prefill("b", load=busy(queued_prefill_tokens=100))],
        "b",
    ),
    "slower after all": (
        "token_aware",
        JOB,
        [prefill("a", load=measured(ms_per_prefill_token=4.0)), prefill("b", load=busy(queued_prefill_tokens=300))],
        "a",
    ),
    "known beginning": ("prefix_aware", KNOWN, [prefill("a"), prefill("b", num_legs=3, cache=has(3))], "b"),
    "its conversation": ("sticky", of_conversation("s"), [prefill("a", num_legs=1), prefill("b", num_legs=1)], "b"),
    "no conversation": ("sticky", JOB, [prefill("a", num_legs=1), prefill("b")], "b"),
    "neither conversation nor prefix": (
        "hybrid",
        KNOWN,
        [prefill("a", load=measured(ms_per_prefill_token=4.0)), prefill("b", load=busy(queued_prefill_tokens=100))],
        "b",
    ),
    "prefix before a queue": ("kv_score", KNOWN, [prefill("a"), prefill("b", cache=has(3), load=busy())], "b"),
    "a queue before a little prefix": (
        "kv_score",
        KNOWN,
        [prefill("a"), prefill("b", cache=has(1), load=busy(queued_prefill_tokens=4000))],
        "a",
    ),
}


@pytest.mark.parametrize("case", PREFILL_CASES)
def test_where_presets_send_prompts(case: str) -> None:
    name, job, workers, expected = PREFILL_CASES[case]
    cluster = Cluster([*workers, decode(num_blocks=9999)])
    config = preset(name, "--policy")
    assert place_prefill(job, cluster.everyone, HandoffsInFlight(), NOW, config) == expected
    backwards = Cluster([decode(num_blocks=9999), *workers[::-1]])
    assert place_prefill(job, backwards.everyone, HandoffsInFlight(), NOW, config) == expected


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_but_the_default_leaves_a_sequence_where_its_prompt_ran(name: str) -> None:
    workers = [decode(), mixed("p", busy=30, num_legs=5, newest_leg=9, predicted_sequences=5)]
    able = Cluster(workers).everyone.able(JOB, SOURCE)
    assert place_decode(JOB, SOURCE, able, NOW, PRESETS[name]) == ("d" if name == DEFAULT else "p")


def test_only_presets_that_look_at_prompts_have_them_hashed() -> None:
    assert {name for name, config in PRESETS.items() if config.hash_prompts} == {"prefix_aware", "hybrid", "kv_score"}


def test_weights_change_a_preset() -> None:
    changed = weighted(PRESETS["sticky"], ["prefill.prefix_cached=2", "decode.conversation_place=0"], "--policy-weight")
    assert changed.hash_prompts
    assert [(weight, term.__name__) for weight, term in changed.prefill_terms] == [
        (4.0, "conversation_place"),
        (1.0, "few_requests"),
        (1.0, "trusted"),
        (2.0, "prefix_cached"),
    ]
    assert "conversation_place" not in {term.__name__ for _, term in changed.decode_terms}


def test_an_unknown_preset_is_named_with_those_there_are() -> None:
    with pytest.raises(ConfigError) as raised:
        preset("robin", "--policy")
    assert str(raised.value) == (
        "--policy: 'robin' is not one of round_robin, least_loaded, weighted, token_aware, prefix_aware, sticky, "
        "hybrid, kv_score, pressure"
    )


@pytest.mark.parametrize("phase", [Role.PREFILL, Role.DECODE])
def test_round_robin_takes_workers_in_turn_and_a_new_one_takes_one_request(phase: Role) -> None:
    """A worker that joins late has been placed to least recently: it gets the next request, not all of them."""
    bench = Bench(policy=PRESETS["round_robin"])
    for name in ("a", "b", "c"):
        bench.join(name, phase)
    if phase is Role.PREFILL:
        bench.join("z", Role.DECODE)
    taken = []
    for number in range(10):
        if number == 4:
            bench.join("n", phase)
        bench.submit(f"r{number}")
        taken.append(bench.take_leg(phase).worker_id)
        if number % 2:
            bench.cancel(f"r{number}")  # what has ended changes nothing
    assert "".join(taken) == "abcanbcanb"


def test_a_handoff_in_place_does_not_count_as_a_placement() -> None:
    """Each request has a prefill leg and a decode leg on its worker; the prompts alone decide who is next."""
    bench = Bench(policy=PRESETS["round_robin"])
    for name in ("a", "b"):
        bench.join(name, Role.MIXED)
    legs = []
    for request_id in ("r0", "r1"):
        bench.submit(request_id)
        legs.append(bench.take_leg(Role.PREFILL))
    bench.say("a", started(legs[0]))
    assert bench.take_leg(Role.DECODE).worker_id == "a"
    bench.submit("r2")
    legs.append(bench.take_leg(Role.PREFILL))
    assert [leg.worker_id for leg in legs] == ["a", "b", "a"]
