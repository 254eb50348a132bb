"""Checks what must hold at every moment of a run, and at its end.

Cheap checks run after every turn, the thorough ones after every step and now and then; what is wrong in a ledger stays
wrong, so it is found a little later. Other invariants stand where they can be broken: a client's stream in `client`,
writes and the index in `memory`, reads in `engine`, hand-overs in `cluster` and `worker`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from services.core.errors import LayoutMismatch
from services.decode.leg import DecodeLeg
from services.engine.schedule.scheduler import Scheduler
from services.kv.imports import ImportState
from services.kv.pool import Holder
from services.kv.verdicts import Verdicts
from services.store.leg import ParkLeg
from services.worker.session import Leg
from tests.sim.cluster import Cluster
from tests.sim.engine import SimEngine
from tests.sim.memory import staging_of
from tests.sim.outcomes import copies_may_stall
from tests.sim.router import SimRouter
from tests.sim.tier_invariants import check_tiers, not_settled
from tests.sim.worker import SimWorker
from tests.sim.world import Machine, World

_THOROUGH = 0.02
"""Share of turns after which the node is examined."""


def check_worker(world: World, worker: SimWorker) -> None:
    """Asserts that ledger, lines and references agree. Takes O(blocks)."""
    host, pool, name = worker.host, worker.engine._pool, worker.plan.name
    pool.check()
    world.require(not host.tally.internal_errors, f"{name}: an exception that was survived; the log has it")
    mismatched = host.tally.transfers_failed[LayoutMismatch.reason.lower()]
    world.require(not mismatched, f"{name}: it was sent a handoff from a worker whose layout is another")
    if isinstance(worker.engine, SimEngine):
        _check_sequences(world, worker, worker.engine._scheduler)
    check_tiers(world, worker)
    if (staging := staging_of(host)) is not None:
        staging.slots.check()
    importing = sum(len(import_.block_ids) for import_ in host.imports)
    importing += _ready_but_unconstrained(worker) + _ready_but_given_up(worker)
    world.require(pool.references(Holder.IMPORT) == importing, f"{name}: IMPORT references of no import")
    leased = sum(len(lease.block_ids) for lease in host.leases)
    # More than these: admissions on their way from the step thread.
    exactly = pool.references(Holder.LEASE) == leased or not worker.plan.is_store
    world.require(exactly and pool.references(Holder.LEASE) >= leased, f"{name}: leases without references")


def _check_sequences(world: World, worker: SimWorker, scheduler: Scheduler) -> None:
    """Asserts that what sequences hold is held for them, and that each has a leg."""
    pool, host, name = worker.engine._pool, worker.host, worker.plan.name
    scheduler._admission.check()
    scheduler._batch.check()
    held = Counter(block_id for sequence in scheduler.sequences.values() for block_id in sequence.block_ids)
    for block_id, num_held in held.items():
        # More than these: the cached prefixes of imports.
        world.require(pool.references(Holder.SEQUENCE, block_id) >= num_held, f"{name}: block {block_id} not held")
    # A leg that is gone has stopped its compute, at the end of the step under way at the latest.
    orphans = scheduler.sequences.keys() - host.hub._sinks.keys() - scheduler._aborted
    world.require(not orphans, f"{name}: sequences without a leg: {orphans}")


def _legs(worker: SimWorker) -> Iterator[Leg]:
    # A leg whose session has just ended holds what it has until its task has been cancelled, in the next turn.
    sessions = {*worker.host.sessions, *worker.sessions_seen}
    return (leg for session in sessions for leg in session.legs.values())


def _ready_but_given_up(worker: SimWorker) -> int:
    """Returns how many blocks a store has imported for legs that were given up in the same moment."""
    imports = (leg._import for leg in _legs(worker) if isinstance(leg, ParkLeg))
    return sum(len(each.block_ids) for each in imports if each is not None and each.state is ImportState.READY)


def _ready_but_unconstrained(worker: SimWorker) -> int:
    """Returns how many blocks have been imported for sequences whose constraints are still being compiled."""
    legs = (leg for leg in _legs(worker) if isinstance(leg, DecodeLeg))
    held = (leg._held for leg in legs if leg._held is not None and not leg._held.over)
    ready = (each for each in held if each.import_ is not None and each.import_.state is ImportState.READY)
    return sum(len(each.block_ids) + len(each.spare) for each in ready)


class Watch:
    """Looks at nodes as they run."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster
        self._queued: dict[SimRouter, int] = {}
        """How many requests each router had in its queue after its last turn."""

    def after_turn(self, node: Machine) -> None:
        inhabitant = getattr(node, "inhabitant", None)
        thorough = self._world.random.random() < _THOROUGH
        if isinstance(inhabitant, SimWorker):
            inhabitant.sessions_seen.update(inhabitant.host.sessions)
            if thorough:
                check_worker(self._world, inhabitant)
        elif isinstance(inhabitant, SimRouter):
            self._check_queue(inhabitant)
            if thorough:
                inhabitant.coordinator.check()

    def _check_queue(self, router: SimRouter) -> None:
        """Requires that the queue is bounded, but for requests that come back from a worker, and for their places: who
        has a higher priority may take those."""
        queue, longest = router.book.queue, router.config.max_queue
        newcomers = [each.request_id for each in queue if not each.story.num_prefills and not each.story.num_decodes]
        bound = max(longest, self._queued.get(router, 0))
        self._world.require(len(newcomers) <= bound, f"{router.node.name}: {newcomers} queued, {longest} may be")
        self._queued[router] = len(queue)

    def check_all(self) -> None:
        for worker in self._cluster.workers.values():
            if worker.node.alive:
                check_worker(self._world, worker)
        for router in self._cluster.routers.values():
            if router.node.alive:
                router.coordinator.check()


def not_idle(cluster: Cluster) -> list[str]:
    """Returns what has not come to rest, of all that is left."""
    routers = cluster.present_routers
    # Over a link that stays cut, canaries are tried for ever; and often where one of them may fail by bad luck.
    tried = {name for link in cluster.network.cut_for_ever if link <= cluster.workers.keys() for name in link}
    if copies_may_stall(cluster):
        tried = set(cluster.workers)
    checked = {name for name in tried if any(router.checks(name) for router in routers)}
    busy = [worker.plan.name for worker in cluster.present if not worker.idle and worker.plan.name not in checked]
    busy += [router.node.name for router in routers if router.coordinator.num_live or router.stopping]
    busy += not_settled(cluster) + _not_told_of_verdicts(cluster)
    return busy + [router.node.name + " links" for router in routers if not _joined(cluster, router)]


def _not_told_of_verdicts(cluster: Cluster) -> list[str]:
    """Returns who has not heard of all verdicts that anybody knows of."""
    if cluster.network.cut_for_ever or not cluster.present_routers:
        return []  # some hear of none
    heard = {router.node.name: router.coordinator.verdicts.num_of for router in cluster.present_routers}
    heard |= {worker.plan.name: worker.host.verdicts.num_of for worker in cluster.present}
    known = Verdicts()
    for num_of in heard.values():
        known.merge(num_of)
    return [f"{name} verdicts" for name, num_of in heard.items() if num_of != known.num_of]


def _joined(cluster: Cluster, router: SimRouter) -> bool:
    """Returns whether every worker in reach was found again, with no manual step, and none out of reach is taken for
    ready."""
    ready = {
        worker.info.worker_id: worker.info.incarnation
        for worker in router.coordinator.workers.all()
        if worker.has_session
    }
    return ready == {worker.plan.name: worker.host.incarnation for worker in cluster.within_reach(router)}
