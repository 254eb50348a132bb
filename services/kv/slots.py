"""Assigns staging slots to fetches. A slot keeps a copy of one block in host memory, where a destination reads it.

Owns: the slots, and the line of fetches that wait for one. Never: what is in them, a lease's rules, I/O. Pure; for one
thread.

A slot stays with its fetch until the destination has acknowledged the block or cannot use it any more, because the
lease is over or the leg's Release would be refused. The end of the stream frees nothing: the destination may have read
the seal, go on copying, and then get a valid answer to its Release.
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
    """The block's index in the sequence."""
    writing: bool = True
    """Whether the source's copy into the slot may still run. Until it has ended, no other fetch may have the slot."""

    @property
    def needed(self) -> bool:
        return self.writing or (self.ticket.releasable and self.ticket.copied <= self.block)


class SlotTable:
    """Keeps which fetch has which slot.

    `settle` is to be called after every change of a lease or its fetches, `written` after every copy.
    """

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
        """Takes slots for as many of `num_blocks` blocks, from index `first_block` of the sequence on, as are free.

        They count as being written from now on. Returns none if none is free or another fetch is before this one in the
        line; then this one has a place in the line. A fetch that was served goes to the end, so that all have a turn.
        """
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
        """Notes that the copies into the slots have ended, or will never be made."""
        for staged in self._staged[ticket.lease]:
            if staged.slot in slots:
                assert staged.ticket is ticket, "written by another fetch"
                staged.writing = False
        self.settle(ticket.lease)

    def settle(self, lease: Lease) -> None:
        """Frees the slots that the lease's fetches no longer need, and takes fetches that are over out of the line."""
        for ticket in [ticket for ticket in self._line if ticket.ended is not None]:
            del self._line[ticket]
        staged = self._staged.pop(lease, [])
        kept = [one for one in staged if one.needed]
        self._free.extend(one.slot for one in staged if not one.needed)
        if kept:
            self._staged[lease] = kept

    def next_in_line(self) -> FetchTicket | None:
        """Returns the first fetch in the line if it can be served: a slot is free, or an abandoned lease has one."""
        first = self._first
        return first if first is not None and (self._free or self.abandoned() is not None) else None

    def abandoned(self) -> Lease | None:
        """Returns the lease to be fenced for its slots, the one with most of them; None if slots will become free.

        There is one only if every slot is kept for a fetch that is over: then no progress of another fetch would free a
        slot. As a rule the leg of such a fetch is dead. If it lives, the fence costs another prefill, but to wait could
        last for ever: the lease may be held for a decode worker whose room is taken by the imports that wait here.
        """
        if self._free:
            return None
        if any(one.writing or one.ticket.ended is None for staged in self._staged.values() for one in staged):
            return None
        return max(self._staged, key=lambda lease: len(self._staged[lease]))

    @property
    def _first(self) -> FetchTicket | None:
        return next(iter(self._line), None)

    def check(self) -> None:
        """Raises AssertionError unless every slot is free or one fetch's, and none is kept without need. For tests."""
        held = [one for staged in self._staged.values() for one in staged]
        assert sorted([*self._free, *(one.slot for one in held)]) == list(range(self.num_slots)), (
            "a slot is lost or shared"
        )
        assert all(self._staged.values()), "a lease without slots is remembered"
        assert all(one.needed for one in held), "a slot is kept that nobody needs"
        assert len({(one.ticket, one.block) for one in held}) == len(held), "a block is staged twice for one fetch"
        assert all(ticket.ended is None for ticket in self._line), "a fetch that is over stands in line"
