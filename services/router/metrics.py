"""Exposes the router's Prometheus metrics: its registry, its endpoint, and the newest copy of the cluster's state."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client import Counter
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.router.config import RouterConfig
from services.router.coordinator import Coordinator
from services.router.coordinator.requests import Phase
from services.router.coordinator.workers import Worker, WorkerState
from services.router.health import Health
from services.router.policy import Role
from services.router.request_metrics import RequestMetrics
from services.rpc import names
from services.rpc.metrics import Aliases, MetricsServer, new_registry

_WHERE = ("action", "event", "placement", "tick")


class RouterMetrics:
    """The registry of one router, and its endpoint unless the port is -1."""

    def __init__(self, config: RouterConfig, model_id: str, *, instance: str) -> None:
        self.registry = registry = new_registry("baton-router", instance)
        self.requests = RequestMetrics(
            registry, model_id, slo_ttft_s=config.slo_ttft_ms / 1000, slo_e2e_s=config.slo_e2e_ms / 1000
        )
        self._cluster = _ClusterCollector(config.max_queue, model_id)
        registry.register(self._cluster)
        self._internal_errors = Counter(
            names.Metric.INTERNAL_ERRORS,
            names.INTERNAL_ERRORS_TEXT,
            ["where"],
            registry=registry,
        )
        for where in _WHERE:
            self._internal_errors.labels(where)
        Aliases(registry, names.VLLM_ALIASES, {"model_name": model_id})
        self._server = MetricsServer(registry, config.host, config.metrics_port) if config.metrics_port >= 0 else None

    @property
    def port(self) -> int:
        """Returns the port that was bound; 0 without an endpoint."""
        return self._server.port if self._server is not None else 0

    def internal_error(self, where: str) -> None:
        """Counts an internal error. `where` is one of `_WHERE`."""
        self._internal_errors.labels(where).inc()

    def observe(self, coordinator: Coordinator) -> None:
        """Copies the cluster's state for the next scrape. Called several times a second, on the event loop."""
        workers = coordinator.workers()
        self._cluster.now = _Cluster(
            ready=coordinator.ready,
            phases=coordinator.phases(),
            states=Tally((worker.info.roles, worker.state) for worker in workers),
            healths=Tally((worker.info.roles, worker.health.state) for worker in workers),
            kv_usage=_kv_usage(workers),
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


@dataclass(frozen=True)
class _Cluster:
    """The cluster's state at one moment."""

    ready: bool = False
    phases: Tally[Phase] = field(default_factory=Tally)
    states: Tally[tuple[Role, WorkerState]] = field(default_factory=Tally)
    healths: Tally[tuple[Role, Health]] = field(default_factory=Tally)
    kv_usage: float = 0.0
    """Share of the blocks of all pools together that cannot be evicted."""


class _ClusterCollector(Collector):
    """Exposes the newest copy of the cluster's state.

    Scrapes run on another thread: they read whole copies, never the coordinator.
    """

    def __init__(self, max_queue: int, model_id: str) -> None:
        self.now = _Cluster()
        self._max_queue = max_queue
        self._model_id = model_id

    def collect(self) -> Iterator[Metric]:
        now, name = self.now, names.Metric
        live = GaugeMetricFamily(name.REQUESTS_LIVE, "Live requests by phase", labels=["phase"])
        for phase in Phase:
            if phase is not Phase.FINISHED:
                live.add_metric([phase.value], now.phases[phase])
        yield live
        yield GaugeMetricFamily(name.QUEUE_LIMIT, "Requests that may be queued", value=self._max_queue)
        yield GaugeMetricFamily(name.READY, "1 if a request would find a worker, else 0", value=float(now.ready))
        states = GaugeMetricFamily(name.WORKERS, "Workers by role and state", labels=["role", "state"])
        healths = GaugeMetricFamily(name.WORKERS_HEALTH, "Workers by role and health", labels=["role", "health"])
        for role in (Role.PREFILL, Role.DECODE, Role.MIXED):
            for state in WorkerState:
                states.add_metric([role.label, state.value], now.states[role, state])
            for health in Health:
                healths.add_metric([role.label, health.value], now.healths[role, health])
        yield from (states, healths)
        yield from self._for_pickers(now)

    def _for_pickers(self, now: _Cluster) -> Iterator[Metric]:
        """Yields the cluster's figures as if it were one vLLM server, for a picker that chooses among routers."""
        waiting = now.phases[Phase.QUEUED]
        figures = (
            (names.VllmMetric.WAITING, "Requests that wait for a worker", waiting),
            (names.VllmMetric.RUNNING, "Requests at a worker", now.phases.total() - waiting),
            (names.VllmMetric.KV_USAGE, "Share of all workers' KV blocks that cannot be evicted", now.kv_usage),
            (names.VllmMetric.KV_USAGE_OLD, "Share of all workers' KV blocks that cannot be evicted", now.kv_usage),
        )
        for metric, text, value in figures:
            family = GaugeMetricFamily(metric, text, labels=["model_name"])
            family.add_metric([self._model_id], value)
            yield family


def _kv_usage(workers: list[Worker]) -> float:
    known = [(worker.info.num_blocks, worker.load) for worker in workers if worker.load is not None]
    used = sum(load.blocks_importing + load.blocks_leased + load.blocks_active for _, load in known)
    total = sum(num_blocks for num_blocks, _ in known)
    return used / total if total else 0.0
