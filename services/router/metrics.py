"""The router's Prometheus metrics: requests counted as they end, and the newest copy of what is going on."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterator

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.router.coordinator import Coordinator
from services.router.coordinator.actions import Summary
from services.router.coordinator.requests import Phase
from services.rpc import names
from services.rpc.metrics import (
    DURATION_BUCKETS,
    PER_TOKEN_BUCKETS,
    TTFT_BUCKETS,
    Aliases,
    MetricsServer,
    new_registry,
)

_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")


class RouterMetrics:
    """The registry of one router, and its endpoint unless the port is -1."""

    def __init__(self, *, model_id: str, instance: str, host: str, port: int) -> None:
        name, registry = names.Metric, new_registry("baton-router", instance)
        self.registry = registry
        self._labels = ("generate", "baton", model_id)

        def histogram(metric: str, help_: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(metric, help_, _LABELS, registry=registry, buckets=buckets).labels(*self._labels)

        self._duration = histogram(name.REQUEST_DURATION, "From arrival to the end, seconds", DURATION_BUCKETS)
        self._ttft = histogram(name.TIME_TO_FIRST_TOKEN, "From arrival to the first token, seconds", TTFT_BUCKETS)
        self._per_token = histogram(
            name.TIME_PER_OUTPUT_TOKEN, "Mean per token after the first, seconds", PER_TOKEN_BUCKETS
        )
        self._requests = Counter(name.REQUESTS, "Requests ended, by outcome", ["outcome"], registry=registry)
        self._prompt_tokens = Counter(name.PROMPT_TOKENS, "Prompt tokens of finished requests", registry=registry)
        self._output_tokens = Counter(name.OUTPUT_TOKENS, "Output tokens of finished requests", registry=registry)
        self._queue = Histogram(
            name.QUEUE_SECONDS, "Wait for a placement, seconds", registry=registry, buckets=TTFT_BUCKETS
        )
        self._retries = Counter(name.RETRIES, "Times a request was placed again", registry=registry)
        self._cluster = _ClusterCollector()
        registry.register(self._cluster)
        Aliases(registry, names.VLLM_ALIASES, {"model_name": model_id})
        self._server = MetricsServer(registry, host, port) if port >= 0 else None

    @property
    def port(self) -> int:
        """As bound; 0 without an endpoint."""
        return self._server.port if self._server is not None else 0

    def finished(self, summary: Summary, *, num_prompt_tokens: int, num_output_tokens: int, outcome: str) -> None:
        self._requests.labels(outcome).inc()
        self._prompt_tokens.inc(num_prompt_tokens)
        self._output_tokens.inc(num_output_tokens)
        self._retries.inc(summary.num_retries)
        self._queue.observe(summary.queue_s)
        self._duration.observe(summary.total_s)
        if summary.ttft_s is not None:
            self._ttft.observe(summary.ttft_s)
            if summary.num_output_tokens > 1:
                self._per_token.observe((summary.total_s - summary.ttft_s) / (summary.num_output_tokens - 1))

    def failed(self, outcome: str) -> None:
        self._requests.labels(outcome).inc()

    def observe(self, coordinator: Coordinator) -> None:
        """Takes a copy of what is going on now; a few times a second, on the event loop."""
        self._cluster.phases = coordinator.phases()
        self._cluster.workers = Tally((worker.info.role.value, worker.state.value) for worker in coordinator.workers())

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _ClusterCollector(Collector):
    """Scrapes come on another thread: they see whole copies, never the coordinator."""

    def __init__(self) -> None:
        self.phases: Tally[Phase] = Tally()
        self.workers: Tally[tuple[str, str]] = Tally()

    def describe(self) -> Iterator[Metric]:
        """Nothing: the figures exist only when they are collected."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        live = GaugeMetricFamily(names.Metric.REQUESTS_LIVE, "Live requests by phase", labels=["phase"])
        for phase in Phase:
            if phase is not Phase.FINISHED:
                live.add_metric([phase.value], self.phases[phase])
        yield live
        workers = GaugeMetricFamily(names.Metric.WORKERS, "Workers by role and state", labels=["role", "state"])
        for labels, count in self.workers.items():
            workers.add_metric(list(labels), count)
        yield workers
