"""The simulator bites: every deliberate bug is found within so many seeds."""

from __future__ import annotations

import pytest

from tests.sim.mutants import MUTANTS
from tests.sim.simulation import simulate

MOST_SEEDS = 1000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_bug_is_found(name: str) -> None:
    with MUTANTS[name]():
        for seed in range(MOST_SEEDS):
            try:
                simulate(seed)
            except AssertionError:  # a violation, or an assertion of the code under test
                return
    pytest.fail(f"{name} was not found in {MOST_SEEDS} seeds")
