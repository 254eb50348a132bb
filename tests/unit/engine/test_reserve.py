"""Tests what the engine does at once, on the caller's thread: blocks set aside for an import, all that is needed or
nothing, sequences queued, and prefixes brought from elsewhere. No prompt is hashed while others wait for the lock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import pytest

from services.core.hashing import BlockHash, block_hash, block_hashes
from services.engine.config import EngineConfig, EngineInfo
from services.engine.engine import Engine
from services.engine.schedule import prefix
from services.engine.schedule.sequence import (
    SamplingParams,
    Sequence,
    StoppingParams,
)
from services.engine.warm_up import Loaded
from services.kv.handoff_admission import EngineRoom
from services.kv.pool import Holder, OutOfBlocks
from services.kv.regions import Region
from tests.support.blocks import cache, set_aside
from tests.support.fake_runner import FakeRunner

NUM_BLOCKS, BLOCK_SIZE = 8, 4
PROMPT = list(range(14))


class NoMemory:
    """Blocks without bytes: nothing is transferred here."""

    fd = None
    block_bytes = 0
    num_blocks = NUM_BLOCKS

    def region(self, block_id: int) -> Region:
        return Region(0, 0, "cpu")

    def read_blocks(self, block_ids: Iterable[int]) -> list[bytes]:
        return [b"" for _ in block_ids]

    def copy_blocks(self, block_ids: Iterable[int], targets: Iterable[memoryview]) -> None:
        """There is nothing to copy."""

    def write_blocks(self, block_ids: Iterable[int], data: object) -> None:
        """There is nothing to write."""

    def fill_blocks(self, block_ids: Iterable[int], fill: object) -> None:
        """There is nothing to fill."""

    def close(self) -> None:
        """Nothing was taken."""


@pytest.fixture
def engine() -> Iterator[Engine]:
    info = EngineInfo("m", "d", "c", "n", "float32", 1, 1, 4, BLOCK_SIZE, NUM_BLOCKS, 32, 100, (2,), "cpu")
    made = Engine(EngineConfig("", "m", max_num_seqs=4), lambda _: Loaded(info, NoMemory(), FakeRunner()))
    yield made
    made.check_idle()


def sequence(seq_id: int = 1) -> Sequence:
    return Sequence(seq_id, list(PROMPT), len(PROMPT), SamplingParams(), StoppingParams(max_tokens=2), arrival_s=0.0)


def cache_prefix(engine: Engine, num_blocks: int) -> None:
    """Leaves the prompt's first blocks in the prefix cache."""
    cache(engine, block_hashes(PROMPT, BLOCK_SIZE)[:num_blocks])


def allow(num_fresh: int, room: EngineRoom) -> None:
    """Allows whatever is asked for."""


@pytest.mark.parametrize(("num_cached", "num_prefix"), [(0, 0), (2, 2), (3, 3)])
def test_what_is_cached_is_not_imported(engine: Engine, num_cached: int, num_prefix: int) -> None:
    cache_prefix(engine, num_cached)
    taken = engine.reserve(sequence(), allow)
    assert (len(taken.prefix), len(taken.fresh)) == (num_prefix, 4 - num_prefix)
    ledger = engine.stats().ledger
    assert (ledger.active, ledger.importing) == (num_prefix, 4 - num_prefix)
    engine.release(taken.prefix, Holder.SEQUENCE)
    engine.release(taken.fresh, Holder.IMPORT)


def test_the_last_tokens_block_is_always_imported(engine: Engine) -> None:
    """The first step here goes on from its KV, in a block of the sequence's own."""
    whole = sequence()
    whole.token_ids = list(PROMPT[:12])
    cache_prefix(engine, 3)
    taken = engine.reserve(whole, allow)
    assert (len(taken.prefix), len(taken.fresh)) == (2, 1)
    engine.release(taken.prefix, Holder.SEQUENCE)
    engine.release(taken.fresh, Holder.IMPORT)


def test_the_check_sees_the_room_without_the_prefix_and_what_would_be_taken(engine: Engine) -> None:
    cache_prefix(engine, 2)
    seen: list[tuple[int, EngineRoom]] = []
    taken = engine.reserve(sequence(), lambda num_fresh, room: seen.append((num_fresh, room)))
    assert seen == [(2, EngineRoom(6, NUM_BLOCKS, 0, 4, 0))]
    engine.release(taken.prefix, Holder.SEQUENCE)
    engine.release(taken.fresh, Holder.IMPORT)


def test_whoever_is_refused_holds_nothing(engine: Engine) -> None:
    cache_prefix(engine, 2)

    def refuse(num_fresh: int, room: EngineRoom) -> None:
        raise LookupError("no")

    with pytest.raises(LookupError):
        engine.reserve(sequence(), refuse)
    assert engine.stats().ledger.idle


def test_a_check_that_allows_more_than_there_is_holds_nothing(engine: Engine) -> None:
    cache_prefix(engine, 2)
    others = set_aside(engine, 5)
    with pytest.raises(OutOfBlocks):
        engine.reserve(sequence(), allow)
    assert engine.stats().ledger.active == 0
    engine.release(others, Holder.IMPORT)


