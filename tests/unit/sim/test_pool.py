"""Tests a simulated worker's blocks and its prefix cache: what is found, what makes room, and that no block is lost."""

from __future__ import annotations

import random

import pytest

from services.core.hashing import block_hashes
from services.sim.pool import Part, PromptParts, SimPool


def prompt(*ids: int, part_tokens: int = 32) -> PromptParts:
    return PromptParts(tuple(block_hashes(ids, 1)), part_tokens)


def hold(pool: SimPool, of: PromptParts, num_tokens: int) -> tuple[list[Part], int]:
    """Uses what the cache has of a sequence. Returns the parts, and how many tokens are not computed again."""
    hits = pool.find(of, num_tokens)
    pool.hold(hits)
    return hits.parts, hits.num_blocks * 16


def compute(pool: SimPool, of: PromptParts, num_tokens: int) -> tuple[list[Part], int]:
    """Lets a sequence of so many tokens take its blocks and be computed. Returns its parts, and its own blocks."""
    held, cached_tokens = hold(pool, of, num_tokens)
    own = -(-num_tokens // 16) - cached_tokens // 16
    pool.take(own)
    new = pool.keep(of, num_tokens)
    return [*held, *new], own - sum(part.num_blocks for part in new)


def finish(pool: SimPool, parts: list[Part], own: int) -> None:
    pool.give(own)
    pool.let_go(parts)


def test_a_prompt_is_found_again_but_for_the_block_of_its_last_token() -> None:
    pool = SimPool(100, 16)
    finish(pool, *compute(pool, prompt(1, 2, 3), 96))
    assert (pool.num_free, pool.num_cached) == (94, 6)
    held, cached_tokens = hold(pool, prompt(1, 2, 3), 96)
    assert (len(held), cached_tokens) == (3, 80), "a token must remain to be computed, in a block of its own"
    pool.let_go(held)
    held, cached_tokens = hold(pool, prompt(1, 2, 3), 97)
    assert cached_tokens == 96
    pool.let_go(held)
    assert hold(pool, prompt(1, 9, 3), 200)[1] == 32, "what follows another text is another text"


def test_parts_that_end_within_a_block_keep_full_blocks_only() -> None:
    pool = SimPool(100, 16)
    finish(pool, *compute(pool, prompt(1, 2, part_tokens=24), 48))
    held, cached_tokens = hold(pool, prompt(1, 2, part_tokens=24), 60)
    assert cached_tokens == 48
    assert [part.num_blocks for part in held] == [1, 2]


def test_the_longest_unused_part_makes_room_and_its_prefix_goes_last() -> None:
    pool = SimPool(8, 16)
    finish(pool, *compute(pool, prompt(1, 2), 64))
    finish(pool, *compute(pool, prompt(7), 32))
    assert pool.num_cached == 6
    pool.take(3)  # of which two are free
    assert hold(pool, prompt(1, 2), 65)[1] == 32, "its end went first"
    assert hold(pool, prompt(7), 33)[1] == 32


def test_parts_in_use_are_not_taken() -> None:
    pool = SimPool(8, 16)
    parts, own = compute(pool, prompt(1, 2), 64)
    assert pool.available == 4
    pool.take(4)
    assert hold(pool, prompt(1, 2), 65)[1] == 64
    with pytest.raises(AssertionError):
        pool.take(1)
    finish(pool, parts, own)


def test_without_caches_nothing_is_found() -> None:
    pool = SimPool(100, 16, caches=False)
    finish(pool, *compute(pool, prompt(1, 2, 3), 96))
    assert hold(pool, prompt(1, 2, 3), 96) == ([], 0)
    assert pool.num_free == 100


@pytest.mark.parametrize("seed", range(20))
def test_blocks_add_up_whatever_comes(seed: int) -> None:
    rng, pool, running = random.Random(seed), SimPool(60, 16), list[tuple[list[Part], int]]()
    for _ in range(400):
        of = prompt(*(rng.randrange(3) for _ in range(rng.randint(0, 6))), part_tokens=rng.choice([16, 24, 32]))
        num_tokens = len(of.names) * of.part_tokens + rng.randint(1, 40)
        if rng.random() < 0.5 and pool.available >= -(-num_tokens // 16):
            running.append(compute(pool, of, num_tokens))
        elif running:
            finish(pool, *running.pop(rng.randrange(len(running))))
        in_use = {id(part): part.num_blocks for parts, _ in running for part in parts}
        assert sum(in_use.values()) + sum(own for _, own in running) + pool.available == 60
        assert min(pool.num_free, pool.num_cached) >= 0
    for parts, own in running:
        finish(pool, parts, own)
    assert pool.available == 60
