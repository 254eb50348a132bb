"""Tests what a profile makes of measured points: times that can be, whatever noise there is in the points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sim.profile import WorkerProfile

POINTS = st.dictionaries(st.integers(1, 4096), st.floats(0.01, 1e4), min_size=2, max_size=6).map(
    lambda points: tuple(sorted(points.items()))
)


@given(POINTS, st.integers(1, 100_000))
def test_no_step_takes_less_than_nothing(points: tuple[tuple[int, float], ...], size: int) -> None:
    profile = WorkerProfile("noisy", 1.0, 1.0, 1.0, prefill_points=points, decode_points=points)
    for cost_ms in (profile.prefill_ms, profile.decode_ms):
        assert cost_ms(size) > 0
        (first, first_ms), (last, last_ms) = points[0], points[-1]
        if size <= first:
            assert cost_ms(size) >= first_ms * size / first * (1 - 1e-9), "none costs less for its size"
        if size >= last:
            assert cost_ms(size) >= last_ms * (1 - 1e-9), "none of more costs less"


def test_measured_points_stay_as_they_are() -> None:
    profile = WorkerProfile("m", 1.0, 1.0, 1.0, decode_points=((2, 40.0), (4, 50.0), (8, 45.0)))
    sizes_ms = {1: 35.0, 2: 40.0, 3: 45.0, 4: 50.0, 6: 47.5, 8: 45.0, 9: 45.0, 256: 45.0}
    assert {size: profile.decode_ms(size) for size in sizes_ms} == pytest.approx(sizes_ms)
    steep = WorkerProfile("m", 1.0, 1.0, 1.0, prefill_points=((64, 20.0), (128, 60.0)))
    assert steep.prefill_ms(32) == pytest.approx(10.0), "not the 0 ms of the line"
    assert steep.prefill_ms(256) == pytest.approx(140.0)
