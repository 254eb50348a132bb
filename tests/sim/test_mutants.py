"""Tests that the simulator finds every deliberate bug within so many seeds."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.sim import (
    handoff_mutants,
    prefix_mutants,
    process_mutants,
    several_mutants,
    store_mutants,
    tier_mutants,
    transport_mutants,
    waiting_mutants,
    wrong_mutants,
)
from tests.sim.campaign import end_with_parent
from tests.sim.scenario import computes_wrong, has_tiers, num_stores, shares_prefixes, transport_of
from tests.sim.simulation import simulate

KINDS = (
    handoff_mutants,
    process_mutants,
    waiting_mutants,
    several_mutants,
    store_mutants,
    prefix_mutants,
    tier_mutants,
    transport_mutants,
    wrong_mutants,
)
MUTANTS = {mutant.__name__: mutant for kind in KINDS for mutant in kind.MUTANTS}
KIND_OF = {mutant.__name__: kind.__name__.rpartition(".")[2] for kind in KINDS for mutant in kind.MUTANTS}
ONE_OF_EACH = {kind.MUTANTS[0].__name__ for kind in KINDS}
"""Hunted by `make test-all`; `make proof` hunts them all, which takes twenty minutes."""
IN_TEST_ALL = pytest.mark.timeout(1200)
IN_PROOF = (pytest.mark.proof, pytest.mark.timeout(4 * 3600))
SEEDS = range(2000)
"""Those that `test_simulation` runs."""
STAGED = [seed for seed in SEEDS if seed % 5 in (2, 4)]
"""Of these, clusters with staging slots; the others have nothing for such a bug to break."""
FULL = [seed for seed in SEEDS if seed % 10 == 4]
"""Of these, routers with a queue of one, and so the only ones that are crowded."""
SEVERAL = [seed for seed in SEEDS if seed % 5 in (1, 2)]
"""Of these, requests for several answers."""
STORES = [seed for seed in SEEDS if num_stores(seed)]
"""Of these, clusters with stores."""
SHARING = [seed for seed in SEEDS if shares_prefixes(seed)]
"""Of these, clusters whose workers bring prefixes from one another."""
TIERED = [seed for seed in SEEDS if has_tiers(seed)]
"""Of these, clusters whose workers have tiers."""
SOCKETS = [seed for seed in SEEDS if transport_of(seed) == "tcp"]
"""Of these, clusters whose workers read blocks from each other's sockets."""
ONE_SIDED = [seed for seed in SEEDS if transport_of(seed) == "nixl"]
"""Of these, clusters whose workers read each other's pools by NIXL."""
WRONG = [seed for seed in SEEDS if computes_wrong(seed)]
"""Of these, clusters in which a worker computes wrong."""
SEEDS_OF = {
    **{mutant.__name__: WRONG for mutant in wrong_mutants.MUTANTS},
    **{mutant.__name__: SOCKETS for mutant in transport_mutants.OF_SOCKETS},
    **{mutant.__name__: ONE_SIDED for mutant in transport_mutants.OF_ONE_SIDED_READS},
    **{mutant.__name__: TIERED for mutant in tier_mutants.MUTANTS},
    **{mutant.__name__: SHARING for mutant in prefix_mutants.MUTANTS},
    **{mutant.__name__: STORES for mutant in store_mutants.MUTANTS},
    **{mutant.__name__: SEVERAL for mutant in several_mutants.MUTANTS},
    "frees_slots_when_the_stream_ends": STAGED,
    "takes_slots_back_from_a_leg_that_may_release": STAGED,
    "crowds_out_what_has_begun": FULL,
}


def found_at(name: str) -> int | None:
    """Returns the first seed that finds the bug."""
    with MUTANTS[name]():
        for seed in SEEDS_OF.get(name, SEEDS):
            try:
                simulate(seed)
            except AssertionError:  # a violation, or an assertion of the code under test
                return seed
    return None


@pytest.fixture(scope="module")
def hunts(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[int | None]]]:
    """Yields the hunts for the chosen bugs, two at a time, each in a process that has no other bug."""
    chosen = [name for name in MUTANTS if any(item.name.endswith(f"-{name}]") for item in request.session.items)]
    with ProcessPoolExecutor(2, get_context("spawn"), end_with_parent) as pool:
        yield {name: pool.submit(found_at, name) for name in chosen}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_deliberate_bug_can_be_planted(name: str) -> None:
    """The code changes, and most bugs are hunted by `make proof` alone."""
    with MUTANTS[name]():
        pass


@pytest.mark.process
@pytest.mark.long
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=IN_TEST_ALL if name in ONE_OF_EACH else IN_PROOF, id=f"{KIND_OF[name]}-{name}")
        for name in MUTANTS
    ],
)
def test_a_deliberate_bug_is_found(name: str, hunts: dict[str, Future[int | None]]) -> None:
    assert hunts[name].result() is not None, f"{name} was not found"
