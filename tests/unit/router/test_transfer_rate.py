"""Tests how fast a pair's handoffs are taken to be."""

from __future__ import annotations

import math

from services.router.policy import BringTime
from services.router.policy.handoff_time import TransferRate


def test_nothing_is_known_at_first_and_small_handoffs_say_nothing() -> None:
    rate = TransferRate()
    rate.observe(1000, 0.1)
    assert rate.bytes_per_s is None


def test_large_handoffs_count_for_more_and_old_ones_for_less() -> None:
    rate = TransferRate()
    rate.observe(1_000_000, 10.0)
    assert rate.bytes_per_s == 1e8
    rate.observe(100_000_000, 100.0)
    assert 9e8 < (rate.bytes_per_s or 0) < 1e9
    for _ in range(100):
        rate.observe(1_000_000, 100.0)
    assert abs((rate.bytes_per_s or 0) / 1e7 - 1) < 0.02


def test_what_makes_no_sense_is_left_out() -> None:
    rate = TransferRate()
    for num_bytes, ms in ((1 << 40, 0.0), (1 << 40, -1.0), (1 << 40, math.nan), (1 << 40, math.inf), (-(1 << 40), 1.0)):
        rate.observe(num_bytes, ms)
    assert rate.bytes_per_s is None
    rate.observe((1 << 63) - 1, 0.001)
    assert rate.bytes_per_s == 1e15


def test_a_bring_over_a_slow_pair_is_expected_to_take_long() -> None:
    fast, slow = BringTime(23_000, 2e9), BringTime(23_000, 1e7)
    assert fast.ms(1000) < BringTime(23_000).ms(1000) < slow.ms(1000)
    assert abs(slow.ms(1000) - (10 + 2300)) < 1
