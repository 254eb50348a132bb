"""Tests the lease table under random interleavings of prefill, router, destinations and time."""

from __future__ import annotations

from collections import Counter

import hypothesis.strategies as st
from hypothesis import given, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, rule

from services.core.clock import ManualClock
from services.core.errors import LeaseInvalid, LeaseNotSealed
from services.kv.lease import FetchEnd, FetchTicket, Lease, LeaseState
from services.kv.lease_table import LeaseTable
from tests.support.examples import num_examples

BLOCK_SIZE, TTL_S, STALL_S, REMEMBER_S = 4, 10.0, 5.0, 60.0
OWNERS = st.sampled_from(["first", "second"])
LEGS = st.integers(1, 6)


class LeaseMachine(RuleBasedStateMachine):
    leases = Bundle("leases")
    tickets = Bundle("tickets")

    @initialize()
    def begin(self) -> None:
        self.clock = ManualClock()
        self.all: list[Lease] = []
        self.all_tickets: list[FetchTicket] = []
        self.num_ended: Counter[Lease] = Counter()
        self.valid_legs: dict[Lease, set[int]] = {}
        self.highest_leg: Counter[Lease] = Counter()
        self.fenced: set[Lease] = set()
        """Whose highest leg is refused too."""
        self.table = LeaseTable(BLOCK_SIZE, on_end=self.on_end, ttl_s=TTL_S, stall_s=STALL_S, remember_s=REMEMBER_S)

    def on_end(self, lease: Lease) -> None:
        assert not lease.live
        assert self.table.get(lease.lease_id) is None
        self.num_ended[lease] += 1

    @rule(target=leases, owner=OWNERS, num_tokens=st.integers(1, 20))
    def open(self, owner: str, num_tokens: int) -> Lease:
        block_ids = range(-(-num_tokens // BLOCK_SIZE))
        lease_id = len(self.all).to_bytes(16, "big")
        lease = self.table.open(lease_id, owner=owner, block_ids=block_ids, num_tokens=num_tokens, now=self.clock.now())
        self.all.append(lease)
        return lease

    @rule(lease=leases, share=st.floats(0, 1))
    def publish(self, lease: Lease, share: float) -> None:
        if lease.state is LeaseState.SEALED:
            return
        before = lease.num_published
        done = self.table.publish(lease.lease_id, int(lease.num_tokens * share), self.clock.now())
        assert done == (lease.state is LeaseState.OPEN)
        assert lease.num_published >= before
        assert lease.num_published <= lease.num_tokens // BLOCK_SIZE or not done

    @rule(lease=leases, finished=st.integers(0, 4).map(lambda draw: draw == 0))
    def seal(self, lease: Lease, finished: bool) -> None:
        if lease.state is LeaseState.SEALED:
            return
        was_open = lease.state is LeaseState.OPEN
        assert self.table.seal(lease.lease_id, "token", self.clock.now(), finished=finished) == was_open

    @rule(lease=leases)
    def abort(self, lease: Lease) -> None:
        was_live = lease.live
        assert self.table.abort(lease.lease_id, self.clock.now()) == was_live

    @rule(owner=OWNERS, picks=st.lists(leases, max_size=3))
    def heartbeat(self, owner: str, picks: list[Lease]) -> None:
        self.table.hold(owner, [lease.lease_id for lease in picks], self.clock.now())
        for lease in self.table.owned_by(owner):
            assert lease.held == (lease in picks)

    @rule(owner=OWNERS, sure=st.integers(0, 9))
    def lose_session(self, owner: str, sure: int) -> None:
        if sure == 0:
            for lease in self.table.owned_by(owner):
                self.table.abort(lease.lease_id, self.clock.now())
            assert not self.table.owned_by(owner)

    @rule(target=tickets, lease=leases, leg=LEGS, share=st.floats(0, 1))
    def open_fetch(self, lease: Lease, leg: int, share: float) -> object:
        live = lease.live
        try:
            ticket = self.table.open_fetch(lease.lease_id, leg, int(lease.num_blocks * share), self.clock.now())
        except LeaseInvalid:
            # Of a lease that ended long ago nothing is remembered, not even that token 0 ended it.
            assert not live or leg < lease.leg or (leg == lease.leg and (lease.stalled or lease in self.fenced))
            return multiple()
        if lease.finished:  # there is nothing but token 0 to fetch, for anyone who asks
            assert not live
            assert ticket.ended is FetchEnd.FINISHED
            return multiple()
        assert live
        assert leg >= self.highest_leg[lease]
        if leg > self.highest_leg[lease]:
            self.fenced.discard(lease)
        assert lease not in self.fenced
        self.highest_leg[lease] = leg
        self.all_tickets.append(ticket)
        return ticket

    @rule(ticket=tickets, by=st.integers(0, 3))
    def announce(self, ticket: FetchTicket, by: int) -> None:
        announced = min(ticket.announced + by, ticket.lease.num_published)
        if announced >= ticket.announced:  # it may have begun beyond what is published
            self.table.announce(ticket, announced, self.clock.now())

    @rule(ticket=tickets, by=st.integers(0, 3))
    def ack(self, ticket: FetchTicket, by: int) -> None:
        self.table.ack(ticket, min(ticket.copied + by, ticket.announced), self.clock.now())

    @rule(lease=leases)
    def fence(self, lease: Lease) -> None:
        if lease.leg:  # a leg has fetched
            self.table.fence(lease, self.clock.now())
            self.fenced.add(lease)

    @rule(ticket=tickets)
    def close_fetch(self, ticket: FetchTicket) -> None:
        current = ticket.lease.fetch
        self.table.close_fetch(ticket, self.clock.now())
        assert ticket.lease.fetch is (None if current is ticket else current)

    @rule(lease=leases, leg=LEGS)
    def release(self, lease: Lease, leg: int) -> None:
        state, answered = lease.state, self.valid_legs.get(lease, set())
        try:
            answer = self.table.release(lease.lease_id, leg, self.clock.now())
        except LeaseNotSealed:
            assert state is LeaseState.OPEN
            return
        if answer.valid:
            lowest = self.highest_leg[lease] + (lease in self.fenced)
            assert (state is LeaseState.SEALED and leg >= lowest) or leg in answered
            self.valid_legs.setdefault(lease, set()).add(leg)
        else:
            assert (
                state not in (LeaseState.OPEN, LeaseState.SEALED)
                or leg < self.highest_leg[lease]
                or (leg == self.highest_leg[lease] and lease in self.fenced)
            )
        assert len(self.valid_legs.get(lease, ())) <= 1

    @rule(lease=leases, leg=LEGS)
    def adopt(self, lease: Lease, leg: int) -> None:
        state = lease.state
        try:
            self.table.adopt(lease.lease_id, leg, self.clock.now())
        except (LeaseInvalid, LeaseNotSealed):
            return
        assert state is LeaseState.SEALED
        assert lease not in self.valid_legs

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.9, 5.0, 10.0, 70.0]))
    def wait(self, seconds: float) -> None:
        now = self.clock.advance(seconds)
        self.table.expire(now)
        deadline_s = self.table.next_deadline()
        assert deadline_s is None or deadline_s > now

    @invariant()
    def ended_exactly_once(self) -> None:
        assert all(self.num_ended[lease] == (not lease.live) for lease in self.all)
        assert set(self.table) == {lease for lease in self.all if lease.live}

    @invariant()
    def at_most_one_fetch(self) -> None:
        for ticket in self.all_tickets:
            assert (ticket.ended is None) == (ticket.lease.fetch is ticket)
            assert ticket.ended is not None or (ticket.lease.live and ticket.leg == ticket.lease.leg)
            newest = ticket.leg == self.highest_leg[ticket.lease] and ticket.lease not in self.fenced
            assert ticket.releasable == (ticket.lease.live and newest)

    @invariant()
    def clocks_measure_no_queue(self) -> None:
        for lease in self.all:
            waiting = lease.state is LeaseState.SEALED and lease.fetch is None and not lease.held
            assert (lease.ttl.since_s is not None) == waiting
            uncopied = lease.fetch is not None and lease.fetch.copied < lease.fetch.announced
            assert (lease.stall.since_s is not None) == uncopied

    def teardown(self) -> None:
        """Asserts that when the routers hold nothing and nobody moves, every sealed lease is over within stall and time
        to live (if the sources announce what they have)."""
        if not hasattr(self, "table"):
            return
        for owner in ("first", "second"):
            self.table.hold(owner, [], self.clock.now())
        for ticket in self.all_tickets:
            self.announce(ticket, ticket.lease.num_blocks)
        self.wait(STALL_S)
        self.wait(TTL_S)
        assert all(lease.state is LeaseState.OPEN for lease in self.table)
        for lease in self.table:
            self.table.abort(lease.lease_id, self.clock.now())
        assert len(self.table) == self.table.num_fetches == 0
        assert self.table.next_deadline() is None
        self.ended_exactly_once()


