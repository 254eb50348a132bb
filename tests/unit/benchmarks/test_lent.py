"""Tests from how many tokens on bringing pays, as measured and as expected."""

from __future__ import annotations

import math

import pytest

from baton.v1 import control_pb2
from benchmarks.lent import _crossing, _First, _without_margin
from services.router.policy.known_cache import BringTime, prefix_break_even

COMPUTE_MS, FIXED_MS, BRING_MS = 0.5, 40.0, 0.1


def turns(length: int, *, brought: bool) -> tuple[int, list[_First]]:
    computed = _First(COMPUTE_MS * length, 0)
    other = _First(FIXED_MS + BRING_MS * length, length) if brought else computed
    return length, [computed, other, other]


def test_the_measured_break_even_is_where_nothing_is_saved() -> None:
    assert _crossing(turns(length, brought=True) for length in (256, 512, 1024)) == pytest.approx(100.0)


def test_what_was_computed_says_nothing_of_bringing() -> None:
    assert _crossing([turns(256, brought=False), turns(512, brought=True)]) == math.inf


def test_the_expected_break_even_is_taken_back_to_no_margin() -> None:
    time = BringTime(token_bytes=100_000)
    even = control_pb2.PrefixBreakEven(
        tokens=round(prefix_break_even(time, COMPUTE_MS)), fixed_ms=time.fixed_ms, token_ms=time.token_ms
    )
    assert _without_margin(even) == pytest.approx(time.fixed_ms / (COMPUTE_MS - time.token_ms), rel=0.05)
    assert _without_margin(control_pb2.PrefixBreakEven()) == math.inf
