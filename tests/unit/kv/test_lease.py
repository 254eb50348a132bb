"""Tests the lease table: which request a lease allows, fencing, clocks, remembered answers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from services.core.errors import InvalidRequest, LeaseInvalid, LeaseNotSealed, ProtocolViolation
from services.kv.lease import FetchEnd, Lease, LeaseState
from services.kv.lease_table import LeaseTable, ReleaseAnswer

BLOCK_SIZE = 16
TTL_S, STALL_S, REMEMBER_S = 10.0, 5.0, 60.0
LEASE = b"lease-0123456789"
TOKEN = object()


class Source:
    """Keeps a table with one lease of 3 blocks (40 tokens), and what became of it."""

    def __init__(self) -> None:
        self.ended: list[Lease] = []
        self.table = LeaseTable(
            BLOCK_SIZE, on_end=self.ended.append, ttl_s=TTL_S, stall_s=STALL_S, remember_s=REMEMBER_S
        )
        self.lease = self.open(LEASE)

    def open(self, lease_id: bytes, owner: str = "session") -> Lease:
        return self.table.open(lease_id, owner=owner, block_ids=(7, 8, 9), num_tokens=40, now=0.0)

    def seal(self, now: float = 0.0, **options: bool) -> None:
        assert self.table.seal(LEASE, TOKEN, now, **options)

    def assert_over(self, state: LeaseState) -> None:
        assert self.lease.state is state
        assert self.ended == [self.lease]
        assert self.lease.fetch is None
        assert len(self.table) == self.table.num_fetches == 0
        assert self.table.next_deadline() is None


@pytest.fixture
def source() -> Source:
    return Source()


@pytest.mark.parametrize("leg_of", [lambda turn: 1, lambda turn: turn + 1], ids=["slowly", "again and again"])
def test_a_lease_that_may_last_so_long_is_over_then_whatever_its_fetches_do(
    source: Source, leg_of: Callable[[int], int]
) -> None:
    blocks, most_s = tuple(range(16)), 30.0
    lease = source.table.open(b"lent", owner=None, block_ids=blocks, num_tokens=256, now=0.0, most_s=most_s)
    source.table.seal(b"lent", None, 0.0)
    ticket, now = source.table.open_fetch(b"lent", 1, 0, 0.0), 0.0
    for turn in range(100):
        if leg_of(turn) > ticket.leg:
            ticket = source.table.open_fetch(b"lent", leg_of(turn), 0, now)
        source.table.announce(ticket, lease.num_blocks, now)
        source.table.ack(ticket, min(turn, lease.num_blocks - 1), now)
        deadline_s = source.table.next_deadline()
        assert deadline_s is not None
        if deadline_s == most_s:
            break
        source.table.expire(now := deadline_s - 0.1)
        assert lease.fetch is ticket, "it does as it should"
    assert source.table.expire(most_s) == [lease]
    assert ticket.ended is FetchEnd.EXPIRED
    assert source.ended == [lease]


@pytest.mark.parametrize(("num_computed", "published"), [(0, 0), (15, 0), (16, 1), (39, 2), (40, 2)])
def test_only_full_blocks_are_published_before_the_seal(source: Source, num_computed: int, published: int) -> None:
    source.table.publish(LEASE, num_computed, 0.0)
    assert source.lease.num_published == published
    source.seal()
    assert source.lease.num_published == 3


def test_release_is_valid_once_and_again_for_the_same_leg(source: Source) -> None:
    source.seal()
    assert source.table.release(LEASE, 5, 1.0) == ReleaseAnswer(True)
    source.assert_over(LeaseState.RELEASED)
    assert source.table.release(LEASE, 5, 2.0) == ReleaseAnswer(True)
    assert source.table.release(LEASE, 6, 2.0) == ReleaseAnswer(False, "the lease is released")
    assert source.table.release(LEASE, 4, 2.0) == ReleaseAnswer(False, "the lease is released")
    assert source.table.release(LEASE, 5, 1.0 + REMEMBER_S - 0.1).valid
    assert source.table.release(LEASE, 5, 1.0 + REMEMBER_S) == ReleaseAnswer(False, "the lease is unknown here")
    assert source.ended == [source.lease]


def test_release_of_an_open_lease_is_a_precondition(source: Source) -> None:
    with pytest.raises(LeaseNotSealed):
        source.table.release(LEASE, 1, 0.0)
    assert source.lease.state is LeaseState.OPEN


@pytest.mark.parametrize("end", ["abort", "expire", "finish"])
def test_release_after_the_end_is_invalid_and_says_why(source: Source, end: str) -> None:
    if end == "abort":
        source.table.abort(LEASE, 1.0)
    elif end == "expire":
        source.seal()
        assert source.table.expire(TTL_S) == [source.lease]
    else:
        source.seal(finished=True)
    answer = source.table.release(LEASE, 1, TTL_S)
    assert not answer.valid
    assert answer.reason == f"the lease is {source.lease.state.value}"
    assert source.ended == [source.lease]


def test_unknown_leases_are_invalid(source: Source) -> None:
    unknown = b"x" * 16
    assert source.table.release(unknown, 1, 0.0) == ReleaseAnswer(False, "the lease is unknown here")
    with pytest.raises(LeaseInvalid, match="unknown"):
        source.table.open_fetch(unknown, 1, 0, 0.0)
    assert not source.table.publish(unknown, 16, 0.0)
    assert not source.table.seal(unknown, TOKEN, 0.0)
    assert not source.table.abort(unknown, 0.0)


def test_what_the_last_step_reports_of_an_aborted_lease_means_nothing(source: Source) -> None:
    assert source.table.abort(LEASE, 0.0)
    assert not source.table.publish(LEASE, 40, 1.0)
    assert not source.table.seal(LEASE, TOKEN, 1.0)
    assert not source.table.abort(LEASE, 1.0)
    source.assert_over(LeaseState.ABORTED)


def test_a_higher_leg_ends_the_older_fetch_and_the_older_leg_is_refused(source: Source) -> None:
    older = source.table.open_fetch(LEASE, 3, 0, 0.0)
    newer = source.table.open_fetch(LEASE, 4, 0, 1.0)
    assert older.ended is FetchEnd.FENCED
    assert newer.ended is None
    with pytest.raises(LeaseInvalid, match="given up"):
        source.table.open_fetch(LEASE, 3, 0, 2.0)
    assert newer.ended is None
    source.seal()
    assert not source.table.release(LEASE, 3, 2.0).valid
    assert source.lease.state is LeaseState.SEALED
    assert source.table.release(LEASE, 4, 2.0).valid
    assert newer.ended is FetchEnd.RELEASED


def test_the_same_leg_replaces_its_own_fetch(source: Source) -> None:
    first = source.table.open_fetch(LEASE, 3, 0, 0.0)
    second = source.table.open_fetch(LEASE, 3, 1, 1.0)
    assert first.ended is FetchEnd.REPLACED
    assert source.lease.fetch is second
    source.table.close_fetch(first, 2.0)  # its stream notices late
    assert source.lease.fetch is second


def test_a_higher_leg_may_release_without_a_fetch_and_ends_one(source: Source) -> None:
    ticket = source.table.open_fetch(LEASE, 3, 0, 0.0)
    source.seal()
    assert source.table.release(LEASE, 9, 0.0).valid
    assert ticket.ended is FetchEnd.FENCED


@pytest.mark.parametrize("first_block", [-1, 4])
def test_a_first_block_outside_the_lease_is_refused_and_fences_nobody(source: Source, first_block: int) -> None:
    ticket = source.table.open_fetch(LEASE, 3, 0, 0.0)
    with pytest.raises(InvalidRequest, match=r"open\.first_block"):
        source.table.open_fetch(LEASE, 4, first_block, 0.0)
    assert ticket.ended is None


def test_acknowledgements_go_forward_and_not_beyond_what_is_announced(source: Source) -> None:
    ticket = source.table.open_fetch(LEASE, 1, 1, 0.0)
    source.seal()
    source.table.announce(ticket, 2, 0.0)
    for wrong in (0, 3):
        with pytest.raises(ProtocolViolation):
            source.table.ack(ticket, wrong, 0.0)
    source.table.ack(ticket, 2, 0.0)
    source.table.ack(ticket, 2, 0.0)
    source.table.abort(LEASE, 0.0)
    source.table.ack(ticket, 0, 0.0)  # late: means nothing
    source.table.announce(ticket, 3, 0.0)
    assert ticket.announced == 2


@pytest.mark.parametrize("upto", [0, 3])
def test_only_what_is_published_is_announced_and_in_order(source: Source, upto: int) -> None:
    ticket = source.table.open_fetch(LEASE, 1, 1, 0.0)
    source.table.publish(LEASE, 32, 0.0)
    with pytest.raises(AssertionError):
        source.table.announce(ticket, upto, 0.0)


def test_a_leg_that_is_fenced_may_neither_fetch_nor_release_and_the_next_may(source: Source) -> None:
    source.seal()
    ticket = source.table.open_fetch(LEASE, 3, 0, 0.0)
    assert ticket.releasable
    source.table.fence(source.lease, 1.0)
    assert ticket.ended is FetchEnd.FENCED
    assert not ticket.releasable
    with pytest.raises(LeaseInvalid, match="given up"):
        source.table.open_fetch(LEASE, 3, 0, 2.0)
    with pytest.raises(LeaseInvalid, match="given up"):
        source.table.adopt(LEASE, 3, 2.0)
    assert not source.table.release(LEASE, 3, 2.0).valid
    assert source.table.next_deadline() == 1.0 + TTL_S
    newer = source.table.open_fetch(LEASE, 4, 0, 3.0)
    assert newer.releasable
    assert source.table.release(LEASE, 4, 3.0).valid
    assert not newer.releasable
    source.table.fence(source.lease, 4.0)
    source.assert_over(LeaseState.RELEASED)


@pytest.mark.parametrize("sealed_first", [True, False])
@pytest.mark.parametrize("first_block", [0, 3])
def test_a_fetch_is_complete_when_sealed_and_copied(source: Source, sealed_first: bool, first_block: int) -> None:
    """The time to live runs from then on: the Release must come."""
    ticket = source.table.open_fetch(LEASE, 1, first_block, 0.0)
    source.table.publish(LEASE, 40, 0.0)
    if sealed_first:
        source.seal(1.0)
    if first_block == 0:
        source.table.announce(ticket, 2, 1.0)
        source.table.ack(ticket, 2, 1.0)
    if not sealed_first:
        source.seal(1.0)
    if first_block == 0:
        assert ticket.ended is None
        source.table.announce(ticket, 3, 2.0)
        source.table.ack(ticket, 3, 2.0)
    assert ticket.ended is FetchEnd.COMPLETE
    assert source.lease.ttl.since_s == (2.0 if first_block == 0 else 1.0)
    assert source.table.release(LEASE, 1, 3.0).valid


def test_a_finished_lease_ends_at_the_seal_and_its_fetch_hears_of_it(source: Source) -> None:
    ticket = source.table.open_fetch(LEASE, 1, 0, 0.0)
    source.seal(1.0, finished=True)
    assert ticket.ended is FetchEnd.FINISHED
    assert not ticket.ended.broken
    assert source.lease.first_token is TOKEN
    source.assert_over(LeaseState.RELEASED)


def test_a_fetch_that_comes_after_token_0_ended_the_sequence_gets_that_token(source: Source) -> None:
    source.seal(1.0, finished=True)
    ticket = source.table.open_fetch(LEASE, 2, 0, 2.0)
    assert ticket.ended is FetchEnd.FINISHED
    assert ticket.lease.first_token is TOKEN
    source.assert_over(LeaseState.RELEASED)
    assert not source.table.release(LEASE, 2, 2.0).valid


def test_adoption_ends_the_lease_without_dropping_its_references(source: Source) -> None:
    with pytest.raises(LeaseNotSealed):
        source.table.adopt(LEASE, 2, 0.0)
    ticket = source.table.open_fetch(LEASE, 2, 0, 0.0)
    source.seal()
    with pytest.raises(LeaseInvalid):
        source.table.adopt(LEASE, 1, 0.0)
    assert source.table.adopt(LEASE, 3, 0.0) is source.lease
    assert source.lease.adopted
    assert ticket.ended is FetchEnd.FENCED
    source.assert_over(LeaseState.RELEASED)
    assert not source.table.release(LEASE, 3, 0.0).valid
    with pytest.raises(LeaseInvalid, match="released"):
        source.table.adopt(LEASE, 4, 0.0)


class TestTimeToLive:
    def test_does_not_run_while_the_prompt_is_computed(self, source: Source) -> None:
        assert source.table.next_deadline() is None
        assert source.table.expire(1e6) == []

    def test_runs_from_the_seal(self, source: Source) -> None:
        source.seal(3.0)
        assert source.table.next_deadline() == 3.0 + TTL_S
        assert source.table.expire(3.0 + TTL_S - 0.1) == []
        assert source.table.expire(3.0 + TTL_S) == [source.lease]
        source.assert_over(LeaseState.EXPIRED)

    def test_does_not_run_under_a_fetch_and_goes_on_after_it(self, source: Source) -> None:
        source.seal(0.0)
        ticket = source.table.open_fetch(LEASE, 1, 0, 4.0)
        source.table.announce(ticket, 3, 4.0)
        source.table.ack(ticket, 2, 5.0)
        source.table.close_fetch(ticket, 6.0)
        assert source.table.next_deadline() == 6.0 + TTL_S  # a new leg: the four seconds before it do not count
        again = source.table.open_fetch(LEASE, 1, 0, 8.0)
        source.table.close_fetch(again, 9.0)
        assert source.table.next_deadline() == 9.0 + TTL_S - 2.0  # the same leg does not buy time

    def test_does_not_run_while_held(self, source: Source) -> None:
        source.table.hold("session", [LEASE, b"unknown"], 0.0)
        source.seal(1.0)
        assert source.table.next_deadline() is None
        source.table.hold("session", [LEASE], 500.0)
        source.table.hold("session", [], 1000.0)
        assert source.table.next_deadline() == 1000.0 + TTL_S

    def test_one_sessions_heartbeat_says_nothing_of_anothers_leases(self, source: Source) -> None:
        source.seal()
        source.table.hold("session", [LEASE], 0.0)
        source.table.hold("other", [], 1.0)
        assert source.lease.held
        source.table.hold("other", [LEASE], 1.0)
        source.table.hold("session", [], 2.0)
        assert not source.lease.held


class TestStallClock:
    def test_runs_only_while_an_announced_block_is_uncopied(self, source: Source) -> None:
        ticket = source.table.open_fetch(LEASE, 1, 0, 0.0)
        assert source.table.next_deadline() is None
        source.table.publish(LEASE, 16, 50.0)
        assert source.table.next_deadline() is None  # it waits at the source
        source.table.announce(ticket, 1, 100.0)
        assert source.table.next_deadline() == 100.0 + STALL_S
        source.table.ack(ticket, 1, 104.0)
        assert source.table.next_deadline() is None
        assert source.table.expire(1000.0) == []
        source.table.publish(LEASE, 40, 1500.0)
        source.table.announce(ticket, 2, 2000.0)
        assert source.table.next_deadline() == 2000.0 + STALL_S

    def test_progress_resets_it(self, source: Source) -> None:
        ticket = source.table.open_fetch(LEASE, 1, 0, 0.0)
        source.seal(0.0)
        source.table.announce(ticket, 3, 0.0)
        source.table.ack(ticket, 1, 4.0)
        assert source.table.next_deadline() == 4.0 + STALL_S

    def test_ends_the_fetch_and_its_leg_but_not_the_lease(self, source: Source) -> None:
        ticket = source.table.open_fetch(LEASE, 1, 0, 0.0)
        source.seal(0.0)
        source.table.announce(ticket, 3, 0.0)
        assert source.table.expire(STALL_S) == []
        assert ticket.ended is FetchEnd.STALLED
        with pytest.raises(LeaseInvalid):
            source.table.open_fetch(LEASE, 1, 0, STALL_S)
        assert source.table.next_deadline() == STALL_S + TTL_S
        source.table.open_fetch(LEASE, 2, 0, STALL_S)
        assert not source.table.release(LEASE, 1, STALL_S).valid
        assert source.table.release(LEASE, 2, STALL_S).valid

    def test_what_is_being_sent_has_not_stalled(self, source: Source) -> None:
        """The connection has a bound of its own. Afterwards the acknowledgement has its time."""
        ticket = source.table.open_fetch(LEASE, 1, 0, 0.0)
        source.seal(0.0)
        source.table.announce(ticket, 3, 0.0)
        ticket.sending.add("a connection")
        source.table.expire(STALL_S)
        assert ticket.ended is None
        assert source.table.next_deadline() == 2 * STALL_S
        ticket.sending.clear()
        source.table.expire(2 * STALL_S)
        assert ticket.ended is FetchEnd.STALLED

    def test_a_leg_that_stalled_may_release_what_it_has_after_all(self, source: Source) -> None:
        ticket = source.table.open_fetch(LEASE, 1, 0, 0.0)
        source.seal(0.0)
        source.table.announce(ticket, 3, 0.0)
        source.table.expire(STALL_S)
        assert ticket.releasable
        assert source.table.release(LEASE, 1, STALL_S + 1).valid

    def test_the_same_leg_fetching_again_does_not_reset_it(self, source: Source) -> None:
        source.seal(0.0)
        for opened in range(4):
            ticket = source.table.open_fetch(LEASE, 1, 0, float(opened))
            source.table.announce(ticket, 3, float(opened))
        assert source.table.next_deadline() == STALL_S

    def test_nor_does_a_block_that_the_leg_had_before(self, source: Source) -> None:
        source.seal(0.0)
        for opened in range(3):
            ticket = source.table.open_fetch(LEASE, 1, 0, float(opened))
            source.table.announce(ticket, 3, float(opened))
            source.table.ack(ticket, 1, opened + 0.5)
        assert source.table.next_deadline() == 0.5 + STALL_S


def test_blocks_must_match_tokens(source: Source) -> None:
    with pytest.raises(AssertionError):
        source.table.open(b"q" * 16, owner=0, block_ids=(1, 2), num_tokens=33, now=0.0)
