"""Tests that what many workers have of a prompt is found together as it is found one by one, by a naive model."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Sequence

import pytest

from services.core.hashing import PromptHashes, ShortHash, anchor_keys
from services.router.policy import KnownCache, PrefixIndex, Role
from services.router.policy.known_cache import num_blocks_of
from services.router.policy.presets import PRESETS
from tests.support.router_bench import Bench


def common(one: Sequence[ShortHash], other: Sequence[ShortHash]) -> int:
    """Returns how many blocks two prompts have in common at their beginnings."""
    count = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        count += 1
    return count


class Naive:
    """Keeps the prompts whose blocks a worker has told of, and those that it was given, with the turn."""

    def __init__(self) -> None:
        self.told: list[PromptHashes] = []
        self.given: list[tuple[int, PromptHashes]] = []
        self.turn = 0

    def blocks(self) -> list[ShortHash]:
        """Returns all that it has told of, each once, in an order in which none comes before those it follows."""
        return list(dict.fromkeys(hash for prompt in self.told for hash in prompt))

    def num_blocks(self, prompt: PromptHashes) -> int:
        known = [common(prompt, other) for other in self.told]
        known += [common(prompt, other) for turn, other in self.given if turn >= self.turn - 1]
        return max(known, default=0)


def prompts(chance: random.Random) -> list[PromptHashes]:
    """Returns prompts of up to some hundred blocks, many of which begin as another."""
    found: list[PromptHashes] = []
    for _ in range(40):
        start = chance.choice(found)[: chance.randint(0, 300)] if found and chance.random() < 0.7 else ()
        found.append(PromptHashes((*start, *(chance.getrandbits(64) for _ in range(chance.choice((0, 3, 40, 300)))))))
    return found


@pytest.mark.parametrize("seed", range(12))
def test_it_finds_what_a_naive_model_finds(seed: int) -> None:
    """Lets workers tell, evict, dump all, be given prompts, leave and come back, in any order."""
    chance, index, now = random.Random(seed), PrefixIndex(), 0.0
    of_all = prompts(chance)
    workers = [(KnownCache(1 << 17, now, index), Naive()) for _ in range(9)]
    for _ in range(300):
        place = chance.randrange(len(workers))
        cache, naive = workers[place]
        prompt = chance.choice(of_all)
        match chance.choice(("store", "store", "evict", "dump", "give", "give", "leave", "wait")):
            case "store":
                before = set(naive.blocks())
                naive.told.append(PromptHashes(prompt[: chance.randint(0, len(prompt))]))
                stored = [hash for hash in naive.blocks() if hash not in before]
                cache.tell(whole=False, stored=stored, removed=())
            case "evict":
                before = set(naive.blocks())
                naive.told = [PromptHashes(each[: chance.randint(0, len(each))]) for each in naive.told[:4]]
                removed = sorted(before - set(naive.blocks()))
                cache.tell(whole=False, stored=(), removed=(*removed, *removed[:2], 7))
            case "dump":
                naive.told = [*naive.told[-3:], prompt]
                cache.tell(whole=True, stored=naive.blocks(), removed=())
            case "give":
                naive.given.append((naive.turn, prompt))
                cache.expect(prompt, "")
            case "leave":
                cache.close()
                workers[place] = (KnownCache(1 << 17, now, index), Naive())
            case "wait":
                now += 10.0
                for each, model in workers:
                    each.tick(now)
                    model.turn += 1
        asked = chance.choice(of_all)
        caches = [cache for cache, _ in workers]
        exact = [naive.num_blocks(asked) for _, naive in workers]
        assert [cache.num_blocks(asked) for cache in caches] == exact
        for found, right in zip(num_blocks_of(caches, asked), exact, strict=True):
            assert right - len(asked) // 64 <= found <= right
            assert found == right or 0 < right < len(asked)
        assert num_blocks_of(caches[3:5], tuple(asked)) == num_blocks_of(caches, asked)[3:5]
        assert len(index) == len({key for _, naive in workers for key in anchor_keys(naive.blocks())})
    for cache, _ in workers:
        cache.close()
    assert len(index) == 0


def test_a_bit_goes_to_another_worker_without_what_the_first_had() -> None:
    index, prompt = PrefixIndex(), PromptHashes(range(16, 16 * 200, 16))
    first, second = KnownCache(1 << 10, 0.0, index), KnownCache(1 << 10, 0.0, index)
    for cache in (first, second):
        cache.tell(whole=True, stored=prompt, removed=())
    bit = first.bit
    first.close()
    first.close()
    third, fourth = KnownCache(1 << 10, 0.0, index), KnownCache(1 << 10, 0.0, index)
    assert third.bit == bit
    assert fourth.bit not in (0, bit, second.bit), "to close it twice changes nothing"
    assert num_blocks_of([third, second], prompt) == [0, 199]


def test_what_stands_behind_a_missing_anchor_does_not_count() -> None:
    index = PrefixIndex()
    prompt = PromptHashes(16 * place + (place % 20 != 10) for place in range(100))
    assert prompt.anchors == prompt.anchor_keys == (10, 30, 50, 70, 90)
    cache = KnownCache(1 << 10, 0.0, index)
    cache.tell(whole=True, stored=prompt, removed=())
    cache.tell(whole=False, stored=(), removed=(prompt[30],))
    assert 30 - 100 // 64 <= num_blocks_of([cache], prompt)[0] <= 30


def test_what_exceeds_a_pool_is_in_no_index() -> None:
    index = PrefixIndex()
    cache = KnownCache(8, 0.0, index)
    cache.tell(whole=True, stored=range(0, 16 * 20, 16), removed=())
    assert (len(cache), len(index)) == (8, 8)


def test_workers_that_left_or_came_back_leave_nothing_behind() -> None:
    bench = Bench(policy=PRESETS["prefix_aware"])
    bench.join("p", Role.PREFILL)
    for incarnation in (2, 3):
        bench.coordinator.cache_changed("p", incarnation - 1, whole=True, stored=(16 * incarnation, 160), removed=())
        index = index_of(bench)
        assert len(index) == 2
        bench.lose("p")
        bench.join("p", Role.PREFILL, incarnation=incarnation)
        assert len(index) == 0
    of_16 = weakref.ref(index)
    del index
    assert of_16() is index_of(bench)
    bench.lose("p")
    bench.join("p", Role.PREFILL, incarnation=4, block_size=8)
    gc.collect()
    assert of_16() is None
    of_8 = weakref.ref(index_of(bench))
    bench.lose("p")
    assert bench.coordinator.withdraw("p", bench.now)
    bench.wait(0.1)
    gc.collect()
    assert of_8() is None


def index_of(bench: Bench) -> PrefixIndex:
    cache = bench.coordinator.workers.get("p").cache
    assert cache is not None
    return cache.index
