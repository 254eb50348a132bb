"""The lines in front of RUNNING, and who may enter next.

Owns: the order of adopted, preempted and waiting sequences, and the rule how much room each must find. Never:
references (the batch takes what `Room` says). Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.core.errors import ConfigError
from services.core.hashing import num_blocks_for
from services.engine.block_pool import BlockClass, BlockPool, Holder
from services.engine.prefix import cacheable_prefix
from services.engine.sequence import Mode, Sequence, State

# Bounds the work of a step when the head of a long line does not fit.
_MAX_EXAMINED = 8


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    """Tokens of one step, over everything; a decode is one."""
    max_model_len: int
    """Longest sequence, prompt and output, in tokens."""
    max_leased_blocks: int | None = None
    """Mixed worker: leases hold at most so many blocks, but for a worker's only lease."""
    overtake_limit_s: float = 1.0
    """A waiting sequence older than this is not overtaken when it does not fit."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be positive")

    @property
    def max_running(self) -> int:
        """Every running sequence must be able to advance in every step, or late ones would starve."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class Room:
    """The blocks a sequence enters with: `hits` from the prefix cache, then `num_fresh` new ones."""

    hits: list[int]
    num_fresh: int


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Sorts the better claim first: priority, then arrival."""
    return -sequence.priority, sequence.arrival_s, sequence.seq_id


def tokens_left(sequence: Sequence, max_model_len: int) -> int:
    """Tokens it may still sample. 0 or less: it ends for length."""
    return min(sequence.stopping.max_tokens - sequence.next_position, max_model_len - len(sequence.token_ids))


def never_fits(pool: BlockPool, sequence: Sequence) -> bool:
    """Its tokens need more blocks than the pool has."""
    return num_blocks_for(len(sequence.token_ids), pool.block_size) > pool.num_blocks


class Admission:
    """Three lines, served in this order: adopted (they hold blocks already), preempted, waiting."""

    def __init__(self, pool: BlockPool, config: SchedulerConfig) -> None:
        self._pool = pool
        self._config = config
        self.adopted: deque[Sequence] = deque()
        self.preempted: list[Sequence] = []
        self.waiting: list[Sequence] = []

    def __len__(self) -> int:
        return len(self.adopted) + len(self.preempted) + len(self.waiting)

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.adopted
        yield from self.preempted
        yield from self.waiting

    def check(self) -> None:
        for line in (self.preempted, self.waiting):
            assert line == sorted(line, key=rank), "lines are in order"
        assert all(sequence.state is State.PREEMPTED for sequence in self.preempted), "victims"
        assert all(sequence.state is State.WAITING for sequence in (*self.adopted, *self.waiting)), "not yet run"
        assert not any(sequence.block_ids for sequence in (*self.preempted, *self.waiting)), "no hold-and-wait"

    def wait(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=rank)

    def wait_again(self, sequence: Sequence) -> None:
        insort(self.preempted, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of whichever line it stands in."""
        for line in (self.waiting, self.preempted):
            at = bisect_left(line, rank(sequence), key=rank)
            if at < len(line) and line[at] is sequence:
                del line[at]
                return
        self.adopted.remove(sequence)

    def take_next(self, now: float) -> tuple[Sequence, Room] | None:
        """The next preempted or waiting sequence that has room, out of its line. The caller takes the room at once.

        New work waits for all preempted sequences: they were promised a place before.
        """
        if not self.preempted:
            return self._take_waiting(now)
        room = self._find_room(self.preempted[0])
        return (self.preempted.pop(0), room) if room else None

    def _take_waiting(self, now: float) -> tuple[Sequence, Room] | None:
        num_examined = 0
        leases_in_order = False
        for at, sequence in enumerate(self.waiting):
            if leases_in_order and sequence.mode is Mode.PREFILL_ONLY:
                continue
            room = self._find_room(sequence)
            within_cap = room is None or self._within_lease_cap(sequence, room)
            if room and within_cap:
                del self.waiting[at]
                return sequence, room
            num_examined += 1
            aged = now - sequence.arrival_s > self._config.overtake_limit_s
            if num_examined == _MAX_EXAMINED or (aged and within_cap):
                return None
            # What the lease cap keeps out waits for leases to end: only other leases would stand in its way.
            leases_in_order = leases_in_order or aged
        return None

    def _find_room(self, sequence: Sequence) -> Room | None:
        """Blocks for all its tokens, or None: nothing is held while waiting for the rest."""
        pool = self._pool
        num_tokens = len(sequence.token_ids)
        if sequence.mode is Mode.GENERATE and tokens_left(sequence, self._config.max_model_len) > 1:
            num_tokens += 1  # the token it samples is computed too
        # A sequence that fills the pool to the last slot may still end with the token it samples.
        num_blocks = min(num_blocks_for(num_tokens, pool.block_size), pool.num_blocks)
        if num_blocks - (len(sequence.token_ids) - 1) // pool.block_size > pool.num_available:
            return None  # not even if the whole prefix were cached; spares the look-up
        hits = pool.match_prefix(cacheable_prefix(sequence, pool.block_size))
        num_fresh = num_blocks - len(hits)
        # Hits without a holder are among the available blocks, and about to leave them.
        num_revived = sum(pool.class_of(block_id) is BlockClass.CACHED for block_id in hits)
        return Room(hits, num_fresh) if num_fresh + num_revived <= pool.num_available else None

    def _within_lease_cap(self, sequence: Sequence, room: Room) -> bool:
        cap = self._config.max_leased_blocks
        if sequence.mode is not Mode.PREFILL_ONLY or cap is None or not self._pool.references(Holder.LEASE):
            return True
        num_unleased = sum(self._pool.references(Holder.LEASE, block_id) == 0 for block_id in room.hits)
        return self._pool.ledger().leased + room.num_fresh + num_unleased <= cap
