"""Tests what policy may know of prompts: their blocks' hashes, their conversations, and where these are."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from services.core.hashing import block_hashes, short_hashes
from services.engine.schedule.prefix import hash_prompt
from services.engine.schedule.sequence import SamplingParams, Sequence, StoppingParams
from services.router.policy import (
    Fingerprint,
    Job,
    KnownCache,
    PolicyConfig,
    Role,
    WorkerView,
    sharing,
    weighted,
)
from services.router.policy.known_cache import PrefixIndex, num_blocks_of
from services.router.policy.terms import Question, prefix_cached, same_conversation, short_queue
from tests.support.router_bench import Bench

PROMPT = tuple(range(37))
HASHES = {16: short_hashes(block_hashes(PROMPT, 16, "s"))}


def test_a_job_knows_its_prompts_blocks_as_a_workers_cache_does() -> None:
    jobs: list[Job] = []

    def look(workers: Iterable[WorkerView], asked: Question) -> list[float]:
        jobs.append(asked.job)
        return [0.0 for _ in workers]

    bench = Bench(policy=PolicyConfig(hash_prompts=True, prefill_terms=((1.0, look),)))
    for worker_id in ("d", "p-0", "p-1"):
        bench.join(worker_id, Role.DECODE if worker_id == "d" else Role.PREFILL)
    bench.submit(num_tokens=37, block_hashes=HASHES, cache_salt="s", conversation="c", tenant="t")
    job = jobs[0]
    sequence = Sequence(
        seq_id=1,
        token_ids=list(PROMPT),
        num_prompt_tokens=37,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens=8),
        arrival_s=0.0,
        cache_salt="s",
    )
    hash_prompt(sequence, 16)
    assert job.block_hashes[16] == short_hashes(sequence.hashes)
    assert (len(sequence.hashes), job.conversation, job.tenant) == (2, "c", "t")


@pytest.mark.parametrize("by", ["prefix", "conversation"])
@pytest.mark.parametrize("first", ["p-0", "p-1"])
def test_a_policy_can_send_a_prompt_where_its_beginning_or_its_conversation_was_placed(by: str, first: str) -> None:
    """Places a prompt on one of two workers, and then others that share its prefix, or its conversation, or neither.

    The queue of the first worker is longer, so that all others go to the other one.
    """
    term = prefix_cached if by == "prefix" else same_conversation
    policy = PolicyConfig(hash_prompts=True, prefill_terms=((4.0, term), (1.0, short_queue)))
    bench = Bench(policy=policy)
    other = "p-1" if first == "p-0" else "p-0"
    for worker_id in ("d", first):
        bench.join(worker_id, Role.DECODE if worker_id == "d" else Role.PREFILL)

    def submit(request_id: str, prompt: tuple[int, ...], conversation: str) -> str:
        hashes = {16: short_hashes(block_hashes(prompt, 16))}
        bench.submit(request_id, len(prompt), block_hashes=hashes, conversation=conversation)
        worker_id = bench.take_leg(Role.PREFILL).worker_id
        bench.cancel(request_id)
        return worker_id

    assert submit("r", PROMPT, "c") == first
    bench.join(other, Role.PREFILL)
    bench.load(first, queued_prefill_tokens=200)
    assert bench.coordinator.block_sizes_to_hash() == {16}
    same = submit("same", (*PROMPT[:32], 5, 6), "of another") if by == "prefix" else submit("same", (7,) * 37, "c")
    assert same == first
    assert submit("neither", (8,) * 37, "another") == other
    bench.assert_idle()


def known(bench: Bench, worker_id: str) -> KnownCache:
    cache = bench.coordinator.workers.get(worker_id).cache
    assert cache is not None
    return cache


def hashes_of(*tokens: int, salt: str = "") -> tuple[int, ...]:
    return short_hashes(block_hashes(tokens, 2, salt))


def test_by_default_no_prompt_is_hashed_and_no_cache_followed() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    assert bench.coordinator.block_sizes_to_hash() == frozenset()
    assert not bench.coordinator.config.policy.hash_prompts
    assert bench.coordinator.workers.get("p").cache is None
    bench.coordinator.cache_changed("p", 1, whole=True, stored=(1,), removed=())


def test_prompts_are_hashed_for_workers_that_could_bring_prefixes_from_one_another() -> None:
    bench = Bench(policy=sharing(PolicyConfig(), "auto"))  # no term of the policy looks at them
    assert bench.coordinator.config.policy.hash_prompts
    bench.join("a", Role.MIXED)
    bench.join("other-size", Role.MIXED, block_size=32)
    assert bench.coordinator.block_sizes_to_hash() == frozenset()
    bench.join("other-model", Role.MIXED, fingerprint=Fingerprint("other", "float32"))
    assert bench.coordinator.block_sizes_to_hash() == frozenset()
    bench.join("b", Role.STORE)
    assert bench.coordinator.block_sizes_to_hash() == {16}


@pytest.mark.parametrize("looks", [False, True])
def test_who_shares_nothing_hashes_only_for_terms(looks: bool) -> None:
    policy = weighted(PolicyConfig(), ["prefill.prefix_cached=1"] if looks else [], "--policy-weight")
    bench = Bench(policy=sharing(policy, "never"))
    assert bench.coordinator.config.policy.hash_prompts is looks
    for worker_id in "ab":
        bench.join(worker_id, Role.MIXED)
    assert bool(bench.coordinator.block_sizes_to_hash()) is looks
    assert bench.coordinator.prefix_break_even() is None


def test_what_a_process_was_given_or_told_is_forgotten_with_it() -> None:
    bench = Bench(policy=PolicyConfig(hash_prompts=True))
    bench.join("d", Role.DECODE)
    bench.join("p", Role.PREFILL)
    bench.submit(num_tokens=37, block_hashes=HASHES)
    bench.cancel()
    bench.coordinator.cache_changed("p", 1, whole=True, stored=(7,), removed=())
    assert known(bench, "p").num_blocks(HASHES[16]) == 2
    assert known(bench, "p").num_blocks((7,)) == 1
    bench.lose("p")
    bench.join("p", Role.PREFILL, incarnation=2)
    bench.coordinator.cache_changed("p", 1, whole=True, stored=(7,), removed=())  # late, of the process that has ended
    assert known(bench, "p").num_blocks(HASHES[16]) == 0
    assert known(bench, "p").num_blocks((7,)) == 0


def test_a_decode_workers_cache_counts_too() -> None:
    policy = PolicyConfig(hash_prompts=True, decode_terms=((4.0, prefix_cached),))
    bench = Bench(policy=policy)
    for worker_id in ("d-0", "d-1", "d-2"):
        bench.join(worker_id, Role.DECODE)
    bench.coordinator.cache_changed("d-1", 1, whole=True, stored=HASHES[16][:1], removed=())
    bench.coordinator.cache_changed("d-2", 1, whole=True, stored=HASHES[16], removed=())
    bench.submit(num_tokens=37, block_hashes=HASHES)
    assert bench.take_leg(Role.DECODE).worker_id == "d-2"
    bench.cancel()
    bench.assert_idle()


def test_what_is_told_counts_until_it_is_taken_back() -> None:
    cache = KnownCache(64, 0.0)
    first, other = hashes_of(1, 1, 2, 2, 3, 3), hashes_of(1, 1, 2, 2, 4, 4)
    cache.tell(whole=True, stored=first, removed=())
    assert (cache.num_blocks(first), cache.num_blocks(other)) == (3, 2)
    assert cache.num_blocks(hashes_of(1, 1, 2, 2, salt="another's")) == 0
    cache.tell(whole=False, stored=other[2:], removed=first[2:])
    assert (cache.num_blocks(first), cache.num_blocks(other)) == (2, 3)
    cache.tick(1e9)
    assert cache.num_blocks(other) == 3
    cache.tell(whole=True, stored=first[:1], removed=())
    assert (cache.num_blocks(first), cache.num_blocks(other), len(cache)) == (1, 1, 1)


def test_what_is_expected_is_forgotten_after_a_while() -> None:
    """Siblings that come within ten seconds meet; what the worker has not told after twenty does not count."""
    cache = KnownCache(64, 0.0)
    prompt = hashes_of(1, 1, 2, 2)
    cache.tick(9.0)
    cache.expect(prompt, "")
    for now, num_blocks in ((9.9, 2), (10.0, 2), (19.0, 2), (20.0, 0)):
        cache.tick(now)
        assert cache.num_blocks(prompt) == num_blocks, now


def test_what_is_known_is_bounded() -> None:
    cache = KnownCache(8, 0.0)
    cache.tell(whole=True, stored=range(1, 7), removed=())
    cache.tell(whole=False, stored=range(10, 10_000), removed=(1,))
    assert len(cache) == 8, "it says that it has more than its pool"
    for number in range(1000):
        cache.expect(tuple(range(number * 5, number * 5 + 5)), f"c{number}")
    assert cache._expected.num_blocks + cache._expected_before.num_blocks <= 16
    assert cache.num_blocks(tuple(range(4995, 5000))) == 5
    for number in range(10_000):
        cache.expect((), f"conversation {number}")
    assert len(cache._conversations) == 4096
    assert cache.has_conversation("conversation 9999")
    assert not cache.has_conversation("c999")


def test_of_a_worker_with_more_than_is_kept_the_newest_and_what_is_used_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A system prompt was told of first, and is the beginning of all conversations."""
    monkeypatch.setattr("services.router.policy.known_cache._MOST_BLOCKS", 640)
    index = PrefixIndex()
    cache = KnownCache(100_000, 0.0, index)
    random_ = random.Random(3)

    def some(num_blocks: int) -> tuple[int, ...]:
        return tuple(random_.getrandbits(64) for _ in range(num_blocks))

    system = some(20)
    cache.tell(whole=True, stored=system, removed=())
    conversations = [(*system, *some(30)) for _ in range(100)]
    for prompt in conversations:
        cache.expect(prompt, "")
        cache.tell(whole=False, stored=prompt[20:], removed=())
        assert len(cache) <= 640
    cache.tick(10.0)
    cache.tick(20.0)
    for prompt in conversations[-15:]:
        assert num_blocks_of([cache], prompt) == [50] == [cache.num_blocks(prompt)]
    assert cache.num_blocks(conversations[0]) == 20
    cache.tell(whole=True, stored=some(1000), removed=())
    assert len(cache) <= 640
    cache.close()
    assert index.is_unused
    assert not len(index)


