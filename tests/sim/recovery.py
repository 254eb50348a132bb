"""Computes when a cluster must have got over a fault that never ends."""

from __future__ import annotations

from services.router.coordinator.config import CoordinatorConfig
from tests.sim.cluster import Cluster
from tests.sim.network import SERVER_NOTICES_S


def recovery_s(cluster: Cluster) -> float:
    """Returns the time after a fault that never ends in which every process that is left has noticed, whoever waited
    for what is gone has given up, and what was held for it is free."""
    silence_s = max(
        worker.plan.config.silence_s + worker.plan.config.heartbeat_s for worker in cluster.workers.values()
    )
    ttl_s = max(worker.plan.config.lease_ttl_s for worker in cluster.workers.values())
    stall_s = max(worker.plan.config.stall_s for worker in cluster.workers.values())
    noticed_s = max(silence_s, SERVER_NOTICES_S, *(router.times.silence_s for router in cluster.routers.values()))
    return noticed_s + max(ttl_s, stall_s, *(_answers_s(router.config) for router in cluster.routers.values()))


def _answers_s(config: CoordinatorConfig) -> float:
    return max(config.answer_timeout_s, config.orphan_timeout_s)
