"""Tests what is kept of a lease that has ended: an answer, for a while. Not the leg, the prompt or the session behind
it.

Counted in objects and bytes with the garbage collector off, so that nothing depends on when it runs.
"""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
import weakref
from collections.abc import Iterator

import pytest

from services.core.clock import MonotonicClock
from services.core.errors import LeaseInvalid
from services.kv.lease import FetchEnd, Lease
from services.kv.lease_table import LeaseTable
from services.kvtransfer.board import LeaseBoard
from tests.support.patience import HANG_S

NUM_LEASES = 300
NUM_PROMPT_TOKENS = 2048
MOST_BYTES_PER_TOMBSTONE = 600


class Leg:
    """Stands for a prefill leg: it has its prompt, and the lease refers to it."""

    def __init__(self, number: int) -> None:
        self.prompt = [number * 1000 + token for token in range(NUM_PROMPT_TOKENS)]


class Party:
    def __init__(self, remember_s: float = 60.0, **bounds: int) -> None:
        self.clock = MonotonicClock()
        self.table = LeaseTable(16, on_end=lambda lease: None, remember_s=remember_s, **bounds)
        self.board = LeaseBoard(self.table, self.clock)
        self.legs: list[weakref.ref[Leg]] = []

    def run(self, number: int, *, finished: bool = False) -> bytes:
        """Runs a lease from its opening to its release."""
        lease_id, now = number.to_bytes(16, "big"), self.clock.now()
        leg = Leg(number)
        self.legs.append(weakref.ref(leg))
        blocks = range(NUM_PROMPT_TOKENS // 16)
        self.table.open(lease_id, owner=0, block_ids=blocks, num_tokens=NUM_PROMPT_TOKENS, now=now, listener=leg)
        if not finished:
            self.table.open_fetch(lease_id, number, 0, now)
        self.table.seal(lease_id, f"token {number}", now, finished=finished)
        if not finished:
            assert self.table.release(lease_id, number, now).valid
        return lease_id

    @property
    def num_legs_alive(self) -> int:
        return sum(leg() is not None for leg in self.legs)


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("finished", [False, True])
async def test_an_ended_lease_keeps_an_answer_and_not_its_leg(finished: bool) -> None:
    party = Party()
    party.run(0, finished=finished)
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(1, 1 + NUM_LEASES):
        party.run(number, finished=finished)
        party.legs.clear()
    retained = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert retained / NUM_LEASES < MOST_BYTES_PER_TOMBSTONE
    party.run(NUM_LEASES + 1, finished=finished)
    assert party.num_legs_alive == 0
    party.board.close()


async def test_the_answers_stay_the_same() -> None:
    party = Party()
    released, ended = party.run(1), party.run(2, finished=True)
    now = party.clock.now()
    assert party.table.release(released, 1, now).valid, "the same leg gets the same answer"
    answer = party.table.release(released, 2, now)
    assert (answer.valid, answer.reason) == (False, "the lease is released")
    with pytest.raises(LeaseInvalid, match="the lease is released"):
        party.table.open_fetch(released, 3, 0, now)
    ticket = party.table.open_fetch(ended, 7, 0, now)
    assert ticket.ended is FetchEnd.FINISHED
    assert (ticket.lease.first_token, ticket.lease.num_tokens) == ("token 2", NUM_PROMPT_TOKENS)
    party.board.close()


async def test_what_is_remembered_is_bounded_in_number() -> None:
    party = Party(most_remembered=10)
    ids = [party.run(number) for number in range(25)]
    now = party.clock.now()
    assert party.table.num_remembered == 10
    assert [party.table.release(lease_id, number, now).valid for number, lease_id in enumerate(ids)] == [
        number >= 15 for number in range(25)
    ]
    party.board.close()


async def test_an_idle_worker_forgets_by_itself() -> None:
    """Nothing is opened, released or asked any more."""
    party = Party(remember_s=0.05)
    for number in range(3):
        party.run(number)
    async with asyncio.timeout(HANG_S):
        while party.table.num_remembered:  # noqa: ASYNC110  (a timer of the board's; there is no event to wait for)
            await asyncio.sleep(0.005)
    # And again, after its timer had nothing left to do.
    party.run(3)
    async with asyncio.timeout(HANG_S):
        while party.table.num_remembered:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    party.board.close()


async def test_a_closed_board_forgets_nothing_more() -> None:
    party = Party(remember_s=0.01)
    party.run(1)
    party.board.close()
    lease: Lease | None = party.table.get(bytes(16))
    assert lease is None
    assert party.board._timer is None
    assert party.board._forgetting is None
