"""Tests that many seeds run without a violation, and each alike whenever it is run."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from collections.abc import Sequence

import pytest

from services.core.hashing import BlockHash
from services.kv.lease import Lease
from services.kvtransfer.lending import Lender
from services.router.policy import PRESETS, PolicyConfig, Split
from tests.sim import campaign
from tests.sim.cluster import Cluster
from tests.sim.scenario import (
    BLOCK_SIZE,
    Load,
    build,
    choose_load,
    computes_wrong,
    has_tiers,
    shares_prefixes,
    split_of,
    transport_of,
)
from tests.sim.simulation import simulate
from tests.sim.world import World

SOME = pytest.param(range(100), 1, marks=pytest.mark.timeout(600))
MANY = pytest.param(range(100, 2000), 2, marks=[pytest.mark.proof, pytest.mark.process, pytest.mark.timeout(4 * 3600)])


@pytest.mark.parametrize(("seeds", "jobs"), [SOME, MANY], ids=["some", "many"])
def test_no_fault_loses_repeats_or_corrupts_a_token(seeds: range, jobs: int) -> None:
    summary = campaign.run(seeds, jobs, None, chunk_seeds=25)
    assert summary.num_seeds == len(seeds)
    assert not summary.failures, summary.failures


def test_prefixes_are_lent_where_clusters_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the bugs of lending could only be found by other clusters' faults."""
    lent, lend = set[int](), Lender.lend

    def counted(self: Lender, hashes: Sequence[BlockHash]) -> Lease | None:
        if (lease := lend(self, hashes)) is not None:
            lent.add(seed)
        return lease

    monkeypatch.setattr(Lender, "lend", counted)
    seeds = [seed for seed in range(200) if shares_prefixes(seed)]
    for seed in seeds:
        simulate(seed)
    assert len(lent) > len(seeds) / 8


def test_a_worker_that_computes_wrong_spoils_nothing_after_its_verdict() -> None:
    """That nobody is told anything wrong after it, every seed requires. Here: that there are verdicts, and requests
    that end by them."""
    notes, outcomes = list[str](), list[str]()
    seeds = [seed for seed in range(64) if computes_wrong(seed)]
    for seed in seeds:
        outcomes += simulate(seed, on_note=notes.append).outcomes
    assert sum(" computes wrong " in note for note in notes) >= len(seeds) / 2
    assert sum(" verdicts " in note for note in notes) >= len(seeds) / 2
    assert "WRONG_OUTPUT" in outcomes


def test_clusters_have_blocks_of_different_sizes() -> None:
    """Blocks differ between clusters and, in some, between workers."""
    sizes = [_built(seed).block_sizes for seed in range(100)]
    assert [each for each in ({2}, {4}, {8}) if each not in sizes] == []
    assert any(len(each) > 1 for each in sizes)
    assert sizes.count({BLOCK_SIZE}) > len(sizes) / 2


def test_clusters_are_placed_by_every_preset() -> None:
    policies = [_policy(seed) for seed in range(100)]
    assert [name for name, policy in PRESETS.items() if policy not in policies] == []
    assert policies.count(PolicyConfig()) > len(policies) / 2


def test_some_clusters_split_where_it_pays_and_some_never() -> None:
    splits = [split_of(seed) for seed in range(100)]
    assert splits.count(Split.AUTO) == splits.count(Split.NEVER) == 9


@pytest.mark.parametrize(("transport", "number"), [("tcp", 20), ("nixl", 10)])
def test_some_clusters_hand_over_by_one_transport_alone(transport: str, number: int) -> None:
    seeds = [seed for seed in range(90) if transport_of(seed) == transport]
    assert len(seeds) == number
    workers = [worker for seed in seeds[:3] for worker in _built(seed).workers.values()]
    assert all(f"pulls by {transport} only" in worker.host.transfer.summary for worker in workers)


def test_some_clusters_have_tiers() -> None:
    assert sum(map(has_tiers, range(140))) == 30
    tiered = [worker.plan for seed in filter(has_tiers, range(70)) for worker in _built(seed).workers.values()]
    assert all(plan.has_tiers for plan in tiered)
    kinds = {(plan.num_host_slots > 0, plan.num_disk_slots > 0) for plan in tiered}
    assert kinds == {(True, False), (False, True), (True, True)}


def _policy(seed: int) -> PolicyConfig:
    (first, *_) = _built(seed).routers.values()
    return first.config.policy


def _built(seed: int) -> Cluster:
    world = World(seed)
    cluster = build(world, choose_load(world))
    cluster.kill_all()
    return cluster


@pytest.mark.process
def test_a_seed_is_the_same_run_in_every_process() -> None:
    seeds = (
        0,
        1,
        2,
        12,
        1028,
    )  # the third has tiers; the last two stop a router: its tasks' order was their addresses'
    here = [simulate(seed) for seed in seeds]
    assert here == [simulate(seed) for seed in seeds]
    script = "from tests.sim.simulation import simulate\n" + "".join(f"print(simulate({seed}))\n" for seed in seeds)
    there = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert there.stdout.splitlines() == [str(result) for result in here]


def test_a_router_that_was_stopped_does_not_take_its_own_silence_for_its_workers() -> None:
    world = World(1)
    cluster = build(world, Load(tight=False, growing=False))
    for worker in list(cluster.workers.values()):
        worker.node.kill()
        patient = dataclasses.replace(worker.plan.config, silence_s=10.0)
        cluster.start_worker(dataclasses.replace(worker.plan, config=patient))
    name, router = next(iter(cluster.routers.items()))
    world.run(lambda: False, 1.0)
    links = dict(router.conductor.links)
    assert links.keys() == cluster.workers.keys()
    cluster.freeze(name)
    world.run(lambda: False, 4.0)
    cluster.thaw(name)
    world.run(lambda: False, 8.0)
    assert router.conductor.links == links
    cluster.kill_all()
