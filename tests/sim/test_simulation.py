"""The simulator in CI: many seeds, all clean, and each the same whenever it is run."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import pytest

from tests.sim.__main__ import replay_command
from tests.sim.scenario import Load, build
from tests.sim.simulation import simulate
from tests.sim.world import World

NUM_SEEDS = 2000
_CHUNK = 100


def failures(start: int) -> list[str]:
    """Of a chunk of seeds, with the commands that replay them."""
    found = []
    for seed in range(start, start + _CHUNK):
        try:
            simulate(seed)
        except Exception as error:
            found.append(f"seed {seed}: {error!r}; replay: {replay_command(seed)}")
    return found


@pytest.mark.timeout(900)
def test_no_fault_loses_repeats_or_corrupts_a_token() -> None:
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        found = [line for lines in pool.map(failures, range(0, NUM_SEEDS, _CHUNK)) for line in lines]
    assert not found, "\n".join(found)


def test_a_seed_is_the_same_run_in_every_process() -> None:
    seeds = range(3)
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
