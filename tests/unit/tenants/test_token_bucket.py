"""Tests token buckets: what they grant over any sequence of times, clocks that jump back included."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.tenants.tenant import TokenBucket

RATES = st.floats(0.001, 1e6)
BURSTS = st.integers(1, 10**9)
STEPS = st.lists(st.tuples(st.floats(-1e4, 1e4), st.integers(0, 10**9)), max_size=50)


def test_a_burst_then_the_rate() -> None:
    bucket = TokenBucket(2.0, 10, now=100.0)
    assert bucket.wait_s(10, 100.0) == 0
    bucket.take(10, 100.0)
    assert bucket.wait_s(1, 100.0) == pytest.approx(0.5)
    assert bucket.wait_s(4, 101.0) == pytest.approx(1.0)
    assert bucket.wait_s(4, 102.0) == 0
    assert bucket.level(1000.0) == 10, "it fills no further than its burst"


def test_what_is_given_back_fills_up_to_the_burst() -> None:
    bucket = TokenBucket(1.0, 10, now=0.0)
    bucket.take(8, 0.0)
    bucket.give_back(3, 0.0)
    assert bucket.level(0.0) == 5
    bucket.give_back(100, 0.0)
    assert bucket.level(0.0) == 10


def test_more_use_than_was_taken_is_a_debt() -> None:
    bucket = TokenBucket(1.0, 10, now=0.0)
    bucket.give_back(-15, 0.0)
    assert bucket.level(0.0) == -5
    assert bucket.wait_s(1, 0.0) == pytest.approx(6.0)


def test_more_than_the_burst_waits_for_a_full_bucket() -> None:
    bucket = TokenBucket(1.0, 10, now=0.0)
    assert bucket.wait_s(1000, 0.0) == 0
    bucket.take(4, 0.0)
    assert bucket.wait_s(1000, 0.0) == pytest.approx(4.0)


def test_a_clock_that_jumps_back_neither_grants_nor_stops() -> None:
    bucket = TokenBucket(1.0, 10, now=1000.0)
    bucket.take(10, 1000.0)
    assert bucket.level(0.0) == 0
    assert bucket.level(3.0) == 3, "it fills from the new time on"


def test_a_change_keeps_what_is_used() -> None:
    bucket = TokenBucket(1.0, 10, now=0.0)
    bucket.take(10, 0.0)
    bucket.change(5.0, 100, 2.0)
    assert bucket.level(2.0) == 2, "at the old rate until then"
    assert bucket.level(3.0) == 7
    bucket.change(5.0, 3, 3.0)
    assert bucket.level(3.0) == 3


@given(RATES, BURSTS, STEPS)
def test_never_more_than_the_burst_and_what_time_brings(
    rate: float, burst: int, steps: list[tuple[float, int]]
) -> None:
    now = forward = 0.0
    bucket, granted = TokenBucket(rate, burst, now), 0
    for step_s, units in steps:
        now += step_s
        forward += max(0.0, step_s)
        if units <= burst and bucket.wait_s(units, now) == 0:
            bucket.take(units, now)
            granted += units
        assert bucket.level(now) <= burst
    allowed = burst + rate * forward
    assert granted <= allowed * (1 + 1e-9) + 1e-3


@given(RATES, BURSTS, STEPS)
def test_the_wait_is_long_enough(rate: float, burst: int, steps: list[tuple[float, int]]) -> None:
    now = 0.0
    bucket = TokenBucket(rate, burst, now)
    for step_s, units in steps:
        now += abs(step_s)
        asked = min(units, burst)
        wait_s = bucket.wait_s(asked, now)
        assert 0 <= wait_s <= burst / rate * (1 + 1e-9)
        later = now + wait_s * (1 + 1e-9) + 1e-6
        assert bucket.wait_s(asked, later) <= 1e-5
        now = later
        bucket.take(asked, now)