LeaseMachine.TestCase.settings = settings(max_examples=num_examples(120), stateful_step_count=40)
TestLeases = LeaseMachine.TestCase


@settings(max_examples=num_examples(200))
@given(st.lists(st.tuples(st.sampled_from(["open", "ack", "close"]), st.floats(0, 4)), max_size=120))
def test_one_leg_cannot_keep_a_sealed_lease_for_ever(steps: list[tuple[str, float]]) -> None:
    """A leg has the time to live once, and the stall clock once for each block: no more is given to it."""
    now, num_blocks = 0.0, 3
    table = LeaseTable(BLOCK_SIZE, on_end=lambda _: None, ttl_s=TTL_S, stall_s=STALL_S)
    lease = table.open(b"x" * 16, owner=0, block_ids=range(num_blocks), num_tokens=BLOCK_SIZE * num_blocks, now=now)
    table.seal(lease.lease_id, "token", now)
    for act, seconds in steps:
        now += seconds
        table.expire(now)
        if not lease.live:
            break
        if act == "open" and not lease.stalled:
            table.announce(table.open_fetch(lease.lease_id, 1, 0, now), num_blocks, now)
        elif act == "ack" and lease.fetch is not None:
            table.ack(lease.fetch, lease.fetch.copied + 1, now)
        elif act == "close" and lease.fetch is not None:
            table.close_fetch(lease.fetch, now)
    most_s = 2 * TTL_S + STALL_S * (num_blocks + 1)  # the first fetch of a leg winds its time to live up again
    assert now <= most_s + 4 or not lease.live
