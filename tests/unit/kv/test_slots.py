"""Tests staging slots, rule by rule: turns, acknowledgements, ends, and what is taken back."""

from __future__ import annotations

import pytest

from services.kv.lease import FetchTicket
from services.kv.lease_table import LeaseTable
from services.kv.slots import SlotTable


class Source:
    """Keeps sealed leases of 10 blocks, each with its fetch."""

    def __init__(self, num_slots: int) -> None:
        self.slots = SlotTable(num_slots)
        self.table = LeaseTable(1, on_end=lambda _: None)
        self.table.on_change = self.slots.settle

    def fetch(self, name: str, leg: int = 1) -> FetchTicket:
        lease_id = name.encode()
        if self.table.get(lease_id) is None:
            self.table.open(lease_id, owner=0, block_ids=range(10), num_tokens=10, now=0.0)
            self.table.seal(lease_id, "token", 0.0)
        return self.table.open_fetch(lease_id, leg, 0, 0.0)

    def stage(self, ticket: FetchTicket, num_blocks: int) -> int:
        """Takes, writes and announces up to so many; how many."""
        slots = self.slots.take(ticket, ticket.announced, num_blocks)
        if slots:
            self.slots.written(ticket, slots)
            self.table.announce(ticket, ticket.announced + len(slots), 0.0)
        self.slots.check()
        return len(slots)


def test_who_was_served_goes_to_the_end_of_the_line() -> None:
    source = Source(1)
    one, two, three = (source.fetch(name) for name in ("one", "two", "three"))
    assert [source.stage(ticket, 1) for ticket in (one, two, three)] == [1, 0, 0]
    served = []
    for _ in range(6):
        holder = next(ticket for ticket in (one, two, three) if ticket.copied < ticket.announced)
        assert source.stage(holder, 1) == 0  # it wants more, behind the others
        source.table.ack(holder, holder.announced, 0.0)
        assert [source.stage(ticket, 1) for ticket in (three, two, one)].count(1) == 1  # whoever asks first
        served.append(next(ticket for ticket in (one, two, three) if ticket.copied < ticket.announced))
    assert served == [two, three, one] * 2


def test_a_newcomer_does_not_overtake_and_the_line_is_served_while_slots_last() -> None:
    source = Source(3)
    one, two, three = (source.fetch(name) for name in ("one", "two", "three"))
    assert source.stage(one, 9) == 3
    assert source.stage(two, 1) == 0
    source.table.ack(one, 3, 0.0)
    assert source.stage(three, 2) == 0
    assert source.slots.next_in_line() is two
    assert source.stage(two, 1) == 1
    assert source.slots.next_in_line() is three
    assert source.stage(three, 9) == 2
    assert source.slots.next_in_line() is None


def test_who_leaves_the_line_holds_nobody_up() -> None:
    source = Source(1)
    one, two, three = (source.fetch(name) for name in ("one", "two", "three"))
    assert [source.stage(ticket, 1) for ticket in (one, two, three)] == [1, 0, 0]
    source.table.close_fetch(two, 0.0)
    assert source.slots.num_waiting == 1
    source.table.ack(one, 1, 0.0)
    assert source.slots.next_in_line() is three


@pytest.mark.parametrize(
    ("end", "kept"), [("ack", 1), ("break", 3), ("stall", 3), ("abort", 0), ("release", 0), ("higher", 0), ("same", 3)]
)
def test_when_slots_are_free(end: str, kept: int) -> None:
    source = Source(4)
    ticket = source.fetch("one")
    source.stage(ticket, 3)
    match end:
        case "ack":
            source.table.ack(ticket, 2, 0.0)
        case "break":
            source.table.close_fetch(ticket, 0.0)
        case "stall":
            source.table.expire(5.0)
        case "abort":
            source.table.abort(b"one", 0.0)
        case "release":
            assert source.table.release(b"one", 1, 0.0).valid
        case "higher" | "same":
            source.fetch("one", leg=2 if end == "higher" else 1)
    source.slots.settle(ticket.lease)  # again: no effect
    source.slots.check()
    assert source.slots.num_free == 4 - kept


@pytest.mark.parametrize("through", [True, False])
def test_a_slot_under_our_own_copy_is_free_only_afterwards(through: bool) -> None:
    source = Source(2)
    ticket = source.fetch("one")
    slots = source.slots.take(ticket, 0, 2)
    source.table.abort(b"one", 0.0)
    if through:
        source.slots.written(ticket, slots)
    source.slots.check()
    assert source.slots.num_free == (2 if through else 0)


def test_only_when_nobody_moves_is_a_lease_abandoned_and_then_the_one_with_most_slots() -> None:
    source = Source(4)
    dead, deader, alive, waiting = (source.fetch(name) for name in ("dead", "deader", "alive", "waiting"))
    assert [source.stage(dead, 1), source.stage(deader, 2), source.stage(alive, 1)] == [1, 2, 1]
    for ticket in (dead, deader):
        source.table.close_fetch(ticket, 0.0)
    assert source.stage(waiting, 1) == 0
    assert source.slots.abandoned() is None  # the live one will acknowledge, or stall
    source.table.close_fetch(alive, 0.0)
    assert source.slots.abandoned() is deader.lease
    assert source.slots.next_in_line() is waiting
    source.table.fence(deader.lease, 0.0)
    assert source.stage(waiting, 9) == 2
