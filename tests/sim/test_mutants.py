"""The simulator bites: every deliberate bug is found within so many seeds."""

from __future__ import annotations

import pytest

from tests.sim import handoff_mutants, process_mutants
from tests.sim.mutation import Mutant
from tests.sim.simulation import simulate

MUTANTS = handoff_mutants.MUTANTS + process_mutants.MUTANTS
MOST_SEEDS = 1000


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_deliberate_bug_is_found(mutant: Mutant) -> None:
    with mutant():
        for seed in range(MOST_SEEDS):
            try:
                simulate(seed)
            except AssertionError:  # a violation, or an assertion of the code under test
                return
    pytest.fail(f"{mutant.__name__} was not found in {MOST_SEEDS} seeds")
