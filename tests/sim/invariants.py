"""What must hold at every moment of a run, and at its end.

Cheap checks run after every turn, the thorough ones after every step and now and then; what is wrong in a ledger stays
wrong, so it is found a little later. Other invariants stand where they can be broken: a client's stream in `client`,
writes and the index in `memory`, reads in `engine`, hand-overs in `cluster` and `worker`.
"""

from __future__ import annotations

from collections import Counter

from services.engine.block_pool import Holder
from tests.sim.cluster import Cluster
from tests.sim.router import SimRouter
from tests.sim.worker import SimWorker
from tests.sim.world import Machine, World

_THOROUGH = 0.02
"""Share of turns after which the node is examined."""
_LATE_S = 1.0
"""A lease whose clock has run out is ended in this time, on a node that runs."""

_CRASHES = 3
"""That a request survives all but so many is what `CoordinatorConfig.max_crashes` promises."""

# How a request may end although its client neither left nor set a deadline; only after faults.
_EXCUSED = frozenset({"WORKER_FAILED", "NO_WORKER", "OVERLOADED", "router lost", "DRAINING"})


def check_worker(world: World, worker: SimWorker) -> None:
    """Ledger, lines and references agree. O(blocks)."""
    host, pool, scheduler = worker.host, worker.engine.pool, worker.engine.scheduler
    name = worker.plan.name
    pool.check()
    scheduler._admission.check()
    scheduler._batch.check()
    held = Counter(block_id for sequence in scheduler.sequences.values() for block_id in sequence.block_ids)
    for block_id, num_held in held.items():
        # More than these: the cached prefixes of imports.
        world.require(pool.references(Holder.SEQUENCE, block_id) >= num_held, f"{name}: block {block_id} not held")
    if host.transfer.staging is not None:
        host.transfer.staging.slots.check()
    importing = sum(len(import_.block_ids) for import_ in host.imports)
    world.require(pool.references(Holder.IMPORT) == importing, f"{name}: IMPORT references of no import")
    leased = sum(len(lease.block_ids) for lease in host.leases)
    # More than these: admissions on their way from the step thread.
    world.require(pool.references(Holder.LEASE) >= leased, f"{name}: leases without references")
    # A leg that is gone has stopped its compute, at the end of the step under way at the latest.
    orphans = scheduler.sequences.keys() - host.hub._sinks.keys() - scheduler._aborted
    world.require(not orphans, f"{name}: sequences without a leg: {orphans}")


def check_clocks(world: World, worker: SimWorker) -> None:
    """ "Cleanup runs only when new work is scheduled" is how others got this wrong."""
    if not len(worker.host.leases):
        return
    now = worker.node.now()
    if world.now_s - worker.node.thawed_s < _LATE_S:
        return
    for lease in worker.host.leases:
        late = lease.deadline_s is not None and lease.deadline_s < now - _LATE_S
        world.require(not late, f"{worker.plan.name}: a lease outlives its clocks")


class Watch:
    """Looks at nodes as they run."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster

    def after_turn(self, node: Machine) -> None:
        inhabitant = getattr(node, "inhabitant", None)
        thorough = self._world.random.random() < _THOROUGH
        if isinstance(inhabitant, SimWorker):
            check_clocks(self._world, inhabitant)
            if thorough:
                check_worker(self._world, inhabitant)
        elif isinstance(inhabitant, SimRouter) and thorough:
            inhabitant.coordinator.check()

    def check_all(self) -> None:
        for worker in self._cluster.workers.values():
            if worker.node.alive:
                check_worker(self._world, worker)
        for router in self._cluster.routers.values():
            if router.node.alive:
                router.coordinator.check()


def check_outcomes(world: World, cluster: Cluster, *, num_faults: int, num_blows: int) -> None:
    """Every request ended, and in a way that it may."""
    smallest = min(worker.engine.info.max_model_len for worker in cluster.workers.values())
    for request in cluster.requests:
        what = f"request {request.request_id} ended with {request.outcome}"
        world.require(request.over, f"request {request.request_id} never ends")
        if request.outcome in ("stop", "length"):
            continue
        if request.outcome == "CANCELLED":
            world.require(request.cancelled, what)
        elif request.outcome == "DEADLINE_EXCEEDED":
            world.require(request.deadline_s is not None, what)
        else:
            too_long = request.num_tokens_at_most > smallest and request.outcome == "CONTEXT_LENGTH_EXCEEDED"
            enough = num_blows >= _CRASHES if request.outcome == "WORKER_FAILED" else num_faults > 0
            world.require(too_long or (enough and request.outcome in _EXCUSED), what)


def not_idle(cluster: Cluster) -> list[str]:
    """What has not come to rest."""
    busy = [worker.plan.name for worker in cluster.workers.values() if not worker.idle]
    busy += [router.node.name for router in cluster.routers.values() if router.coordinator.num_live]
    return busy + [router.node.name + " links" for router in cluster.routers.values() if not _joined(cluster, router)]


def _joined(cluster: Cluster, router: SimRouter) -> bool:
    """Every worker was found again, with no manual step."""
    ready = {
        worker.info.worker_id: worker.info.incarnation for worker in router.coordinator.workers() if worker.has_session
    }
    return ready == {name: worker.host.incarnation for name, worker in cluster.workers.items()}
