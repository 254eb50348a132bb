"""Keeps the source's record of one handoff: a lease and the fetch that follows it. Pure.

Owns: the lease's states, its one transition table, and when its two clocks, which can be paused, run. Never: which
calls a lease allows (`lease_table`), the blocks' references, I/O.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from baton.v1 import types_pb2


@dataclass(slots=True)
class Countdown:
    """Counts seconds down, only while it runs.

    A pause keeps what was spent, so that pauses do not extend the limit; only `reset` does.
    """

    limit_s: float
    spent_s: float = 0.0
    since_s: float | None = None
    """When it was last started; None while it is paused."""

    def run(self, running: bool, now: float) -> None:
        """Starts or pauses the countdown. Without effect if it runs, or is paused, already."""
        if running and self.since_s is None:
            self.since_s = now
        elif not running and self.since_s is not None:
            self.spent_s += now - self.since_s
            self.since_s = None

    def reset(self, now: float) -> None:
        """Sets the countdown back to its full limit; it goes on running, or stays paused."""
        self.spent_s = 0.0
        if self.since_s is not None:
            self.since_s = now

    @property
    def deadline_s(self) -> float | None:
        """Returns when the countdown will be over if it goes on running; None while it is paused."""
        return None if self.since_s is None else self.since_s + self.limit_s - self.spent_s

    def over(self, now: float) -> bool:
        deadline_s = self.deadline_s
        return deadline_s is not None and deadline_s <= now


class LeaseState(enum.Enum):
    OPEN = "open"
    """The prompt is being computed; blocks are published as they become final."""
    SEALED = "sealed"
    """All blocks are published and token 0 is known."""
    RELEASED = "released"
    """The blocks were handed over (or token 0 ended the sequence)."""
    EXPIRED = "expired"
    ABORTED = "aborted"


_NEXT: dict[LeaseState, frozenset[LeaseState]] = {
    LeaseState.OPEN: frozenset({LeaseState.SEALED, LeaseState.EXPIRED, LeaseState.ABORTED}),
    LeaseState.SEALED: frozenset({LeaseState.RELEASED, LeaseState.EXPIRED, LeaseState.ABORTED}),
    LeaseState.RELEASED: frozenset(),
    LeaseState.EXPIRED: frozenset(),
    LeaseState.ABORTED: frozenset(),
}


class FetchEnd(enum.Enum):
    """Says why a fetch is over. The value is the text that its destination gets."""

    COMPLETE = "everything was copied"
    RELEASED = "its leg released the lease"
    FINISHED = "token 0 ended the sequence"
    CLOSED = "the destination left"
    REPLACED = "the same leg fetches again"
    FENCED = "a higher leg took over"
    STALLED = "announced blocks were not copied in time"
    EXPIRED = "the lease expired"
    ABORTED = "the lease was aborted"

    @property
    def broken(self) -> bool:
        """Says whether the fetch has failed, so that its destination cannot go on to the Release."""
        return self not in (FetchEnd.COMPLETE, FetchEnd.RELEASED, FetchEnd.FINISHED)


@dataclass(slots=True, eq=False)
class FetchTicket:
    """Keeps the state of one fetch of a lease."""

    lease: Lease
    leg: int
    first_block: int
    """Index in the sequence of the first block that the destination lacks."""
    copied: int = field(init=False)
    """The destination has acknowledged all blocks before this index."""
    announced: int = field(init=False)
    """All blocks before this index were announced to the destination."""
    ended: FetchEnd | None = None
    sending: set[Hashable] = field(default_factory=set)
    """The connections on which blocks are being sent, each with a bound of its own for a destination that does not
    read. Threads add and discard."""

    def __post_init__(self) -> None:
        self.copied = self.announced = self.first_block

    @property
    def releasable(self) -> bool:
        """Says whether the leg's Release may still be valid, even if the fetch is over."""
        return self.lease.live and not self.lease.refuses(self.leg)


class LeaseListener(Protocol):
    """Gets notice when a lease has ended."""

    def lease_ended(self, lease: Lease) -> None: ...


