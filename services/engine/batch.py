"""The running batch: which sequences run, and the blocks they take, need and give up.

Owns: RUNNING and the SEQUENCE references taken there. Never: the lines in front of it, events, or what a step runs.
Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from services.core.hashing import num_blocks_for
from services.engine.admission import Room, rank
from services.engine.block_pool import BlockPool, Holder
from services.engine.sequence import Mode, Sequence, State


class Batch:
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
        assert len(self) <= self._max_running, "running sequences are bounded"
        assert all(sequence.state is State.RUNNING for sequence in self), "members of the batch run"

    def join(self, sequence: Sequence) -> None:
        """Runs a sequence that has its blocks."""
        sequence.state = State.RUNNING
        self._sequences[sequence.seq_id] = sequence

    def enter(self, sequence: Sequence, room: Room) -> None:
        """Takes the room and runs the sequence from the end of its cached prefix."""
        # Hits first: without a reference, allocating could evict them.
        self._pool.acquire(room.hits, Holder.SEQUENCE)
        sequence.block_ids = room.hits + self._pool.allocate(room.num_fresh, Holder.SEQUENCE)
        sequence.num_computed = len(room.hits) * self._pool.block_size
        self.join(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Out of the batch; its references are dropped, and what is indexed stays cached."""
        del self._sequences[sequence.seq_id]
        release_blocks(self._pool, sequence)

    def short_of_blocks(self) -> list[Sequence]:
        """Decodes whose last token has no slot yet, better claims first. Prefills reserved all theirs at admission."""
        block_size = self._pool.block_size
        return sorted((s for s in self if len(s.block_ids) * block_size < len(s.token_ids)), key=rank)

    def grow(self, sequence: Sequence) -> list[Sequence]:
        """Gives it the block it is short of; answers the sequences preempted for that, the worst claims.

        Where leases or imports hold the block it is its own victim at last, and comes back when they let go.
        """
        num_missing = num_blocks_for(len(sequence.token_ids), self._pool.block_size) - len(sequence.block_ids)
        victims: list[Sequence] = []
        while self._pool.num_available < num_missing:
            # Leased sequences are never victims: a peer is copying their blocks.
            victim = max((s for s in self if s.mode is Mode.GENERATE), key=rank)
            self.leave(victim)
            victim.num_computed = 0
            victim.state = State.PREEMPTED
            victims.append(victim)
            if victim is sequence:
                return victims
        sequence.block_ids += self._pool.allocate(num_missing, Holder.SEQUENCE)
        return victims


def release_blocks(pool: BlockPool, sequence: Sequence) -> None:
    pool.release(sequence.block_ids, Holder.SEQUENCE)
    sequence.block_ids = []
