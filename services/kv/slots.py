"""Which staging slot is whose. A slot holds a copy of one block in host memory, where a destination reads it.

Owns: the slots, and the line of fetches that wait for one. Never: what is in them, a lease's rules, I/O. Pure; one
thread.

A slot stays with its fetch until its destination has acknowledged the block or could not use it any more: the lease is
over, or Release is refused to that leg. That a stream has ended frees nothing: its destination may have read the seal,
copy on, and be told that its Release is valid.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from services.kv.lease import FetchTicket, Lease


@dataclass(slots=True)
class _Staged:
    slot: int
    ticket: FetchTicket
    block: int
    """Index in the sequence."""
    writing: bool = True
    """Our own copy into it is not known to be through: until then it is nobody else's, whatever became of the fetch."""

    @property
    def needed(self) -> bool:
        return self.writing or (self.ticket.releasable and self.ticket.copied <= self.block)


class SlotTable:
    """`settle` is to be called after every change of a lease or its fetches, `written` after every copy."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0, "nothing could ever be staged"
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._staged: dict[Lease, list[_Staged]] = {}
        self._line: dict[FetchTicket, None] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_waiting(self) -> int:
        return len(self._line)

    def take(self, ticket: FetchTicket, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """Slots for the first of `num_blocks` blocks of the sequence, which count as being written from now on. Empty
        if none is free or others were first: the fetch then has a place in the line, and whoever was served goes to
        its end, so that all get their turn."""
        assert ticket.ended is None, "the fetch is over"
        assert num_blocks > 0, "nothing to stage"
        self._line.setdefault(ticket)
        if self._first is not ticket or not self._free:
            return ()
        del self._line[ticket]
        slots = tuple(self._free.popleft() for _ in range(min(num_blocks, len(self._free))))
        staged = self._staged.setdefault(ticket.lease, [])
        staged.extend(_Staged(slot, ticket, first_block + at) for at, slot in enumerate(slots))
        return slots

    def written(self, ticket: FetchTicket, slots: Collection[int]) -> None:
        """The copies into them are through, or will never be made."""
        for staged in self._staged[ticket.lease]:
            if staged.slot in slots:
                assert staged.ticket is ticket, "written by another fetch"
                staged.writing = False
        self.settle(ticket.lease)

    def settle(self, lease: Lease) -> None:
        """Frees what the lease's fetches no longer need, and the places of those that are over."""
        for ticket in [ticket for ticket in self._line if ticket.ended is not None]:
            del self._line[ticket]
        staged = self._staged.pop(lease, [])
        kept = [one for one in staged if one.needed]
        self._free.extend(one.slot for one in staged if not one.needed)
        if kept:
            self._staged[lease] = kept

    def next_in_line(self) -> FetchTicket | None:
        """The fetch that can be served now: a slot is free for it, or can be had from an abandoned lease."""
        first = self._first
        return first if first is not None and (self._free or self.abandoned() is not None) else None

    def abandoned(self) -> Lease | None:
        """A lease to be fenced for its slots: every slot is kept for a fetch that is over, so that nobody's next step
        would free one. Of such leases, the one with most of them. As a rule its leg is dead; if it lives, it costs
        another prefill, where waiting for it could last for ever (its lease may be held for a decode worker whose room
        is taken by those that wait here)."""
        if self._free:
            return None
        if any(one.writing or one.ticket.ended is None for staged in self._staged.values() for one in staged):
            return None
        return max(self._staged, key=lambda lease: len(self._staged[lease]))

    @property
    def _first(self) -> FetchTicket | None:
        return next(iter(self._line), None)

    def check(self) -> None:
        """Every slot is free or one fetch's, and nothing is kept without need. For tests."""
        held = [one for staged in self._staged.values() for one in staged]
        assert sorted([*self._free, *(one.slot for one in held)]) == list(range(self.num_slots)), (
            "a slot is lost or shared"
        )
        assert all(self._staged.values()), "a lease without slots is remembered"
        assert all(one.needed for one in held), "a slot is kept that nobody needs"
        assert len({(one.ticket, one.block) for one in held}) == len(held), "a block is staged twice for one fetch"
        assert all(ticket.ended is None for ticket in self._line), "a fetch that is over stands in line"
