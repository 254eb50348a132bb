"""Tests staging slots under random interleavings of prefills, streams, destinations, threads and time: no destination
whose Release is valid has read a slot that was another's, and nobody waits for a slot that will never come."""

from __future__ import annotations

from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.core.clock import ManualClock
from services.core.errors import LeaseInvalid, LeaseNotSealed
from services.kv.lease import FetchTicket, Lease, LeaseState
from services.kv.lease_table import LeaseTable
from services.kv.slots import SlotTable
from tests.support.examples import num_examples

STALL_S = 5.0
PICKS = st.integers(0, 11)
"""Of what is there, counted round and round."""
Content = tuple[Lease, int]


@dataclass(eq=False)
class Fetch:
    """Keeps both ends of one fetch."""

    ticket: FetchTicket
    sent: int
    writing: tuple[int, ...] = ()
    """Slots that a thread copies into."""
    inbox: list[tuple[int, int]] = field(default_factory=list)
    """Block and slot of what was announced and not copied yet."""
    sealed: bool = False
    """The destination has read the seal."""
    copies: dict[int, Content | None] = field(default_factory=dict)

    @property
    def lease(self) -> Lease:
        return self.ticket.lease


class SlotMachine(RuleBasedStateMachine):
    @initialize(num_slots=st.integers(1, 5))
    def begin(self, num_slots: int) -> None:
        self.clock = ManualClock()
        self.table = LeaseTable(1, on_end=lambda _: None, stall_s=STALL_S)
        self.slots = SlotTable(num_slots)
        self.table.on_change = self.slots.settle
        self.content: list[Content | None] = [None] * num_slots
        """What is in each slot; None while a thread writes there."""
        self.all: list[Fetch] = []
        self.num_leases = 0

    @property
    def leases(self) -> list[Lease]:
        return list(self.table)

    @property
    def fetches(self) -> list[Fetch]:
        """That may still do something: also those whose stream is over."""
        return [fetch for fetch in self.all if fetch.ticket.releasable or fetch.writing]

    @precondition(lambda self: len(self.leases) < 2)
    @rule(num_blocks=st.integers(1, 7), sealed=st.booleans())
    def open(self, num_blocks: int, sealed: bool) -> None:
        self.num_leases += 1
        lease_id = self.num_leases.to_bytes(16, "big")
        lease = self.table.open(
            lease_id, owner=0, block_ids=range(num_blocks), num_tokens=num_blocks, now=self.clock.now()
        )
        if sealed:
            self.seal(lease)

    def seal(self, lease: Lease, *, finished: bool = False) -> None:
        if lease.state is LeaseState.OPEN:
            self.table.seal(lease.lease_id, "token", self.clock.now(), finished=finished)

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS, by=st.integers(0, 3), finished=st.booleans())
    def compute(self, pick: int, by: int, finished: bool) -> None:
        """Computes a chunk, or the end of the prompt."""
        lease = self.leases[pick % len(self.leases)]
        if lease.state is LeaseState.OPEN and lease.num_published + by < lease.num_tokens:
            self.table.publish(lease.lease_id, lease.num_published + by, self.clock.now())
        else:
            self.seal(lease, finished=finished and pick == 0)

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS)
    def abort(self, pick: int) -> None:
        if pick == 0:  # now and then
            self.table.abort(self.leases[0].lease_id, self.clock.now())

    @precondition(lambda self: self.leases)
    @rule(pick=PICKS, above=st.sampled_from([1, 1, 0, -1]), share=st.floats(0, 0.9))
    def fetch(self, pick: int, above: int, share: float) -> None:
        """Fetches by a new leg mostly; else by the same, or by one that was given up."""
        lease = self.leases[pick % len(self.leases)]
        if lease.fetch is not None and pick > 3:
            return
        first_block = int(lease.num_blocks * share)
        try:
            ticket = self.table.open_fetch(lease.lease_id, max(1, lease.leg + above), first_block, self.clock.now())
        except LeaseInvalid:
            return
        self.all.append(Fetch(ticket, first_block))

    # The source's stream and its thread.

    @precondition(lambda self: self.fetches)
    @rule(pick=PICKS, most=st.integers(1, 3), at_once=st.integers(0, 3))
    def serve_one(self, pick: int, most: int, at_once: int) -> None:
        fetch = self.fetches[pick % len(self.fetches)]
        self.serve(fetch, most)
        if at_once:
            self.written(fetch)

    def serve(self, fetch: Fetch, most: int) -> None:
        """Does one turn of the stream, woken or not."""
        ticket, lease = fetch.ticket, fetch.lease
        if ticket.ended is not None or fetch.writing:
            return
        num_left = max(0, lease.num_published - fetch.sent)
        if num_left:
            fetch.writing = self.take(ticket, fetch.sent, min(most, num_left))
            for slot in fetch.writing:
                self.content[slot] = None
        elif lease.state is LeaseState.SEALED:
            fetch.sealed = True

    def take(self, ticket: FetchTicket, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """Takes slots as `Staging.take` does."""
        slots = self.slots.take(ticket, first_block, num_blocks)
        if not slots and self.slots.next_in_line() is ticket:
            lease = self.slots.abandoned()
            assert lease is not None
            assert not self.slots.num_free
            self.table.fence(lease, self.clock.now())
            assert self.slots.num_free
            if ticket.ended is None:
                slots = self.slots.take(ticket, first_block, num_blocks)
        return slots

    @precondition(lambda self: self.fetches)
    @rule(pick=PICKS)
    def written_one(self, pick: int) -> None:
        self.written(self.fetches[pick % len(self.fetches)])

    def written(self, fetch: Fetch) -> None:
        """Ends the thread's work, whatever became of the stream; a stream that goes on announces what was written."""
        slots, fetch.writing = fetch.writing, ()
        if not slots:
            return
        blocks = range(fetch.sent, fetch.sent + len(slots))
        for block, slot in zip(blocks, slots, strict=True):
            assert self.content[slot] is None, "two write into one slot"
            self.content[slot] = fetch.lease, block
        self.slots.written(fetch.ticket, slots)
        if fetch.ticket.ended is None:
            fetch.sent = blocks.stop
            self.table.announce(fetch.ticket, fetch.sent, self.clock.now())
            fetch.inbox.extend(zip(blocks, slots, strict=True))

    @precondition(lambda self: self.fetches)
    @rule(pick=PICKS)
    def break_stream_one(self, pick: int) -> None:
        self.break_stream(self.fetches[pick % len(self.fetches)])

    def break_stream(self, fetch: Fetch) -> None:
        self.table.close_fetch(fetch.ticket, self.clock.now())

    # The destination, which may not know yet that its stream is over.

    @precondition(lambda self: self.fetches)
    @rule(pick=PICKS, count=st.integers(1, 3), acknowledges=st.booleans())
    def copy_one(self, pick: int, count: int, acknowledges: bool) -> None:
        self.copy(self.fetches[pick % len(self.fetches)], count, acknowledges)

    def copy(self, fetch: Fetch, count: int, acknowledges: bool) -> None:
        for block, slot in fetch.inbox[:count]:
            fetch.copies[block] = self.content[slot]
        del fetch.inbox[:count]
        if acknowledges and fetch.copies:
            self.table.ack(fetch.ticket, max(fetch.copies) + 1, self.clock.now())

    @precondition(lambda self: self.fetches)
    @rule(pick=PICKS)
    def release_one(self, pick: int) -> None:
        self.release(self.fetches[pick % len(self.fetches)])

    def release(self, fetch: Fetch) -> None:
        """Releases the lease once the fetch has the seal and all blocks. If the answer is valid, it uses them."""
        lease = fetch.lease
        if not fetch.sealed or fetch.inbox:
            return
        try:
            answer = self.table.release(lease.lease_id, fetch.ticket.leg, self.clock.now())
        except LeaseNotSealed:
            raise AssertionError("the seal was read") from None
        if answer.valid:
            wanted = range(fetch.ticket.first_block, lease.num_blocks)
            assert fetch.copies == {block: (lease, block) for block in wanted}

    @precondition(lambda self: self.fetches)
    @rule(seconds=st.sampled_from([0.1, 1.0, STALL_S]))
    def wait(self, seconds: float) -> None:
        self.table.expire(self.clock.advance(seconds))

    @invariant()
    def the_table_agrees(self) -> None:
        self.slots.check()

    @invariant()
    def what_may_be_read_is_there(self) -> None:
        for fetch in self.fetches:
            if fetch.ticket.releasable:
                for block, slot in fetch.inbox:
                    assert self.content[slot] == (fetch.lease, block)

    @invariant()
    def who_waits_waits_for_someone_who_moves(self) -> None:
        """Checks that whoever waits waits for a thread, or for a destination under a stall clock."""
        if not self.slots.num_waiting or self.slots.next_in_line() is not None:
            return
        assert not self.slots.num_free
        kept = [staged for of_lease in self.slots._staged.values() for staged in of_lease]
        stalls = [one.ticket.ended is None and one.ticket.lease.stall.since_s is not None for one in kept]
        assert any(stalls) or any(one.writing for one in kept)

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.everyone_is_served()
        for lease in self.table:
            self.table.abort(lease.lease_id, self.clock.now())
        for fetch in self.all:
            self.written(fetch)
        self.slots.check()
        assert self.slots.num_free == self.slots.num_slots
        assert self.slots.num_waiting == 0

    def everyone_is_served(self) -> None:
        """Asserts that, if destinations copy, every open fetch of a sealed lease gets all of it, a block at a time."""
        for lease in self.table:
            self.seal(lease)
        open_ones = [fetch for fetch in self.all if fetch.ticket.ended is None]
        for _ in range(10 * sum(fetch.lease.num_blocks for fetch in open_ones) + 10):
            for fetch in self.all:
                self.written(fetch)
                if fetch.ticket.ended is None:
                    self.serve(fetch, most=1)
                    self.copy(fetch, count=9, acknowledges=True)
            self.slots.check()
        assert not [fetch for fetch in open_ones if fetch.ticket.ended is None]


SlotMachine.TestCase.settings = settings(max_examples=num_examples(400), stateful_step_count=60)
TestSlots = SlotMachine.TestCase
