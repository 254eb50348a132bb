"""The source's record of one handoff: a lease and the fetch that follows it.

Owns: the lease's states, its one transition table, and when its two clocks run. Never: who may do what to a lease
(`lease_table`), the blocks' references, I/O. Pure.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from services.kv.countdown import Countdown

if TYPE_CHECKING:
    from baton.v1 import types_pb2


class LeaseState(enum.Enum):
    OPEN = "open"
    """Prefill is progressing; blocks are published as they become final."""
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
    """Why a fetch is over. The value is what its destination is told."""

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
        """The destination cannot go on to Release."""
        return self not in (FetchEnd.COMPLETE, FetchEnd.RELEASED, FetchEnd.FINISHED)


@dataclass(slots=True, eq=False)
class FetchTicket:
    """One fetch of a lease."""

    lease: Lease
    leg: int
    first_block: int
    """Index in the sequence of the first block the destination lacks."""
    opened_s: float
    copied: int = field(init=False)
    """The destination has all blocks before this index."""
    announced: int = field(init=False)
    """It was told of all blocks before this index."""
    ended: FetchEnd | None = None

    def __post_init__(self) -> None:
        self.copied = self.announced = self.first_block

    @property
    def releasable(self) -> bool:
        """Its leg's Release may yet be valid, also when the fetch is over."""
        return self.lease.live and not self.lease.refuses(self.leg)


class LeaseListener(Protocol):
    """Is told that a lease has ended."""

    def lease_ended(self, lease: Lease) -> None: ...


@dataclass(slots=True, eq=False)
class Lease:
    """Blocks of one prompt, held for whoever will decode it."""

    lease_id: bytes
    owner: Hashable
    """The session it belongs to and ends with."""
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
    """Blocks whose content is final, from the start of the sequence."""
    first_token: types_pb2.SequenceTokens | None = None
    """What the seal brought, passed through."""
    held: bool = False
    """The router's newest heartbeat lists it."""
    fetch: FetchTicket | None = None
    leg: int = 0
    """The newest decode leg that fetched. Lower ones are refused."""
    stalled: bool = False
    """A fetch of `leg` stalled. The leg may still release what it has, but not fetch again: it could stall for ever."""
    fenced: bool = False
    """`leg` itself is refused from now on, although no higher one took over."""
    most_copied: int = 0
    """The furthest `leg` got in any of its fetches: only beyond it a copy counts as progress."""
    released_leg: int | None = None
    adopted: bool = False
    """The owner's own worker took the blocks over in place: the references change hands instead of being dropped."""
    finished: bool = False
    """Token 0 ended the sequence: there is nothing to hand over."""

    @property
    def num_blocks(self) -> int:
        return len(self.block_ids)

    @property
    def live(self) -> bool:
        return bool(_NEXT[self.state])

    @property
    def deadline_s(self) -> float | None:
        """When the next of its clocks runs out, or None while neither runs."""
        return min((d for d in (self.ttl.deadline_s, self.stall.deadline_s) if d is not None), default=None)

    def tombstone(self) -> Tombstone:
        """What is remembered of it when it has ended."""
        token = self.first_token if self.finished else None
        return Tombstone(self.state, self.released_leg, self.finished, token, self.num_tokens)

    def refuses(self, leg: int) -> bool:
        """The leg was given up: neither Fetch nor Release is open to it."""
        return leg < self.leg or (leg == self.leg and self.fenced)

    def advance(self, to: LeaseState, now: float) -> None:
        assert to in _NEXT[self.state], f"lease {self.lease_id.hex()}: {self.state.name} -> {to.name}"
        self.state = to
        self.entered_s[to] = now

    def end_fetch(self, why: FetchEnd) -> None:
        if self.fetch is not None:
            self.fetch.ended, self.fetch = why, None

    def set_clocks(self, now: float) -> None:
        """Neither clock may measure a queue: the first waits for anyone's interest to end, the second for a block that
        was announced and not yet copied."""
        fetch = self.fetch
        self.ttl.run(self.state is LeaseState.SEALED and fetch is None and not self.held, now)
        self.stall.run(fetch is not None and fetch.copied < fetch.announced, now)


@dataclass(frozen=True, slots=True)
class Tombstone:
    """The answers that an ended lease still owes, and nothing else of it: prompt, leg and session are gone."""

    state: LeaseState
    released_leg: int | None
    finished: bool
    first_token: types_pb2.SequenceTokens | None
    """Of a lease that token 0 ended; else None."""
    num_tokens: int

    def ghost(self, lease_id: bytes) -> Lease:
        """A lease without blocks, for a fetch that comes after token 0 has ended the sequence."""
        ghost = Lease(lease_id, None, None, (), self.num_tokens, Countdown(0.0), Countdown(0.0), self.state)
        ghost.first_token, ghost.finished = self.first_token, True
        return ghost
