"""Decides which sequence joins the running batch next.

Owns: the queues of adopted, preempted and waiting sequences, their order, and the rule how many blocks each must find.
Never: references to blocks (the batch takes those that `FoundBlocks` names). Pure.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from services.core.errors import ConfigError
from services.core.hashing import num_blocks_for
from services.engine.schedule.prefix import cacheable_prefix
from services.engine.schedule.sequence import Mode, Sequence, State
from services.kv.pool import BlockClass, BlockPool, Holder

# Bounds the work of a step when the head of a long queue does not fit.
_MAX_EXAMINED = 8


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int
    max_num_batched_tokens: int
    """The most tokens of one step over all its sequences; a sequence that decodes has one."""
    max_model_len: int
    """The most tokens of a sequence, prompt and output."""
    max_scored_tokens: int = 256
    """The most tokens of one step, over all its sequences, whose prompts' log-probabilities are wanted: the logits of
    all of them are in memory together, 150 MB for a vocabulary of 150,000 in float32."""
    max_leased_blocks: int | None = None
    """The most blocks that leases may hold, except a worker's only lease; None for no limit. Mixed workers set it."""
    overtake_limit_s: float = 1.0
    """Seconds of waiting after which a sequence that does not fit is no longer overtaken by others."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len", "max_scored_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} must be positive")

    @property
    def max_running(self) -> int:
        """Returns the most sequences in the batch. Each must be able to advance in every step, or late ones would
        starve."""
        return min(self.max_num_seqs, self.max_num_batched_tokens)


@dataclass(frozen=True, slots=True)
class FoundBlocks:
    """Names the blocks with which a sequence enters the batch: `hits` of the prefix cache, then `num_fresh` others, and
    `num_reserved` beside them for its further sequences."""

    hits: list[int]
    num_fresh: int
    num_reserved: int = 0


def rank(sequence: Sequence) -> tuple[int, float, int]:
    """Returns a sort key that puts higher priority first, then earlier arrival."""
    return -sequence.priority, sequence.arrival_s, sequence.seq_id


def tokens_left(sequence: Sequence, max_model_len: int) -> int:
    """Returns how many tokens the sequence may still sample; if 0 or less, it ends with LENGTH."""
    return min(sequence.stopping.max_tokens - sequence.next_position, max_model_len - len(sequence.token_ids))


def never_fits(pool: BlockPool, sequence: Sequence) -> bool:
    """Returns whether the sequence's tokens need more blocks than the whole pool has."""
    return num_blocks_for(len(sequence.token_ids), pool.block_size) > pool.num_blocks


class Admission:
    """Keeps the three queues in front of the batch.

    They are served in this order: adopted (these sequences hold blocks already), preempted, waiting.
    """

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
        """Raises AssertionError unless the queues are in order and their sequences have the states they should."""
        for line in (self.preempted, self.waiting):
            assert line == sorted(line, key=rank), "lines are in order"
        assert all(sequence.state is State.PREEMPTED for sequence in self.preempted), "victims"
        assert all(sequence.state is State.WAITING for sequence in (*self.adopted, *self.waiting)), "not yet run"
        waiting = (*self.preempted, *self.waiting)
        assert not any(sequence.block_ids or sequence.reserved_ids for sequence in waiting), "no hold-and-wait"

    def wait(self, sequence: Sequence) -> None:
        """Puts a new sequence into the waiting queue."""
        insort(self.waiting, sequence, key=rank)

    def wait_again(self, sequence: Sequence) -> None:
        """Puts a preempted sequence into the preempted queue."""
        insort(self.preempted, sequence, key=rank)

    def remove(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue it is in."""
        for line in (self.waiting, self.preempted):
            at = bisect_left(line, rank(sequence), key=rank)
            if at < len(line) and line[at] is sequence:
                del line[at]
                return
        self.adopted.remove(sequence)

    def take_next(self, now: float) -> tuple[Sequence, FoundBlocks] | None:
        """Takes the next preempted or waiting sequence that has room out of its queue; returns None if none has.

        The caller takes the room at once. Waiting sequences come only after all preempted ones, which were admitted
        before them. `now` is in seconds.
        """
        if not self.preempted:
            return self._take_waiting(now)
        room = self._find_room(self.preempted[0])
        return (self.preempted.pop(0), room) if room else None

    def _take_waiting(self, now: float) -> tuple[Sequence, FoundBlocks] | None:
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
            # A sequence that the lease cap keeps out waits for leases to end, so only other leases may not overtake it.
            leases_in_order = leases_in_order or aged
        return None

    def _find_room(self, sequence: Sequence) -> FoundBlocks | None:
        """Returns blocks for all tokens of the sequence, or None if the pool has too few: a sequence never holds some
        blocks while it waits for the rest."""
        pool = self._pool
        num_tokens = len(sequence.token_ids)
        num_reserved = 0
        if sequence.mode is Mode.GENERATE and tokens_left(sequence, self._config.max_model_len) > 1:
            num_tokens += 1  # the KV of the token it samples needs a slot too
            num_reserved = len(sequence.further)
        # A sequence that fills the pool to the last slot may still end with the token it samples.
        num_blocks = min(num_blocks_for(num_tokens, pool.block_size), pool.num_blocks)
        num_reserved = min(num_reserved, pool.num_blocks - num_blocks)  # more would never be there
        if num_blocks + num_reserved - (len(sequence.token_ids) - 1) // pool.block_size > pool.num_available:
            return None  # it would not fit even if its whole prefix were cached, so no look-up is needed
        hits = pool.match_prefix(cacheable_prefix(sequence, pool.block_size))
        num_fresh = num_blocks - len(hits)
        # Hits without a holder count as available until the sequence takes them.
        num_revived = sum(pool.class_of(block_id) is BlockClass.CACHED for block_id in hits)
        if num_fresh + num_reserved + num_revived > pool.num_available:
            return None
        return FoundBlocks(hits, num_fresh, num_reserved)

    def _within_lease_cap(self, sequence: Sequence, room: FoundBlocks) -> bool:
        cap = self._config.max_leased_blocks
        if sequence.mode is not Mode.PREFILL_ONLY or cap is None or not self._pool.references(Holder.LEASE):
            return True
        num_unleased = sum(self._pool.references(Holder.LEASE, block_id) == 0 for block_id in room.hits)
        return self._pool.ledger().leased + room.num_fresh + num_unleased <= cap
