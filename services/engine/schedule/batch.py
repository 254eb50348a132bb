"""Keeps the running batch: which sequences run, and the blocks they take, need and give up.

Owns: the state RUNNING and the SEQUENCE references of running sequences. Never: the queues in front of the batch,
events, or what a step runs. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.core.hashing import num_blocks_for
from services.engine.schedule.queues import FoundBlocks, rank
from services.engine.schedule.sequence import Mode, Sequence, State
from services.kv.pool import BlockPool, Holder


class Batch:
    """Keeps the sequences that run, in order of admission."""

    def __init__(self, pool: BlockPool, max_running: int) -> None:
        self._pool = pool
        self._max_running = max_running
        self._sequences: dict[int, Sequence] = {}  # in order of admission

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self._sequences

    @property
    def full(self) -> bool:
        return len(self._sequences) >= self._max_running

    def check(self) -> None:
        """Raises AssertionError unless the batch is within its bound and all its sequences are RUNNING."""
        assert len(self) <= self._max_running, "running sequences are bounded"
        assert all(sequence.state is State.RUNNING for sequence in self), "members of the batch run"

    def join(self, sequence: Sequence) -> None:
        """Adds a sequence that already holds its blocks."""
        sequence.state = State.RUNNING
        self._sequences[sequence.seq_id] = sequence

    def enter(self, sequence: Sequence, room: FoundBlocks) -> None:
        """Takes the blocks that `room` names, and adds the sequence; it runs from the end of its cached prefix."""
        # Hits first: without a reference, allocating could evict them.
        self._pool.acquire(room.hits, Holder.SEQUENCE)
        sequence.block_ids = room.hits + self._pool.allocate(room.num_fresh, Holder.SEQUENCE)
        sequence.reserved_ids = self._pool.allocate(room.num_reserved, Holder.SEQUENCE)
        sequence.num_computed = len(room.hits) * self._pool.block_size
        self.join(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Removes the sequence and drops its references; its blocks that are indexed stay in the prefix cache."""
        del self._sequences[sequence.seq_id]
        release_blocks(self._pool, sequence)

    def short_of_blocks(self) -> list[Sequence]:
        """Returns the decodes whose last token has no slot yet, in the order of `rank`. Prefills are never among them:
        they got all their blocks at admission."""
        block_size = self._pool.block_size
        return sorted((s for s in self if len(s.block_ids) * block_size < len(s.token_ids)), key=rank)

    def grow(self, sequence: Sequence) -> list[Sequence]:
        """Gives the sequence the block that it lacks; returns the sequences preempted for that, the last by `rank`.

        The sequence itself may be one of them, and then it gets no block: when it is the last by `rank`, or when leases
        or imports hold too many blocks. It is admitted again when there is room.
        """
        num_missing = num_blocks_for(len(sequence.token_ids), self._pool.block_size) - len(sequence.block_ids)
        victims: list[Sequence] = []
        while self._pool.num_available < num_missing:
            # Leased sequences are never victims: a peer is copying their blocks.
            victim = max((s for s in self if s.mode is Mode.GENERATE), key=rank)
            self.leave(victim)
            victim.num_computed = 0
            victim.decoding = False
            victim.state = State.PREEMPTED
            victims.append(victim)
            if victim is sequence:
                return victims
        sequence.block_ids += self._pool.allocate(num_missing, Holder.SEQUENCE)
        return victims


def release_blocks(pool: BlockPool, sequence: Sequence) -> None:
    """Drops the sequence's references to all its blocks, and to those it has set aside."""
    pool.release(sequence.block_ids, Holder.SEQUENCE)
    sequence.block_ids = []
    release_reserved(pool, sequence)


def release_reserved(pool: BlockPool, sequence: Sequence) -> None:
    """Drops the references to the blocks that the sequence has set aside for its further sequences."""
    pool.release(sequence.reserved_ids, Holder.SEQUENCE)
    sequence.reserved_ids = []
