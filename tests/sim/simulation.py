"""Runs one seed from the first packet to rest, and says what was wrong.

Owns: the stages of a run (busy, faults over, everything at rest, a last request served) and their bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from services.core import ids
from services.router.coordinator import handoff
from tests.sim import scenario
from tests.sim.clocks import Clocks
from tests.sim.cluster import Cluster
from tests.sim.faults import LONGEST_S, Faults
from tests.sim.invariants import Watch, not_idle
from tests.sim.outcomes import check_outcomes, copies_may_stall
from tests.sim.recovery import recovery_s
from tests.sim.tier_faults import TierFaults
from tests.sim.worker import SimWorker
from tests.sim.world import Violation, World
from tests.sim.wrong_workers import WrongWorkers

ENDS_WITHIN_S = 40.0
"""Of the end of the last fault, every request has ended."""
RESTS_WITHIN_S = 6.0
"""After that, nothing is held any more and every worker is known to every router."""
PROBE_WITHIN_S = 5.0


@dataclass(frozen=True)
class Result:
    seed: int
    digest: int
    """Equal for equal runs."""
    num_turns: int
    simulated_s: float
    num_faults: int
    outcomes: tuple[str, ...]


def simulate(seed: int, *, on_note: Callable[[str], None] | None = None) -> Result:
    """Raises what went wrong: a `Violation`, or whatever the code under test raised."""
    world = World(seed, on_note=on_note)
    with _deterministic(world), _honest(world), _logs(world, logging.ERROR if on_note is None else logging.INFO):
        return _Run(world).to_the_end()


class _Run:
    def __init__(self, world: World) -> None:
        self._world = world
        self._load = scenario.choose_load(world)
        self._cluster: Cluster = scenario.build(world, self._load)
        self._watch = Watch(world, self._cluster)
        self._cluster.on_lease_end = Clocks(world, self._cluster).ended
        self._faults = Faults(world, self._cluster)
        self._tier_faults = TierFaults(world, self._cluster, self._faults)
        self._wrong_workers = WrongWorkers(world, self._cluster, self._load)
        world.after_turn = self._watch.after_turn

    def to_the_end(self) -> Result:
        world, cluster, planned = self._world, self._cluster, self._faults
        try:
            for request in scenario.requests(world, cluster, self._load):
                cluster.submit(request)
            planned.plan()
            self._tier_faults.plan()
            self._wrong_workers.plan()
            self._until(scenario.BUSY_S + 0.1)
            while world.now_s < planned.quiet_s or (self._live() and self._armed_may_strike()):
                self._until(world.now_s + 0.25)
            planned.disarm()
            self._tier_faults.disarm()
            self._wrong_workers.disarm()
            self._all_end()
            self._all_rest()
            self._probe()
            self._check_sessions()
            check_outcomes(world, cluster, num_faults=planned.num_faults, num_blows=planned.num_blows)
            outcomes = tuple(str(request.outcome) for request in cluster.requests)
            return Result(world.seed, world.digest, world.num_turns, world.now_s, planned.num_faults, outcomes)
        finally:
            self._cluster.kill_all()

    def _until(self, when_s: float) -> None:
        self._world.run(lambda: False, when_s)

    def _live(self) -> bool:
        return any(not request.over for request in self._cluster.requests)

    def _armed_may_strike(self) -> bool:
        return self._world.now_s < scenario.BUSY_S + LONGEST_S

    def _all_end(self) -> None:
        limit_s = self._world.now_s + ENDS_WITHIN_S
        while self._live() and self._world.now_s < limit_s:
            self._until(self._world.now_s + 0.25)
        live = [request.request_id for request in self._cluster.requests if not request.over]
        self._world.require(not live, f"requests do not end: {live}")

    def _all_rest(self) -> None:
        limit_s = self._world.now_s + RESTS_WITHIN_S
        while not_idle(self._cluster) and self._world.now_s < limit_s:
            self._until(self._world.now_s + 0.25)
        busy = not_idle(self._cluster)
        self._world.require(not busy, f"no rest: {busy}")
        self._watch.check_all()

    def _check_sessions(self) -> None:
        """Requires that what stopped and went on as a whole has lost no session."""
        for router in self._cluster.routers.values() if self._faults.only_pauses else ():
            numbers = [link._hello.session_number for link in router.conductor.links.values()]
            again = max(numbers) > len(self._cluster.workers)
            self._world.require(not again, f"{router.node.name}: sessions were lost by a pause of all: {numbers}")

    def _probe(self) -> None:
        """Whoever can still be served is, by whatever is left."""
        cluster = self._cluster
        served = [router for router in cluster.present_routers if any(map(_decodes, cluster.within_reach(router)))]
        probes = [scenario.probe(self._world, cluster, router.node.name) for router in served]
        for request in probes:
            cluster.submit(request)
        within_s = PROBE_WITHIN_S
        if cluster.network.cut_for_ever or copies_may_stall(cluster):
            within_s += recovery_s(cluster)  # others have to be found first
        if not all(worker.health.usable for router in served for worker in router.coordinator.workers.all()):
            within_s += scenario.MAX_PAUSE_S  # what has failed so often is tried no sooner
        self._world.run(lambda: all(request.over for request in probes), self._world.now_s + within_s)
        for request in probes:
            self._world.require(request.outcome in ("stop", "length"), f"a last request: {request.outcome}")


def _decodes(worker: SimWorker) -> bool:
    return worker.plan.can_decode


@contextlib.contextmanager
def _deterministic(world: World) -> Iterator[None]:
    """Makes a run repeatable: random ids come from the seed, and task groups cancel their tasks in the order of
    their start (asyncio keeps them in a set, whose order is that of their addresses)."""
    source = random.Random(world.seed ^ 0x5EED)
    real = ids.secrets
    stand_in: Any = SimpleNamespace(
        randbits=source.getrandbits, token_bytes=source.randbytes, token_hex=lambda n: source.randbytes(n).hex()
    )
    group: Any = asyncio.TaskGroup
    initialise = group.__init__

    def with_order(self: Any) -> None:
        initialise(self)
        self._tasks = _InOrder()

    ids.secrets, group.__init__ = stand_in, with_order
    try:
        yield
    finally:
        ids.secrets, group.__init__ = real, initialise


class _InOrder(dict[Any, None]):
    """A set, as far as a task group needs one, that keeps its order."""

    def add(self, item: Any) -> None:
        self[item] = None

    def discard(self, item: Any) -> None:
        self.pop(item, None)


@contextlib.contextmanager
def _honest(world: World) -> Iterator[None]:
    """Workers here are honest: what one says of a request's output fits, or the code under test has lost something.
    (The router only fails the leg, so its client need not notice.)"""
    real = handoff._fits

    def fits(request: Any, answer: Any, event: Any, vocab_size: int) -> bool:
        fit = real(request, answer, event, vocab_size)
        world.require(fit, f"{request.request_id}: tokens at {event.position} after {len(answer.output)}")
        return fit

    handoff._fits = fits
    try:
        yield
    finally:
        handoff._fits = real


class _LogHandler(logging.Handler):
    """Ends the run at what the code under test logs as an error: that should never happen."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            self._world.tell(f"{self._world.now_s:.6f}     {record.name}: {record.getMessage()}")
            return
        if record.name == "services.engine.engine" and record.getMessage().endswith("its sequences end"):
            return  # injected
        error = record.exc_info[1] if record.exc_info else None
        self._world.fail(error or Violation(record.getMessage()))


@contextlib.contextmanager
def _logs(world: World, lowest: int) -> Iterator[None]:
    logger = logging.getLogger("services")
    handler, level, propagate = _LogHandler(world), logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(lowest)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate
