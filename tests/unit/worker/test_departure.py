"""Tests how a worker leaves: when nothing is left, or when the time is up."""

from __future__ import annotations

import asyncio

import pytest

from services.worker.host import Departure
from tests.support.patience import HANG_S


async def test_it_waits_until_it_is_asked_and_until_the_last_leg_is_over() -> None:
    departure, legs = Departure(), [1, 2]
    gone = asyncio.create_task(departure.complete(lambda: len(legs)))
    departure.leg_over()
    await asyncio.sleep(0)
    assert not departure.asked
    assert not gone.done()
    departure.ask(HANG_S)
    for _ in range(2):
        await asyncio.sleep(0)
        assert not gone.done()
        legs.pop()
        departure.leg_over()
    assert await asyncio.wait_for(gone, HANG_S) == 0


@pytest.mark.parametrize("within_s", [0.0, -5.0, 0.01])
async def test_what_is_left_when_the_time_is_up_is_given_up(within_s: float) -> None:
    departure = Departure()
    departure.ask(within_s)
    assert await asyncio.wait_for(departure.complete(lambda: 3), HANG_S) == 3


async def test_the_shortest_time_counts_however_late_it_is_said() -> None:
    departure = Departure()
    departure.ask(1e300)
    gone = asyncio.create_task(departure.complete(lambda: 1))
    await asyncio.sleep(0)
    departure.ask(0.0)
    departure.ask(1e6)
    assert await asyncio.wait_for(gone, HANG_S) == 1