@dataclass(slots=True, eq=False)
class Lease:
    """Keeps the blocks of one prompt for the decode worker that will fetch them."""

    lease_id: bytes
    owner: Hashable
    """The session whose heartbeats hold the lease. Its leg ends the lease when the session ends. None for blocks that
    are lent from the prefix cache."""
    listener: LeaseListener | None
    block_ids: tuple[int, ...]
    """Pool blocks, in the order of the sequence."""
    num_tokens: int
    ttl: Countdown
    stall: Countdown
    state: LeaseState = LeaseState.OPEN
    entered_s: dict[LeaseState, float] = field(default_factory=dict)
    """When each state was entered."""
    num_published: int = 0
    """How many blocks, from the start of the sequence, have final content."""
    first_token: types_pb2.SequenceTokens | None = None
    """Token 0 as given to `seal`; it is passed through unread. Blocks that are lent from the prefix cache have none."""
    other_first_tokens: tuple[types_pb2.SequenceTokens, ...] = ()
    """Those of the further answers."""
    held: bool = False
    """Whether the router's newest heartbeat lists the lease."""
    fetch: FetchTicket | None = None
    leg: int = 0
    """The newest decode leg that fetched. Lower ones are refused."""
    stalled: bool = False
    """Whether a fetch of `leg` stalled. The leg may still release the lease, but not fetch again: it could stall for
    ever."""
    fenced: bool = False
    """Whether `leg` itself is refused, although no higher one took over."""
    most_copied: int = 0
    """The most blocks that `leg` had acknowledged in any of its fetches: a copy is progress only beyond it."""
    released_leg: int | None = None
    """The leg whose Release was valid."""
    adopted: bool = False
    """Whether this worker adopted the blocks in place: their references pass to a sequence instead of being dropped."""
    finished: bool = False
    """Whether token 0 ended the sequence, of several answers each, so that there is nothing to hand over."""
    ends_s: float | None = None
    """When the lease expires at the latest, fetched or not; None if that is for its owner to say."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def live(self) -> bool:
        return bool(_NEXT[self.state])

    @property
    def deadline_s(self) -> float | None:
        """Returns when the next of the lease's clocks runs out, or it must end; None if neither is to be."""
        deadlines = (self.ttl.deadline_s, self.stall.deadline_s, self.ends_s)
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def expired(self, now: float) -> bool:
        """Says whether the time to live is over, or all the time that the lease may have."""
        return self.ttl.over(now) or (self.ends_s is not None and self.ends_s <= now)

    def tombstone(self) -> Tombstone:
        """Returns what is remembered of the lease when it has ended."""
        token, others = (self.first_token, self.other_first_tokens) if self.finished else (None, ())
        return Tombstone(self.state, self.released_leg, self.finished, token, others, self.num_tokens)

    def refuses(self, leg: int) -> bool:
        """Says whether the leg was given up, so that neither its Fetch nor its Release is allowed."""
        return leg < self.leg or (leg == self.leg and self.fenced)

    def advance(self, to: LeaseState, now: float) -> None:
        assert to in _NEXT[self.state], f"lease {self.lease_id.hex()}: {self.state.name} -> {to.name}"
        self.state = to
        self.entered_s[to] = now

    def end_fetch(self, why: FetchEnd) -> None:
        if self.fetch is not None:
            self.fetch.ended, self.fetch = why, None

    def set_clocks(self, now: float) -> None:
        """Starts or pauses the lease's two clocks, so that neither counts time in which the lease only waits its turn.

        The time to live runs while a sealed lease is neither fetched nor held; the stall clock runs while an announced
        block is not copied.
        """
        fetch = self.fetch
        self.ttl.run(self.state is LeaseState.SEALED and fetch is None and not self.held, now)
        self.stall.run(fetch is not None and fetch.copied < fetch.announced, now)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """Keeps what is needed to answer repeated calls for an ended lease, and nothing else of it."""

    state: LeaseState
    released_leg: int | None
    finished: bool
    first_token: types_pb2.SequenceTokens | None
    """Token 0 of a lease that it ended; else None."""
    other_first_tokens: tuple[types_pb2.SequenceTokens, ...]
    num_tokens: int

    def ghost(self, lease_id: bytes) -> Lease:
        """Returns a lease without blocks, for a fetch that comes after token 0 has ended the sequence."""
        ghost = Lease(lease_id, None, None, (), self.num_tokens, Countdown(0.0), Countdown(0.0), self.state)
        ghost.first_token, ghost.other_first_tokens, ghost.finished = self.first_token, self.other_first_tokens, True
        return ghost
