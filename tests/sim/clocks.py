"""Waits, measured from outside: in the world's time, and never by the clocks of the code under test.

Owns: since when a session has been silent, a sealed lease unwanted, an announced block uncopied, a handoff unanswered
or orphaned, and the bound of each, which is the configured limit and some slack. Never: tables (`invariants`).
"""

from __future__ import annotations

from collections.abc import Hashable

from services.kv.lease import Lease, LeaseState
from services.router import policy
from services.router.coordinator.request import PlacedPark
from tests.sim.cluster import Cluster
from tests.sim.node import Node
from tests.sim.router import SimRouter
from tests.sim.rpc_server import Call
from tests.sim.worker import SimWorker
from tests.sim.world import World

_EVERY_S = 0.2
_STARTS_S = 1.0
"""Where nobody works, what could be served has begun by then."""
SLACK_S = 1.0
"""A timer that rings, a tick, the pause between two looks."""


class Clocks:
    """Looks at every node that runs, at intervals."""

    def __init__(self, world: World, cluster: Cluster) -> None:
        self._world = world
        self._cluster = cluster
        self._since: dict[Hashable, float] = {}
        """When each wait that is under way was first seen; of a silence, how long its node had been held up by then."""
        self._seen: set[Hashable] = set()
        world.after(_EVERY_S, self._look)

    def _look(self) -> None:
        self._seen = set()
        for worker in self._cluster.workers.values():
            if worker.node.running:
                self._look_at_worker(worker)
        for router in self._cluster.routers.values():
            if router.node.running:
                self._look_at_router(router)
        self._since = {what: since_s for what, since_s in self._since.items() if what in self._seen}
        self._world.after(_EVERY_S, self._look)

    def _bound(self, node: Node, what: Hashable, limit_s: float, why: str) -> None:
        """Notes that `what` waits now. While its node was stopped nothing could end it."""
        self._seen.add(what)
        since_s = self._since[what] = max(self._since.get(what, self._world.now_s), node.thawed_s)
        waited_s = self._world.now_s - since_s
        self._world.require(waited_s <= limit_s + SLACK_S, f"{node.name}: {why} for {waited_s:.1f} s")

    # Workers

    def _look_at_worker(self, worker: SimWorker) -> None:
        config, node = worker.plan.config, worker.node
        self._look_at_sessions(node, config.silence_s, "a session with a silent router is kept")
        held = self._held(node)
        for lease in worker.host.leases:
            if lease.state is LeaseState.SEALED and lease.fetch is None and lease.lease_id not in held:
                # A new leg's fetch starts it again, and may come and go between two looks.
                what = (lease.lease_id, lease.leg, "ttl")
                self._bound(node, what, config.lease_ttl_s, "a lease that nobody wants is kept")
            fetch = lease.fetch
            if fetch is not None and fetch.copied < fetch.announced and not fetch.sending:
                # A send that is under way when the stall clock is over starts it anew.
                self._bound(node, (fetch, fetch.copied), 2 * config.stall_s, "an announced block is not copied")

    def ended(self, worker: SimWorker, lease: Lease) -> None:
        """A lease has left its table: not by expiry if a router wanted it."""
        if lease.state is LeaseState.EXPIRED:
            wanted = lease.lease_id in self._held(worker.node)
            self._world.require(not wanted, f"{worker.plan.name}: a lease expires that its router holds")

    def _held(self, node: Node) -> frozenset[bytes]:
        return frozenset().union(*(call.held_leases for call in node.sessions if isinstance(call, Call)))

    def _look_at_sessions(self, node: Node, limit_s: float, why: str) -> None:
        for session in node.sessions:
            heard_s = max(session.heard_s, node.thawed_s)
            what = (node, session, heard_s)
            self._seen.add(what)
            held_up_s = self._since.setdefault(what, node.loop.actor.held_up_s)
            # Whose callbacks take long cannot end a session between two of them.
            silent_s = self._world.now_s - heard_s - (node.loop.actor.held_up_s - held_up_s)
            self._world.require(silent_s <= limit_s + SLACK_S, f"{node.name}: {why}: {silent_s:.1f} s")

    # Routers

    def _look_at_router(self, router: SimRouter) -> None:
        node, config = router.node, router.config
        self._look_at_sessions(node, router.times.silence_s, "a session with a silent worker is kept")
        book = router.book
        views = [view for view in book.workers.views() if view.ready]
        if all(view.idle for view in views):
            for request in book.queue:
                job = request.next_job()
                if router.node.now() >= request.setbacks.not_before_s and any(
                    policy.can_decode(job, view) for view in views
                ):
                    self._bound(node, (router, request.key), _STARTS_S, "a request waits beside idle workers")
        for request in book.requests.values():
            self._look_at_park(router, request.park)
            leg = request.decode
            if leg is None or not leg.has_handoff:
                continue
            if leg.admitted_s is None:
                self._bound(node, (router, leg.leg, "answer"), config.answer_timeout_s, "a handoff is not answered")
            if leg.orphaned_s is not None:
                self._bound(node, (router, leg.leg, "orphan"), config.orphan_timeout_s, "an orphaned leg is kept")

    def _look_at_park(self, router: SimRouter, leg: PlacedPark | None) -> None:
        if leg is None:
            return
        node, config = router.node, router.config
        if leg.admitted_s is None:
            self._bound(node, (router, leg.leg, "answer"), config.answer_timeout_s, "a store does not answer")
        if leg.orphaned_s is not None:
            self._bound(node, (router, leg.leg, "orphan"), config.orphan_timeout_s, "an orphaned leg is kept")