def test_hashes_stay_with_the_sequence(engine: Engine) -> None:
    """They are computed once, not again when its blocks are indexed."""
    mine = sequence()
    taken = engine.reserve(mine, allow)
    assert mine.hashes == block_hashes(PROMPT, BLOCK_SIZE)[:3]
    engine.release(taken.prefix, Holder.SEQUENCE)
    engine.release(taken.fresh, Holder.IMPORT)


def do_at_each_hash(monkeypatch: pytest.MonkeyPatch, deed: Callable[[], None]) -> None:
    def watched(parent: BlockHash, token_ids: list[int]) -> BlockHash:
        deed()
        return block_hash(parent, token_ids)

    monkeypatch.setattr(prefix, "block_hash", watched)


def test_a_queued_prompt_is_hashed_on_the_step_thread_and_without_the_lock(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    locked: list[bool] = []
    do_at_each_hash(monkeypatch, lambda: locked.append(engine._lock.locked()))
    engine.add(sequence())
    assert locked == [], "not by whoever queues it"
    for _ in range(2):
        engine._step(lambda report: None)
    assert locked == [False] * (len(PROMPT) // BLOCK_SIZE)


def test_an_adopted_prompt_is_hashed_without_the_lock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[bool] = []
    do_at_each_hash(monkeypatch, lambda: locked.append(engine._lock.locked()))
    adopted = sequence()
    engine.adopt(adopted, (), set_aside(engine, 4), 7, Holder.IMPORT)
    engine._step(lambda report: None)
    assert locked == [False] * (len(PROMPT) // BLOCK_SIZE)


def test_what_is_not_yet_hashed_counts_as_waiting_and_can_be_aborted(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.add(sequence(1))
    engine.add(sequence(2))
    assert (engine.stats().num_waiting, engine.stats().queued_prefill_tokens) == (2, 2 * len(PROMPT))
    engine.abort(1)
    assert (engine.stats().num_waiting, engine.stats().queued_prefill_tokens) == (1, len(PROMPT))
    do_at_each_hash(monkeypatch, lambda: engine.abort(2))  # another thread, in the middle of it
    engine._step(lambda report: None)
    assert engine.stats().num_waiting == engine.stats().num_running == 0


def test_what_was_brought_is_found_lent_and_reported(engine: Engine) -> None:
    hashes = block_hashes(PROMPT, BLOCK_SIZE)
    reserved = engine.reserve_prefix(hashes[:2], allow)
    assert not reserved.found
    assert engine.stats().ledger.importing == 2
    assert engine.num_cached(hashes) == 0
    engine.keep_prefix(reserved, hashes[:2])
    assert engine.num_cached(hashes) == engine.stats().ledger.cached == 2
    changes = engine.index_changes(None)
    assert changes is not None
    assert set(changes.stored) == set(hashes[:2])
    lent = engine.lend(hashes)
    assert lent == reserved.fresh
    assert engine.stats().ledger.leased == 2
    engine.release(lent, Holder.LEASE)


def test_only_what_is_lacking_is_set_aside_and_what_was_not_brought_is_free_again(engine: Engine) -> None:
    hashes = block_hashes(PROMPT, BLOCK_SIZE)
    engine.keep_prefix(engine.reserve_prefix(hashes[:1], allow), hashes[:1])
    reserved = engine.reserve_prefix(hashes, allow)
    assert (len(reserved.found), len(reserved.fresh)) == (1, 2)
    engine.keep_prefix(reserved, hashes[:2])
    assert engine.num_cached(hashes) == engine.stats().ledger.cached == 2
    assert engine.stats().ledger.free == NUM_BLOCKS - 2


def test_what_is_found_is_not_evicted_for_what_is_lacking(engine: Engine) -> None:
    hashes, others = block_hashes(PROMPT, BLOCK_SIZE), block_hashes(list(range(50, 74)), BLOCK_SIZE)
    engine.keep_prefix(engine.reserve_prefix(hashes[:2], allow), hashes[:2])  # the least recently used
    engine.keep_prefix(engine.reserve_prefix(others, allow), others)
    reserved = engine.reserve_prefix(hashes, allow)
    assert len(reserved.found) == 2
    engine.keep_prefix(reserved, hashes)
    assert engine.num_cached(hashes) == 3


def test_two_that_bring_the_same_leave_one(engine: Engine) -> None:
    hashes = block_hashes(PROMPT, BLOCK_SIZE)
    first, second = engine.reserve_prefix(hashes, allow), engine.reserve_prefix(hashes, allow)
    engine.keep_prefix(first, hashes)
    engine.keep_prefix(second, hashes)
    assert engine.stats().ledger.cached == 3
    assert engine.lend(hashes) == first.fresh
    engine.release(first.fresh, Holder.LEASE)


def test_nothing_is_held_of_a_prefix_for_which_there_is_no_room(engine: Engine) -> None:
    hashes = block_hashes(PROMPT, BLOCK_SIZE)
    engine.keep_prefix(engine.reserve_prefix(hashes[:1], allow), hashes[:1])

    def refuse(num_fresh: int, room: EngineRoom) -> None:
        assert (num_fresh, room.num_available) == (2, NUM_BLOCKS - 1)
        raise RuntimeError("no room")

    with pytest.raises(RuntimeError):
        engine.reserve_prefix(hashes, refuse)
    with pytest.raises(OutOfBlocks):
        engine.reserve_prefix(block_hashes(list(range(40)), BLOCK_SIZE), allow)
    assert engine.stats().ledger.importing == 0
