"""Keeps all leases of one worker: the source's side of the handoff. Pure; for one thread.

Owns: which calls a lease allows, fencing by leg, expiry, and the answers remembered for repeated Releases. Never: the
references behind a lease, which the caller drops when `on_end` is called, exactly once; nor I/O.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.core.errors import InvalidRequest, LeaseInvalid, LeaseNotSealed, ProtocolViolation
from services.core.hashing import num_blocks_for
from services.kv.lease import Countdown, FetchEnd, FetchTicket, Lease, LeaseListener, LeaseState, Tombstone

if TYPE_CHECKING:
    from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class ReleaseAnswer:
    valid: bool
    reason: str | None = None


def _ignore(lease: Lease) -> None:
    pass


class LeaseTable:
    """Keeps a worker's leases, moves them from state to state, and answers the calls for them.

    `on_end(lease)` is called once per lease, when it has left OPEN or SEALED: its blocks are no longer held for a
    destination. If `lease.adopted`, they pass to a sequence here. `on_change(lease)` is called after every change of a
    lease or of its fetches; the driver of streams and timers sets it.
    """

    def __init__(
        self,
        block_size: int,
        *,
        on_end: Callable[[Lease], None],
        ttl_s: float = 10.0,
        stall_s: float = 5.0,
        remember_s: float = 60.0,
        most_remembered: int = 10_000,
    ) -> None:
        """`ttl_s` and `stall_s` are the limits of a lease's two clocks.

        An ended lease's answers are given again for `remember_s`, and for at most `most_remembered` leases.
        """
        self.on_change: Callable[[Lease], None] = _ignore
        self._block_size = block_size
        self._on_end = on_end
        self._ttl_s = ttl_s
        self._stall_s = stall_s
        self._remember_s = remember_s
        self._most_remembered = most_remembered
        self._leases: dict[bytes, Lease] = {}
        self._ended: dict[bytes, Tombstone] = {}
        self._forget: deque[tuple[float, bytes]] = deque()
        """When each ended lease is forgotten, the next one first."""

    def __len__(self) -> int:
        """Returns the number of leases that are OPEN or SEALED."""
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(list(self._leases.values()))

    def get(self, lease_id: bytes) -> Lease | None:
        """Returns the lease if it is OPEN or SEALED, else None."""
        return self._leases.get(lease_id)

    def owned_by(self, owner: Hashable) -> list[Lease]:
        return [lease for lease in self if lease.owner == owner]

    @property
    def num_remembered(self) -> int:
        """Returns the number of ended leases whose answers are given again."""
        return len(self._ended)

    @property
    def num_fetches(self) -> int:
        return sum(lease.fetch is not None for lease in self._leases.values())

    # The source's side.

    def open(
        self,
        lease_id: bytes,
        *,
        owner: Hashable,
        block_ids: Sequence[int],
        num_tokens: int,
        now: float,
        listener: LeaseListener | None = None,
        ttl_s: float = math.inf,
        most_s: float | None = None,
    ) -> Lease:
        """Opens a lease, which takes over one reference to each block.

        `block_ids` are in token order, just as many as `num_tokens` tokens need. `ttl_s` is the lease's time to live if
        that is less than the table's. After `most_s` seconds, if given, it expires whatever its fetches do.
        """
        assert len(block_ids) == num_blocks_for(num_tokens, self._block_size), "blocks do not match tokens"
        assert lease_id not in self._leases, "lease ids are never reused"
        assert lease_id not in self._ended, "lease ids are never reused"
        ttl = Countdown(min(ttl_s, self._ttl_s))
        lease = Lease(lease_id, owner, listener, tuple(block_ids), num_tokens, ttl, Countdown(self._stall_s))
        lease.ends_s = None if most_s is None else now + most_s
        lease.entered_s[LeaseState.OPEN] = now
        self.forget(now)
        self._leases[lease_id] = lease  # last: when this method raises, the caller still has the references
        return lease

    def publish(self, lease_id: bytes, num_computed_tokens: int, now: float) -> bool:
        """Notes that the KV of the first `num_computed_tokens` tokens is final: their full blocks may be copied.

        A partial block waits for the seal. Returns False if the lease ended while its last step was still running.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        assert lease.state is LeaseState.OPEN, "published after the seal"
        assert num_computed_tokens <= lease.num_tokens, "published more than was leased"
        lease.num_published = max(lease.num_published, num_computed_tokens // self._block_size)
        self._changed(lease, now)
        return True

    def seal(
        self,
        lease_id: bytes,
        first_token: types_pb2.SequenceTokens | None,
        now: float,
        *,
        others: Sequence[types_pb2.SequenceTokens] = (),
        finished: bool = False,
    ) -> bool:
        """Seals the lease: every block is final and token 0 is known. Returns False if the lease is over.

        `first_token` is None for blocks of the prefix cache, after which no token is sampled.
        `others` are the first tokens of further answers. `finished` says that token 0 ended the sequence, and each of
        the others its own: the lease ends too, and an open fetch still gets the tokens.
        """
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        lease.advance(LeaseState.SEALED, now)
        lease.first_token, lease.other_first_tokens = first_token, tuple(others)
        lease.num_published = lease.num_blocks
        if finished:
            lease.finished = True
            self._leave(lease, LeaseState.RELEASED, FetchEnd.FINISHED, now)
        else:
            self._changed(lease, now)
        return True

    def abort(self, lease_id: bytes, now: float) -> bool:
        """Aborts a lease. Returns False if it is over already."""
        lease = self._leases.get(lease_id)
        if lease is None:
            return False
        self._leave(lease, LeaseState.ABORTED, FetchEnd.ABORTED, now)
        return True

    def hold(self, owner: Hashable, lease_ids: Collection[bytes], now: float) -> None:
        """Holds those leases that the owner's newest heartbeat lists: they do not expire, and its other leases may.

        A lease whose hold begins or ends has its full time to live again.
        """
        wanted = frozenset(lease_ids)
        for lease in self.owned_by(owner):
            held = lease.lease_id in wanted
            if held != lease.held:
                lease.held = held
                lease.ttl.reset(now)
                self._changed(lease, now)

    def adopt(self, lease_id: bytes, leg: int, now: float) -> Lease:
        """Lets a decode leg on this very worker take the blocks over in place. Returns the lease.

        Raises LeaseInvalid and LeaseNotSealed where a Release would be refused.
        """
        lease = self._leases.get(lease_id)
        if lease is None or lease.refuses(leg):
            raise LeaseInvalid(self._why_not(lease_id))
        self._require_sealed(lease)
        lease.adopted = True
        self._leave(lease, LeaseState.RELEASED, FetchEnd.FENCED, now)
        return lease

    # The destination's side.

    def open_fetch(self, lease_id: bytes, leg: int, first_block: int, now: float) -> FetchTicket:
        """Opens a fetch of a lease that is OPEN or SEALED. A higher leg ends an older fetch; a leg replaces its own.

        If token 0 has ended the sequence already, the ticket is FINISHED from the start and brings only that token; it
        is not refused, since the router may learn of the refusal before it learns of the token.
        Raises LeaseInvalid (unknown, over, or the leg was given up) and InvalidRequest (no such block).
        """
        ended = self._ended.get(lease_id)
        if ended is not None and ended.finished:
            return FetchTicket(ended.ghost(lease_id), leg, first_block, FetchEnd.FINISHED)
        lease = self._leases.get(lease_id)
        if lease is None or lease.refuses(leg) or (leg == lease.leg and lease.stalled):
            raise LeaseInvalid(self._why_not(lease_id))
        if not 0 <= first_block <= lease.num_blocks:
            raise InvalidRequest("open.first_block", f"{first_block} is not in [0, {lease.num_blocks}]")
        if leg > lease.leg:
            lease.end_fetch(FetchEnd.FENCED)
            lease.leg, lease.stalled, lease.fenced, lease.most_copied = leg, False, False, 0
            lease.ttl.reset(now)
            lease.stall.reset(now)
        else:
            lease.end_fetch(FetchEnd.REPLACED)
        ticket = FetchTicket(lease, leg, first_block)
        lease.fetch = ticket
        self._changed(lease, now)
        return ticket

    def announce(self, ticket: FetchTicket, upto: int, now: float) -> None:
        """Notes that the destination is being told of all blocks before index `upto`, and must copy them from now on.

        A block that still waits at the source, for a thread or a staging slot, is not announced and runs no clock.
        Without effect on a fetch that is over.
        """
        if ticket.ended is not None:
            return
        assert ticket.announced <= upto <= ticket.lease.num_published, "announced what is not final"
        ticket.announced = upto
        self._changed(ticket.lease, now)

    def ack(self, ticket: FetchTicket, copied: int, now: float) -> None:
        """Notes that the destination has all blocks before index `copied`.

        Without effect on a fetch that is over. Raises ProtocolViolation if `copied` goes back, or beyond what was
        announced.
        """
        if ticket.ended is not None:
            return
        lease = ticket.lease
        if not ticket.copied <= copied <= ticket.announced:
            raise ProtocolViolation(f"acknowledged {copied} blocks after {ticket.copied} of {ticket.announced}")
        ticket.copied = copied
        if copied > lease.most_copied:
            lease.most_copied = copied
            lease.stall.reset(now)
        self._changed(lease, now)

    def fence(self, lease: Lease, now: float) -> None:
        """Gives the lease's newest leg up: it may neither fetch nor release any more. A higher leg may."""
        if lease.live:
            lease.fenced = True
            lease.end_fetch(FetchEnd.FENCED)
            self._changed(lease, now)

    def close_fetch(self, ticket: FetchTicket, now: float) -> None:
        """Ends a fetch because its stream is gone. Without effect on a fetch that is over already."""
        if ticket.ended is None:
            ticket.lease.end_fetch(FetchEnd.CLOSED)
            self._changed(ticket.lease, now)

    def release(self, lease_id: bytes, leg: int, now: float) -> ReleaseAnswer:
        """Releases the lease, if it is SEALED at this moment and the leg was not given up. Returns whether that is so.

        After a valid Release the same leg gets the same answer again. A leg is given up when a higher one takes over,
        or when it is fenced. Raises LeaseNotSealed while the lease is OPEN.
        """
        self.forget(now)
        ended = self._ended.get(lease_id)
        if ended is not None and ended.released_leg == leg:
            return ReleaseAnswer(True)
        lease = self._leases.get(lease_id)
        if lease is None or lease.refuses(leg):
            return ReleaseAnswer(False, self._why_not(lease_id))
        self._require_sealed(lease)
        lease.released_leg = leg
        own = lease.fetch is None or lease.fetch.leg == leg
        self._leave(lease, LeaseState.RELEASED, FetchEnd.RELEASED if own else FetchEnd.FENCED, now)
        return ReleaseAnswer(True)

    # Time.

    def expire(self, now: float) -> list[Lease]:
        """Ends every fetch that stalls, and every lease whose time is over. Returns the leases that it ended.

        To be called at `next_deadline` even if nothing else happens.
        """
        expired = []
        for lease in self:
            if lease.expired(now):
                self._leave(lease, LeaseState.EXPIRED, FetchEnd.EXPIRED, now)
                expired.append(lease)
            elif lease.stall.over(now) and lease.fetch is not None and lease.fetch.sending:
                lease.stall.reset(now)  # a slow network takes longer for what is acknowledged at once
            elif lease.stall.over(now):
                lease.stalled = True
                lease.end_fetch(FetchEnd.STALLED)
                self._changed(lease, now)
        self.forget(now)
        return expired

    def next_deadline(self) -> float | None:
        """Returns when `expire` has something to end, if nothing changes until then; None if never. O(leases)."""
        return min((d for lease in self._leases.values() if (d := lease.deadline_s) is not None), default=None)

    def forget(self, now: float) -> None:
        """Forgets the answers of leases that ended `remember_s` ago, and the oldest of too many.

        To be called at `next_forgetting` even if nothing else happens.
        """
        while self._forget and (self._forget[0][0] <= now or len(self._forget) > self._most_remembered):
            del self._ended[self._forget.popleft()[1]]

    def next_forgetting(self) -> float | None:
        """Returns when `forget` has something to drop; None if nothing is remembered."""
        return self._forget[0][0] if self._forget else None

    def _require_sealed(self, lease: Lease) -> None:
        if lease.state is not LeaseState.SEALED:
            raise LeaseNotSealed(f"lease {lease.lease_id.hex()} is {lease.state.value}")

    def _why_not(self, lease_id: bytes) -> str:
        if lease_id in self._leases:
            return "this leg was given up: it stalled, others needed what was kept for it, or a higher one took over"
        ended = self._ended.get(lease_id)
        return "the lease is unknown here" if ended is None else f"the lease is {ended.state.value}"

    def _changed(self, lease: Lease, now: float) -> None:
        if lease.state is LeaseState.SEALED and lease.fetch is not None and lease.fetch.copied == lease.num_blocks:
            # Only the Release is still to come, and it must come within the time to live.
            lease.end_fetch(FetchEnd.COMPLETE)
        lease.set_clocks(now)
        self.on_change(lease)

    def _leave(self, lease: Lease, to: LeaseState, why: FetchEnd, now: float) -> None:
        lease.advance(to, now)
        lease.end_fetch(why)
        lease.set_clocks(now)
        del self._leases[lease.lease_id]
        self._ended[lease.lease_id] = lease.tombstone()
        self._forget.append((now + self._remember_s, lease.lease_id))
        self.forget(now)
        try:
            self.on_change(lease)
        finally:
            self._on_end(lease)
