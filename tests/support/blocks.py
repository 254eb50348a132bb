"""Takes blocks of an engine's pool for tests, as a worker does for others."""

from __future__ import annotations

from services.core.hashing import BlockHash, block_hashes
from services.engine.worker_engine import WorkerEngine


def set_aside(engine: WorkerEngine, num_blocks: int) -> list[int]:
    """Returns blocks for a prefix that nobody has. They are held as an import's."""
    return engine.reserve_prefix(_unknown(num_blocks), lambda num_fresh, room: None).fresh


def lent(engine: WorkerEngine, num_blocks: int) -> list[int]:
    """Returns blocks of a prefix that was brought. They are held as a lease's."""
    cache(engine, hashes := _unknown(num_blocks))
    return engine.lend(hashes)


def cache(engine: WorkerEngine, hashes: list[BlockHash]) -> None:
    """Has a prefix brought: its blocks are in the prefix cache, and nobody holds them."""
    engine.keep_prefix(engine.reserve_prefix(hashes, lambda num_fresh, room: None), hashes)


def cached(engine: WorkerEngine) -> set[BlockHash]:
    """Returns the hashes of all blocks in the prefix cache."""
    changes = engine.index_changes(None)
    return set(changes.stored) if changes is not None else set()


def _unknown(num_blocks: int) -> list[BlockHash]:
    return block_hashes(list(range(num_blocks)), 1, "of nobody")
