"""Tests the orders of eviction: what each must do, and what the two with a guard against scans are for."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from benchmarks.tiny_lfu import TinyLfu
from services.core.hashing import block_hashes
from services.kv.eviction import EvictionOrder, LeastRecentlyUsed
from services.kv.pool import BlockPool, Holder
from services.kv.s3_fifo import S3Fifo
from tests.support.examples import num_examples

ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "lru": lambda capacity: LeastRecentlyUsed(),
    "s3-fifo": lambda capacity: S3Fifo(),
    "tiny-lfu": TinyLfu,
}
ACTS = st.lists(
    st.tuples(st.sampled_from(["add", "use", "return", "touch", "forget", "evict"]), st.integers(0, 20)), max_size=60
)


def a_hash(number: int) -> bytes:
    return block_hashes([number], 1)[0]


@pytest.mark.parametrize("name", ORDERS)
@settings(max_examples=num_examples(80), deadline=None)
@given(acts=ACTS)
def test_an_order_has_each_block_once(name: str, acts: list[tuple[str, int]]) -> None:
    order = ORDERS[name](10)
    there: list[bytes] = []
    used: list[bytes] = []
    for act, number in acts:
        if act == "add" and a_hash(number) not in there + used:
            order.add(a_hash(number))
            there.append(a_hash(number))
        elif act == "return" and used:
            order.add(hash := used.pop(number % len(used)))
            there.append(hash)
        elif there:
            hash = there[number % len(there)]
            if act == "use":
                order.use(hash)
                there.remove(hash)
                used.append(hash)
            elif act == "touch":
                order.touch(hash)
            elif act == "forget":
                order.forget(hash)
                there.remove(hash)
            elif act == "evict":
                there.remove(order.evict())
        assert sorted(order) == sorted(there)
        assert len(order) == len(there)
        assert all(each in order for each in there)
        assert not any(each in order for each in used)


@pytest.mark.parametrize(("name", "fewest", "most"), [("lru", 0, 0), ("s3-fifo", 20, 20), ("tiny-lfu", 10, 20)])
def test_only_the_least_recently_used_are_no_guard_against_a_scan(name: str, fewest: int, most: int) -> None:
    pool = BlockPool(100, 1, order=ORDERS[name](100))

    def ask(hashes: list[bytes]) -> int:
        cached = pool.match_prefix(hashes)
        pool.acquire(cached, Holder.SEQUENCE)
        fresh = pool.allocate(len(hashes) - len(cached), Holder.SEQUENCE)
        for block_id, hash in zip(fresh, hashes[len(cached) :], strict=True):
            pool.index(block_id, hash)
        pool.release([*cached, *fresh], Holder.SEQUENCE)
        pool.check()
        return len(cached)

    shared = block_hashes(range(20), 1)
    for _ in range(3):
        ask(shared)
    for number in range(30):
        ask(block_hashes([1000 + number] * 10, 1))
    assert fewest <= ask(shared) <= most


def test_what_comes_back_soon_stays() -> None:
    order = S3Fifo()
    for number in range(10):
        order.add(a_hash(number))
        if number:
            order.touch(a_hash(number))
    assert order.evict() == a_hash(0)
    order.add(a_hash(0))
    for number in range(100, 110):
        order.add(a_hash(number))
    for _ in range(5):
        order.evict()
    assert a_hash(0) in order


def test_what_was_popular_once_is_forgotten() -> None:
    order = TinyLfu(10)
    order.add(a_hash(0))
    for _ in range(15):
        order.touch(a_hash(0))
    for number in range(1, 400):
        order.add(a_hash(number))
        order.touch(a_hash(number))
        if len(order) > 10:
            order.evict()
    assert a_hash(0) not in order
