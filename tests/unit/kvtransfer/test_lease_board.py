"""Tests the board's timer: leases end in time though nothing else happens."""

from __future__ import annotations

import asyncio

import pytest

from services.core.clock import MonotonicClock
from services.kv.lease import FetchEnd, Lease, LeaseState
from services.kv.lease_table import LeaseTable
from services.kvtransfer.board import LeaseBoard
from tests.support.patience import HANG_S

LEASE = b"x" * 16


class Party:
    def __init__(self, *, ttl_s: float = 0.02, stall_s: float = 0.02) -> None:
        self.clock = MonotonicClock()
        self.ended: asyncio.Queue[Lease] = asyncio.Queue()
        self.table = LeaseTable(16, on_end=self.ended.put_nowait, ttl_s=ttl_s, stall_s=stall_s)
        self.board = LeaseBoard(self.table, self.clock)

    def open(self, lease_id: bytes = LEASE) -> Lease:
        return self.table.open(lease_id, owner=0, block_ids=(1, 2), num_tokens=32, now=self.clock.now())

    async def next_end(self) -> Lease:
        async with asyncio.timeout(HANG_S):
            return await self.ended.get()


async def test_a_sealed_lease_expires_with_nobody_asking() -> None:
    party = Party()
    lease = party.open()
    party.table.seal(LEASE, "token", party.clock.now())
    assert await party.next_end() is lease
    assert lease.state is LeaseState.EXPIRED
    assert lease.entered_s[LeaseState.EXPIRED] - lease.entered_s[LeaseState.SEALED] >= 0.02


async def test_a_stalled_fetch_ends_and_then_its_lease() -> None:
    party = Party()
    lease = party.open()
    ticket = party.table.open_fetch(LEASE, 1, 0, party.clock.now())
    with party.board.follow(ticket) as changed:
        party.table.seal(LEASE, "token", party.clock.now())
        party.table.announce(ticket, 2, party.clock.now())
        changed.clear()
        async with asyncio.timeout(HANG_S):
            await changed.wait()
        assert ticket.ended is FetchEnd.STALLED
    assert await party.next_end() is lease


async def test_a_deadline_that_moved_back_or_went_is_kept() -> None:
    """The timer set for it fires, ends nothing early, and goes on to the next."""
    party = Party(ttl_s=0.05)
    held, other = party.open(), party.open(b"y" * 16)
    party.table.seal(held.lease_id, "token", party.clock.now())
    party.table.seal(other.lease_id, "token", party.clock.now())
    party.table.hold(0, [held.lease_id], party.clock.now())
    assert await party.next_end() is other
    assert held.live
    party.table.hold(0, [], party.clock.now())
    assert await party.next_end() is held


@pytest.mark.parametrize("closed", [True, False])
async def test_an_idle_or_closed_board_has_no_timer(closed: bool) -> None:
    party = Party(ttl_s=100.0)
    party.open()
    party.table.seal(LEASE, "token", party.clock.now())
    if closed:
        party.board.close()
    party.table.abort(LEASE, party.clock.now())
    if not closed:
        party.board.tick()
    assert party.board._timer is None
    assert party.board.num_followers == 0


async def test_the_later_of_two_deadlines_is_not_forgotten() -> None:
    party = Party()
    first, second = party.open(), party.open(b"y" * 16)
    now = party.clock.now()
    party.table.seal(first.lease_id, "token", now)
    party.table.seal(second.lease_id, "token", now + 0.05)
    assert await party.next_end() is first
    assert await party.next_end() is second
