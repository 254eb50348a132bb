"""Exposes the router's Prometheus metrics: its registry, its endpoint, and the newest copy of the cluster's state."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client import Counter, Gauge
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.router.config import RouterConfig
from services.router.coordinator import Coordinator
from services.router.coordinator.request import Phase
from services.router.coordinator.workers import Worker, WorkerState
from services.router.policy import Role
from services.router.policy.health import Health
from services.router.telemetry.request_metrics import RequestMetrics
from services.router.telemetry.usage import UsageMetrics
from services.rpc import names
from services.rpc.certificates import Certificates
from services.rpc.prometheus import Aliases, MetricsServer, new_registry, tell_expiry

_WHERE = ("action", "event", "placement", "session", "tick")


class RouterMetrics:
    """Keeps the registry of one router, and its endpoint unless the port is -1."""

    def __init__(
        self,
        config: RouterConfig,
        *,
        instance: str,
        certificates: Certificates | None = None,
        public_certificates: Certificates | None = None,
    ) -> None:
        self.registry = registry = new_registry("baton-router", instance)
        tell_expiry(registry, {"cluster": certificates, "public": public_certificates})
        self.requests = RequestMetrics(
            registry, slo_ttft_s=config.slo_ttft_ms / 1000, slo_e2e_s=config.slo_e2e_ms / 1000
        )
        self.usage = UsageMetrics(registry) if config.tenants else None
        """What tenants use; without tenants there is nobody to count for."""
        self.usage_dropped = (
            Counter(names.Metric.USAGE_DROPPED, "Requests that the usage log could not take", registry=registry)
            if config.usage_log
            else None
        )
        self.limit_store_up = (
            Gauge(names.Metric.LIMIT_STORE_UP, "1 if the store of tenants' limits answers, else 0", registry=registry)
            if config.tenants and config.tenants_store
            else None
        )
        self.logged_dropped = (
            Counter(names.Metric.REQUEST_LOG_DROPPED, "Requests that the request log could not take", registry=registry)
            if config.request_log
            else None
        )
        self._clusters = _ClusterCollector(config.max_queue)
        registry.register(self._clusters)
        self._internal_errors = Counter(
            names.Metric.INTERNAL_ERRORS,
            names.INTERNAL_ERRORS_TEXT,
            ["where"],
            registry=registry,
        )
        for where in _WHERE:
            self._internal_errors.labels(where)
        Aliases(registry, names.VLLM_ALIASES, renamed=dict.fromkeys(("model", "gen_ai_request_model"), "model_name"))
        self._server = MetricsServer(registry, config.host, config.metrics_port) if config.metrics_port >= 0 else None

    @property
    def port(self) -> int:
        """Returns the port that was bound; 0 without an endpoint."""
        return self._server.port if self._server is not None else 0

    def of(self, model_id: str) -> ConductorMetrics:
        """Returns what the conductor of one model reports to."""
        return ConductorMetrics(self, model_id)

    def forget(self, model_id: str) -> None:
        """Removes a model's series."""
        self.requests.forget(model_id)
        if self.usage is not None:
            self.usage.forget(model_id)
        self._clusters.forget(model_id)

    def internal_error(self, where: str) -> None:
        """Counts an internal error. `where` is one of `_WHERE`."""
        self._internal_errors.labels(where).inc()

    def observe(self, model_id: str, coordinator: Coordinator) -> None:
        """Copies the state of a model's cluster for the next scrape. Called several times a second, on the event
        loop."""
        workers = coordinator.workers.all()
        self._clusters.put(
            model_id,
            _Cluster(
                ready=coordinator.ready,
                phases=coordinator.phases(),
                states=Tally((worker.info.roles, worker.state) for worker in workers),
                healths=Tally((worker.info.roles, worker.health.state) for worker in workers),
                ejected=Tally(worker.info.roles for worker in workers if worker.has_session and worker.ejection),
                kv_usage=_kv_usage(workers),
            ),
        )

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class ConductorMetrics:
    """Counts what happens to one model's requests and workers."""

    def __init__(self, router: RouterMetrics, model_id: str) -> None:
        self.requests = router.requests.of(model_id)
        self.internal_error = router.internal_error
        self._router = router
        self._model_id = model_id

    def observe(self, coordinator: Coordinator) -> None:
        self._router.observe(self._model_id, coordinator)


