"""Has a worker compute wrong from some moment on, in the clusters that `scenario.computes_wrong` names.

It is damaged once every router has its right answer to a canary, and mended some time after all have found it. Then its
caches, and those of all others, still hold what it has computed, and routers and workers may be started anew.
"""

from __future__ import annotations

from baton.v1 import types_pb2
from services.router.policy import Split
from tests.sim.cluster import Cluster
from tests.sim.engine import SimEngine
from tests.sim.network import FOR_EVER_S
from tests.sim.scenario import Load, computes_wrong, crowd, split_of
from tests.sim.worker import SimWorker
from tests.sim.world import World

_LOOKS_EVERY_S = 0.25
_CHECK_LOOKS_EVERY_S = 0.01
_HEARD_S = 1.5
"""After so long all workers have heard of a verdict."""


class WrongWorkers:
    def __init__(self, world: World, cluster: Cluster, load: Load) -> None:
        self._world = world
        self._cluster = cluster
        self._load = load
        self._over = not computes_wrong(world.seed)

    def plan(self) -> None:
        if not self._over:
            self._world.at(self._world.random.uniform(0.3, 2.0), self._damage)

    def disarm(self) -> None:
        """Damages no worker any more. A damaged one is started anew: to a router that has not seen it before, and knows
        no other that computes the same, it may be wrong still."""
        self._over = True
        wrong = self._cluster.wrong_worker
        if wrong is not None and self._cluster.workers[wrong.plan.name] is wrong and wrong.node.running:
            self._cluster.restart(wrong.plan.name)

    def _damage(self) -> None:
        fit = [worker for worker in self._cluster.present if self._has_answered_all(worker)]
        if self._over or not fit:
            if not self._over:
                self._world.after(_LOOKS_EVERY_S, self._damage)
            return
        # What the only one that prefills has computed is everything, and what one that does not is nowhere else.
        one_of_several = [worker for worker in fit if _prefills(worker) and self._others_prefill_beside(worker)]
        if split_of(self._world.seed) is not Split.ALWAYS:
            one_of_several = []  # whoever decodes computes everything, or much
        wrong = self._cluster.wrong_worker = self._world.random.choice(one_of_several or fit)
        self._world.note("computes wrong", wrong.plan.name)
        assert isinstance(wrong.engine, SimEngine)
        wrong.engine.is_wrong = True
        # It is nobody's fault what is refused from now on: the only worker of a kind may be out of use.
        for name in self._cluster.workers:
            self._cluster.record.disturb(self._world.now_s, FOR_EVER_S, name)
        self._submit_crowd("c")
        if self._world.chance(0.3):
            self._hear_late(wrong)
        self._world.after(_LOOKS_EVERY_S, lambda: self._look(wrong))
        self._await_check(wrong)

    def _await_check(self, wrong: SimWorker) -> None:
        """Has a second crowd come when the worker is asked what it will answer wrong."""
        if any(router.checks(wrong.plan.name) for router in self._cluster.present_routers):
            self._submit_crowd("d")
        elif not self._over:
            self._world.after(_CHECK_LOOKS_EVERY_S, lambda: self._await_check(wrong))

    def _submit_crowd(self, name: str) -> None:
        for request in crowd(self._world, self._cluster, self._load, name):
            self._cluster.submit(request)

    def _others_prefill_beside(self, worker: SimWorker) -> bool:
        others = (other for other in self._cluster.present if other is not worker and _prefills(other))
        return any(other.plan.weights == worker.plan.weights for other in others)

    def _hear_late(self, wrong: SimWorker) -> None:
        """Has routers hear of what it has computed from those first that have taken it over."""
        for router in self._cluster.routers:
            self._cluster.network.delay(wrong.plan.name, router, self._world.random.choice((0.03, 0.3)))

    def _has_answered_all(self, worker: SimWorker) -> bool:
        """Returns whether each router has an answer of this process, and knows it for right."""
        if worker.plan.is_store or not worker.node.running:
            return False
        known = [router.coordinator._canaries._answers._tallies.values() for router in self._cluster.present_routers]
        votes = [[vote for tally in tallies if (vote := tally.votes.get(worker.plan.name))] for tallies in known]
        judged = [any(vote.incarnation == worker.host.incarnation for vote in found) for found in votes]
        return bool(judged) and all(judged)  # at moments there is no router

    def _look(self, wrong: SimWorker) -> None:
        if self._over or not self._cluster.present_routers:
            return
        found = [
            wrong.host.incarnation in router.coordinator.verdicts.num_of for router in self._cluster.present_routers
        ]
        if not found or not all(found):  # at moments there is no router
            self._world.after(_LOOKS_EVERY_S, lambda: self._look(wrong))
            return
        self._world.after(_HEARD_S, lambda: self._mend(wrong))
        if self._world.chance(0.5):
            name = self._world.random.choice([router.node.name for router in self._cluster.present_routers])
            self._world.after(_HEARD_S, lambda: self._cluster.restart(name))

    def _mend(self, wrong: SimWorker) -> None:
        assert isinstance(wrong.engine, SimEngine)
        if wrong.engine.is_wrong:
            self._world.note("mended", wrong.plan.name)
        for router in self._cluster.routers:
            self._cluster.network.delay(wrong.plan.name, router, 0.0)
        wrong.engine.is_wrong = False


def _prefills(worker: SimWorker) -> bool:
    return types_pb2.WORKER_ROLE_PREFILL in worker.plan.phases
