"""A worker's Prometheus metrics: figures read when they are scraped.

Never: counts anything the engine already counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from services.rpc import names
from services.rpc.metrics import Aliases, MetricsServer, new_registry
from services.worker.host import WorkerHost, role_name


class WorkerMetrics:
    """The registry of one worker, and its endpoint unless the port is -1."""

    def __init__(self, host: WorkerHost) -> None:
        self.registry = new_registry(f"baton-{role_name(host.role)}", host.worker_id)
        self.registry.register(_EngineCollector(host))
        Aliases(self.registry, names.VLLM_ALIASES, {"model_name": host.engine.info.model_id})
        config = host.config
        self._server = (
            MetricsServer(self.registry, config.host, config.metrics_port) if config.metrics_port >= 0 else None
        )

    @property
    def port(self) -> int:
        return self._server.port if self._server is not None else 0

    def close(self) -> None:
        if self._server is not None:
            self._server.close()


class _EngineCollector(Collector):
    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def describe(self) -> Iterator[Metric]:
        """By name, so that aliases find them."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        host, stats, name = self._host, self._host.engine.stats(), names.Metric
        blocks = GaugeMetricFamily(name.BLOCKS, "KV blocks by ledger class", labels=["class"])
        for field in ("importing", "leased", "active", "cached", "free"):
            blocks.add_metric([field], getattr(stats.ledger, field))
        yield blocks
        used = stats.ledger.importing + stats.ledger.leased + stats.ledger.active
        gauges: list[tuple[str, str, float]] = [
            (name.KV_USAGE, "Share of KV blocks that cannot be evicted", used / stats.ledger.total),
            (name.SEQUENCES_RUNNING, "Sequences that take part in steps", stats.num_running),
            (name.SEQUENCES_WAITING, "Sequences waiting for admission", stats.num_waiting),
            (name.QUEUED_PREFILL_TOKENS, "Prompt tokens not yet computed", stats.queued_prefill_tokens),
            (name.SESSIONS, "Open sessions with routers", host.num_sessions),
            (name.LEASES, "Leases open or sealed", len(host.leases)),
            (name.IMPORTS, "Imports that are not ready", len(host.imports)),
            (name.MS_PER_PREFILL_TOKEN, "Measured cost of a prompt token, ms", stats.ms_per_prefill_token),
            (name.MS_PER_DECODE_STEP, "Measured cost of a decode step, ms", stats.ms_per_decode_step),
        ]
        for gauge, text, value in gauges:
            yield GaugeMetricFamily(gauge, text, value=value)
        counters: list[tuple[str, str, float]] = [
            (name.STEPS, "Engine steps", stats.num_steps),
            (name.STEP_SECONDS, "Time in device steps, seconds", stats.step_seconds),
            (name.STEP_TOKENS, "Tokens run in steps", stats.step_tokens),
            (name.STEPS_FAILED, "Steps that raised", stats.num_failed_steps),
            (name.PREEMPTIONS, "Sequences whose blocks were taken for others", stats.num_preemptions),
            (name.PREFIX_TOKENS_QUERIED, "Prompt tokens looked up in the prefix cache", stats.prefix_tokens_queried),
            (name.PREFIX_TOKENS_HIT, "Prompt tokens found in the prefix cache", stats.prefix_tokens_hit),
        ]
        for counter, text, value in counters:
            yield CounterMetricFamily(counter, text, value=value)
        yield from self._transfer()

    def _transfer(self) -> Iterator[Metric]:
        tally, name = self._host.tally, names.Metric
        ended = CounterMetricFamily(name.LEASES_ENDED, "Leases by how they ended", labels=["reason"])
        for reason, count in sorted(tally.leases_ended.items()):
            ended.add_metric([reason], count)
        yield ended
        transferred = CounterMetricFamily(name.TRANSFER_BYTES, "KV bytes imported", labels=["transport"])
        exposed = CounterMetricFamily(
            name.TRANSFER_EXPOSED_SECONDS, "Transfer time not hidden by prefill, seconds", labels=["transport"]
        )
        imports = CounterMetricFamily(name.IMPORTS_DONE, "Imports that became ready", labels=["transport"])
        for transport in sorted(tally.imports):
            imports.add_metric([transport], tally.imports[transport])
            transferred.add_metric([transport], tally.transfer_bytes[transport])
            exposed.add_metric([transport], tally.exposed_s[transport])
        yield from (imports, transferred, exposed)
        yield CounterMetricFamily(name.IMPORTS_FAILED, "Imports given up", value=tally.imports_failed)