@dataclass(frozen=True)
class _Cluster:
    """Holds the cluster's state at one moment."""

    ready: bool = False
    phases: Tally[Phase] = field(default_factory=Tally)
    states: Tally[tuple[Role, WorkerState]] = field(default_factory=Tally)
    healths: Tally[tuple[Role, Health]] = field(default_factory=Tally)
    ejected: Tally[Role] = field(default_factory=Tally)
    kv_usage: float = 0.0
    """Share of the blocks of all pools together that cannot be evicted."""


class _ClusterCollector(Collector):
    """Exposes the newest copy of the state of each model's cluster.

    Scrapes run on another thread: they read whole copies, never a coordinator.
    """

    def __init__(self, max_queue: int) -> None:
        self._clusters: Mapping[str, _Cluster] = {}
        """What the newest ticks have seen, by model id. The mapping is replaced, never changed."""
        self._max_queue = max_queue

    def put(self, model_id: str, cluster: _Cluster) -> None:
        self._clusters = {**self._clusters, model_id: cluster}

    def forget(self, model_id: str) -> None:
        self._clusters = {each: cluster for each, cluster in self._clusters.items() if each != model_id}

    def collect(self) -> Iterator[Metric]:
        clusters, name = self._clusters, names.Metric
        ready = any(cluster.ready for cluster in clusters.values())
        yield GaugeMetricFamily(name.QUEUE_LIMIT, "Requests of one model that may be queued", value=self._max_queue)
        yield GaugeMetricFamily(
            name.READY, "1 if a request for some model would find a worker, else 0", value=float(ready)
        )
        served = GaugeMetricFamily(
            name.MODEL_READY, "1 if a request for the model would find a worker, else 0", labels=["model"]
        )
        live = GaugeMetricFamily(name.REQUESTS_LIVE, "Live requests by phase", labels=["model", "phase"])
        states = GaugeMetricFamily(name.WORKERS, "Workers by role and state", labels=["model", "role", "state"])
        healths = GaugeMetricFamily(
            name.WORKERS_HEALTH, "Workers by role and health", labels=["model", "role", "health"]
        )
        ejected = GaugeMetricFamily(
            name.WORKERS_EJECTED, "Workers ejected since they are slower than their peers", labels=["model", "role"]
        )
        for model_id, now in clusters.items():
            served.add_metric([model_id], float(now.ready))
            for phase in Phase:
                if phase is not Phase.FINISHED:
                    live.add_metric([model_id, phase.value], now.phases[phase])
            for role in (Role.PREFILL, Role.DECODE, Role.MIXED, Role.STORE):
                for state in WorkerState:
                    states.add_metric([model_id, role.label, state.value], now.states[role, state])
                ejected.add_metric([model_id, role.label], now.ejected[role])
                for health in Health:
                    healths.add_metric([model_id, role.label, health.value], now.healths[role, health])
        yield from (served, live, states, healths, ejected)
        yield from _for_pickers(clusters)


def _for_pickers(clusters: Mapping[str, _Cluster]) -> Iterator[Metric]:
    """Yields each model's figures as if it were one vLLM server, for a picker that chooses among routers."""
    text = "Share of all workers' KV blocks that cannot be evicted"
    families = {
        metric: GaugeMetricFamily(metric, about, labels=["model_name"])
        for metric, about in (
            (names.VllmMetric.WAITING, "Requests that wait for a worker"),
            (names.VllmMetric.RUNNING, "Requests at a worker"),
            (names.VllmMetric.KV_USAGE, text),
            (names.VllmMetric.KV_USAGE_OLD, text),
        )
    }
    for model_id, now in clusters.items():
        waiting = now.phases[Phase.QUEUED]
        families[names.VllmMetric.WAITING].add_metric([model_id], waiting)
        families[names.VllmMetric.RUNNING].add_metric([model_id], now.phases.total() - waiting)
        families[names.VllmMetric.KV_USAGE].add_metric([model_id], now.kv_usage)
        families[names.VllmMetric.KV_USAGE_OLD].add_metric([model_id], now.kv_usage)
    yield from families.values()


def _kv_usage(workers: list[Worker]) -> float:
    known = [(worker.info.num_blocks, worker.load) for worker in workers if worker.load is not None]
    used = sum(load.blocks_importing + load.blocks_leased + load.blocks_active for _, load in known)
    total = sum(num_blocks for num_blocks, _ in known)
    return used / total if total else 0.0