def test_of_many_expected_prompts_the_longest_common_beginning_counts() -> None:
    """Siblings that part after a common beginning, some of which the worker has told of."""
    cache = KnownCache(1 << 16, 0.0)
    common = tuple(range(100, 110))
    for number in range(40):
        cache.expect((*common, *range(1000 * number, 1000 * number + 10)), "")
        if number == 20:
            cache.tick(10.0)
    cache.tell(whole=True, stored=common[:4], removed=())
    for number, known in ((39, 20), (25, 20), (20, 20)):
        assert cache.num_blocks((*common, *range(1000 * number, 1000 * number + 10))) == known
    assert cache.num_blocks((*common, *range(39_000, 39_005), 7)) == 15
    assert cache.num_blocks((*common, 7)) == 10
    assert cache.num_blocks((*common[:2], 7)) == 2
    assert cache.num_blocks((7, *common)) == 0


def test_prompts_that_share_blocks_are_expected_as_long_as_their_blocks_fit() -> None:
    """A pool of 84 blocks is to hold ten prompts of 20 blocks, 16 of which all share: 56 in all."""
    cache = KnownCache(84, 0.0)
    prompts = [(*range(1, 17), *range(100 * number, 100 * number + 4)) for number in range(1, 11)]
    first = (*range(2000, 2008),)
    cache.expect(first, "")
    for prompt in prompts:
        cache.expect(prompt, "")
    assert cache._expected.num_blocks == 64
    assert cache.num_blocks(first) == 8
    cache.expect(tuple(range(3000, 3021)), "")
    assert (cache._expected.num_blocks, cache._expected_before.num_blocks) == (21, 64)


