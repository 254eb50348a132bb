"""Tests time that stands still while the process was stopped, and what is judged by it."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.awake import GAP_S, AwakeTime
from services.core.clock import AwakeClock, ManualClock, MonotonicClock, timeout_after
from services.rpc.silence import PeerWatch


def test_it_runs_as_any_clock_while_it_is_read() -> None:
    time = AwakeTime()
    first = time.at(100.0)
    assert [time.at(100.0 + tenths / 10) - first for tenths in range(50)] == pytest.approx([t / 10 for t in range(50)])


def test_a_stop_counts_as_a_gap_however_long_it_was() -> None:
    time = AwakeTime()
    time.at(100.0)
    before = time.at(100.1)
    assert time.at(7300.1) - before == pytest.approx(GAP_S)
    assert time.at(7300.2) - before == pytest.approx(GAP_S + 0.1)


def test_one_that_is_held_up_again_and_again_still_judges() -> None:
    time = AwakeTime()
    first = time.at(0.0)
    for second in range(1, 11):
        last = time.at(float(second))
    assert last - first == pytest.approx(10 * GAP_S)


def test_waits_for_a_processor_are_taken_off() -> None:
    time = AwakeTime()
    first = time.at(0.0)
    for tenths in range(1, 41):
        if tenths % 4 == 0:
            time.delayed(0.2)
        last = time.at(tenths / 10)
    assert last - first == pytest.approx(2.0, abs=0.2)
    assert time.missed_s == pytest.approx(2.0, abs=0.2)


def test_a_starved_process_judges_in_the_end_all_the_same() -> None:
    time = AwakeTime()
    first = time.at(0.0)
    for tenths in range(1, 401):
        time.delayed(0.1)
        last = time.at(tenths / 10)
    assert last - first == pytest.approx(40 / 4, rel=0.01), "four times as late"
    for tenths in range(401, 421):
        last = time.at(tenths / 10)
    assert last - first == pytest.approx(10 + 2 - GAP_S, abs=0.1), "and at once at full speed when it runs again"


def test_the_clock_looks_now_and_then_for_how_long_it_has_waited() -> None:
    clock, looks = ManualClock(), list[float]()

    def waited() -> float:
        looks.append(clock.now())
        return 0.3

    awake = AwakeClock(clock, waited)
    first = awake.now()
    for _ in range(40):
        clock.advance(0.1)
        awake.tick()
    assert 4 <= len(looks) <= 10
    assert awake.now() - first == pytest.approx(4.0 - 0.3 * len(looks), abs=0.3)
    assert awake.missed_s() == pytest.approx(0.3 * len(looks), abs=0.3)


@given(st.lists(st.floats(0.0, 2.0), min_size=1, max_size=30), st.lists(st.floats(0.0, 5.0), min_size=30, max_size=30))
def test_no_wait_makes_it_go_back(gaps: list[float], waits: list[float]) -> None:
    time, now = AwakeTime(), 100.0
    before = time.at(now)
    for gap, wait in zip(gaps, waits, strict=False):
        time.delayed(wait)
        now += gap
        after = time.at(now)
        assert after - before >= min(gap, GAP_S) / 4 - 1e-6
        before = after


@given(st.lists(st.floats(0.0, 100.0), min_size=1, max_size=30))
def test_it_never_goes_back_nor_faster_than_the_clock(gaps: list[float]) -> None:
    clock = ManualClock()
    awake = AwakeClock(clock)
    readings = [awake.now()]
    for gap in gaps:
        clock.advance(gap)
        readings.append(awake.now())
    for (before, after), gap in zip(pairwise(readings), gaps, strict=True):
        assert after - before == pytest.approx(min(gap, GAP_S), abs=1e-6)


async def test_within_extends_itself_by_a_stop() -> None:
    clock = ManualClock()
    awake = AwakeClock(clock)

    async def wait() -> None:
        async with timeout_after(GAP_S + 0.01, awake):
            await asyncio.Event().wait()

    waiting = asyncio.create_task(wait())
    await asyncio.sleep(0)
    clock.advance(1000.0)  # a stop: no reading between
    await asyncio.sleep(GAP_S + 0.05)  # its timer has fired, and found that there is time left
    assert not waiting.done()
    clock.advance(0.02)
    with pytest.raises(TimeoutError):
        await waiting


async def test_within_by_a_clock_that_runs() -> None:
    async with timeout_after(10.0, MonotonicClock()):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError):
        async with timeout_after(0.01, MonotonicClock()):
            await asyncio.Event().wait()


def silence(clock: ManualClock) -> tuple[PeerWatch, asyncio.Task[str]]:
    watch = PeerWatch(clock, 0.05)
    return watch, asyncio.create_task(watch.verdict())


async def test_silence() -> None:
    clock = ManualClock()
    watch, verdict = silence(clock)
    for _ in range(5):
        await asyncio.sleep(0.01)
        clock.advance(0.04)
        watch.heard()
    assert not verdict.done()
    clock.advance(0.06)
    assert await verdict == "silent for 0.05 s"


async def test_a_peer_that_speaks_and_takes_nothing() -> None:
    clock = ManualClock()
    watch, verdict = silence(clock)
    for _ in range(5):
        with watch.writing():
            clock.advance(0.04)
            watch.heard()
            await asyncio.sleep(0.01)
    assert not verdict.done(), "each write ended in time"
    with watch.writing():
        for _ in range(5):
            clock.advance(0.02)
            watch.heard()
            await asyncio.sleep(0.02)
        assert await verdict == "takes nothing for 0.05 s"