def test_what_is_kept_of_prompts_that_share_blocks_is_bounded() -> None:
    cache = KnownCache(64, 0.0)
    for number in range(1000):
        cache.expect((*range(1, 60), 1000 + number % 5), "")
        assert cache._expected.num_hashes <= 4 * 64
    assert cache.num_blocks(tuple(range(1, 60))) == 59


@pytest.mark.parametrize("num_blocks", [0, 1, 2, 3, 7, 8, 100])
def test_each_length_of_a_known_beginning_is_found(num_blocks: int) -> None:
    random_ = random.Random(num_blocks)
    prompt = tuple(random_.getrandbits(64) for _ in range(num_blocks))
    for length in range(num_blocks + 1):
        cache = KnownCache(256, 0.0)
        cache.tell(whole=True, stored=prompt[: length // 2], removed=())
        assert cache.num_blocks(prompt) == length // 2
        cache.expect(prompt[:length], "")
        assert cache.num_blocks(prompt) == length


def test_bringing_is_weighed_against_further_tokens_and_known_times_come_first() -> None:
    """The rest of a prompt takes a step of its own, whose fixed part bringing does not save."""
    bench = Bench(policy=sharing(PolicyConfig(), "auto"))
    for worker_id in "ab":
        bench.join(worker_id, Role.MIXED, description=object(), token_bytes=1000)
        bench.coordinator.cache_changed(worker_id, 1, whole=True, stored=(1,), removed=())
        bench.load(worker_id, ms_per_prefill_token=1.0, ms_per_further_prefill_token=0.25)
    assumed = bench.coordinator.prefix_break_even()
    assert assumed is not None
    assert (assumed.target_id, assumed.num_seen) == ("a", 0)
    assert assumed.tokens == pytest.approx(assumed.fixed_ms * 1.25 / (0.25 - 1.25 * assumed.token_ms))
    bench.coordinator.workers.get("b").bring_times["a"].observe(64, 5.0)
    measured = bench.coordinator.prefix_break_even()
    assert measured is not None
    assert (measured.source_id, measured.target_id, measured.num_seen) == ("a", "b", 1)
