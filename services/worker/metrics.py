"""Exposes a worker's Prometheus metrics; the figures are read when they are scraped.

Never: counts anything that the engine already counts.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from baton.v1 import types_pb2
from services.core.clock import Clock
from services.core.errors import CorruptBlock, LayoutMismatch, LeaseInvalid, ProtocolViolation, TransferFailed
from services.engine.step_tally import Buckets
from services.kv.lease import LeaseState
from services.rpc import names
from services.rpc.plain import enum_word
from services.rpc.prometheus import Aliases, MetricsServer, new_registry, tell_expiry
from services.worker.config import PeerConfig
from services.worker.host import WorkerHost
from services.worker.tiers import WorkerTiers

_TRANSPORTS = [enum_word(types_pb2.Transport.DESCRIPTOR, value) for value in types_pb2.Transport.values()[1:]]
_TRANSFER_ERRORS = [
    error.reason.lower() for error in (TransferFailed, LeaseInvalid, LayoutMismatch, CorruptBlock, ProtocolViolation)
]
_LEASE_ENDS = [LeaseState.RELEASED.value, LeaseState.EXPIRED.value, LeaseState.ABORTED.value]


class WorkerMetrics:
    """Has the registry of one worker, and its endpoint unless the port is -1. It answers at once; what is known of the
    host is added by `watch`."""

    def __init__(self, config: PeerConfig, role: str) -> None:
        """`config` has a worker's name, and `role` is that of `role_name`."""
        self.registry = new_registry(f"baton-{role}", config.worker_id)
        self._server = (
            MetricsServer(self.registry, config.host, config.metrics_port) if config.metrics_port >= 0 else None
        )

    def watch(self, host: WorkerHost, clock: Clock | None = None) -> None:
        """Adds what a host does. `clock` measures the time for the worker's cost; by default it is the host's."""
        tell_expiry(self.registry, {"cluster": host.machine.certificates})
        self.registry.register(_EngineCollector(host))
        self.registry.register(_TransferCollector(host))
        if host.tiers is not None:
            self.registry.register(_TierCollector(host.tiers))
        self.registry.register(_CostAndDeviceCollector(host, clock or host.clock))
        Aliases(self.registry, names.VLLM_ALIASES, {"model_name": host.engine.info.model_id})

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
        """Returns the metrics with their names, so that Aliases finds them by name."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        engine, stats, name = self._host.engine, self._host.engine.stats(), names.Metric
        blocks = GaugeMetricFamily(name.BLOCKS, "KV blocks by ledger class", labels=["class"])
        for field in ("importing", "leased", "active", "cached", "free"):
            blocks.add_metric([field], getattr(stats.ledger, field))
        yield blocks
        used = stats.ledger.importing + stats.ledger.leased + stats.ledger.active
        yield _gauge(name.KV_USAGE, "Share of KV blocks that cannot be evicted", used / stats.ledger.total)
        yield _gauge(name.SEQUENCES_RUNNING, "Sequences that take part in steps", stats.num_running)
        yield _gauge(name.SEQUENCES_WAITING, "Sequences waiting for admission", stats.num_waiting)
        yield _gauge(name.QUEUED_PREFILL_TOKENS, "Prompt tokens not yet computed", stats.queued_prefill_tokens)
        yield _gauge(name.PREFILL_TOKEN_SECONDS, "Measured cost of a prompt token", stats.ms_per_prefill_token / 1000)
        yield _gauge(name.DECODE_STEP_SECONDS, "Measured cost of a decode step", stats.ms_per_decode_step / 1000)
        yield _count(name.PREEMPTIONS, "Sequences whose blocks were taken for others", stats.num_preemptions)
        yield _count(
            name.PREFIX_TOKENS_QUERIED, "Prompt tokens looked up in the prefix cache", stats.prefix_tokens_queried
        )
        yield _count(name.PREFIX_TOKENS_HIT, "Prompt tokens found in the prefix cache", stats.prefix_tokens_hit)
        cache = {"block_size": str(engine.info.block_size), "num_gpu_blocks": str(engine.info.num_blocks)}
        yield InfoMetricFamily(
            names.VllmMetric.CACHE_CONFIG, "Size of the KV pool, whatever its device, for endpoint pickers", cache
        )
        yield from self._steps()

    def _steps(self) -> Iterator[Metric]:
        tally, name = self._host.engine.tally, names.Metric
        yield _count(name.STEPS, "Engine steps", tally.num_steps)
        yield _count(name.STEPS_FAILED, "Steps that raised", tally.num_failed)
        yield _count(name.STEP_SECONDS, "Time in device steps, seconds", tally.seconds)
        parts = CounterMetricFamily(name.STEP_PART_SECONDS, "Time in each part of steps, seconds", labels=["part"])
        for part, seconds in tally.part_seconds.items():
            parts.add_metric([part], seconds)
        yield parts
        tokens = CounterMetricFamily(name.STEP_TOKENS, "Tokens run in steps", labels=["kind"])
        tokens.add_metric(["prefill"], tally.prefill_tokens)
        tokens.add_metric(["decode"], tally.decode_tokens)
        yield tokens
        yield _count(name.SAMPLED_TOKENS, "Tokens sampled, those of failed requests included", tally.sampled_tokens)
        yield _histogram(name.BATCH_SIZE, "Sequences in a step", tally.batch_sizes)
        yield _histogram(name.STEP_DURATION_SECONDS, "Duration of steps, seconds", tally.durations)


class _TransferCollector(Collector):
    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def collect(self) -> Iterator[Metric]:
        host, tally, name = self._host, self._host.tally, names.Metric
        defects = CounterMetricFamily(name.INTERNAL_ERRORS, names.INTERNAL_ERRORS_TEXT, labels=["where"])
        defects.add_metric(["leg"], tally.internal_errors)
        yield defects
        yield _gauge(name.SESSIONS, "Open sessions with routers", host.num_sessions)
        yield _gauge(name.LEASES, "Leases open or sealed", len(host.leases))
        yield _gauge(name.IMPORTS, "Imports that are not ready", len(host.imports))
        ended = CounterMetricFamily(name.LEASES_ENDED, "Leases by how they ended", labels=["reason"])
        for reason in _LEASE_ENDS:
            ended.add_metric([reason], tally.leases_ended[reason])
        yield ended
        by_transport = (
            (name.IMPORTS_DONE, "Imports that became ready", tally.imports),
            (name.TRANSFER_BYTES, "KV bytes imported", tally.transfer_bytes),
            (name.TRANSFER_SECONDS, "Transfer time, from the first block to the release, seconds", tally.transfer_s),
            (name.TRANSFER_EXPOSED_SECONDS, "Transfer time not hidden by prefill, seconds", tally.exposed_s),
        )
        for metric, text, values in by_transport:
            family = CounterMetricFamily(metric, text, labels=["transport"])
            for transport in _TRANSPORTS:
                family.add_metric([transport], values.get(transport, 0))
            yield family
        yield _count(
            name.KV_BLOCKS_NOT_MOVED,
            "Blocks of handoffs that were in the prefix cache here, so that they were not moved",
            tally.blocks_not_moved,
        )
        yield _count(
            name.IMPORTS_FAILED, "Imports given up, those of cancelled requests included", tally.imports_failed
        )
        failed = CounterMetricFamily(name.TRANSFERS_FAILED, "Imports that failed, by the error", labels=["reason"])
        for reason in sorted({*_TRANSFER_ERRORS, *tally.transfers_failed}):
            failed.add_metric([reason], tally.transfers_failed[reason])
        yield failed
        yield from self._prefixes()

    def _prefixes(self) -> Iterator[Metric]:
        tally, name = self._host.tally, names.Metric
        brought = CounterMetricFamily(
            name.PREFIX_TOKENS_BROUGHT, "Prompt tokens whose KV came from elsewhere, by where it was", labels=["source"]
        )
        for source in sorted({"peer", *tally.prefix_tokens_brought}):
            brought.add_metric([source], tally.prefix_tokens_brought[source])
        yield brought
        failed = CounterMetricFamily(
            name.PREFIXES_FAILED,
            "Prefixes that could not be brought and were computed, by the error",
            labels=["reason"],
        )
        for reason in sorted({"overloaded", "transfer_failed", *tally.prefixes_failed}):
            failed.add_metric([reason], tally.prefixes_failed[reason])
        yield failed
        yield _count(
            name.PREFIX_TOKENS_LENT,
            "Tokens in the prefix cache that were lent to other workers",
            self._host.transfer.lender.tokens_lent,
        )


class _TierCollector(Collector):
    """Exposes what a worker's tiers do; a worker without tiers has none of these metrics."""

    def __init__(self, tiers: WorkerTiers) -> None:
        self._tiers = tiers

    def collect(self) -> Iterator[Metric]:
        name = names.Metric
        held = GaugeMetricFamily(name.KV_TIER_BYTES, "Bytes that a tier holds, of those that know", labels=["tier"])
        blocks = CounterMetricFamily(
            name.KV_TIER_BLOCKS,
            "Blocks that were read from a tier, written to it, or not taken because it was left out",
            labels=["tier", "outcome"],
        )
        seconds = CounterMetricFamily(name.KV_TIER_SECONDS, "Time in a tier's work, seconds", labels=["tier", "work"])
        failures = CounterMetricFamily(
            name.KV_TIER_FAILURES, "Times that a tier failed, was full or too slow", labels=["tier"]
        )
        left_out = GaugeMetricFamily(
            name.KV_TIER_LEFT_OUT, "1 while a tier is left out of this work after a failure", labels=["tier", "work"]
        )
        for use in self._tiers.stack.uses:
            tier = use.tier.name
            held.add_metric([tier], use.tier.num_bytes)
            blocks.add_metric([tier, "read"], use.blocks_read)
            blocks.add_metric([tier, "written"], use.blocks_written)
            blocks.add_metric([tier, "refused"], use.blocks_refused)
            seconds.add_metric([tier, "read"], use.read_s)
            seconds.add_metric([tier, "write"], use.write_s)
            failures.add_metric([tier], use.writing.num_failures)
            left_out.add_metric([tier, "read"], use.reading.why is not None)
            left_out.add_metric([tier, "write"], use.writing.why is not None)
        yield from (held, blocks, seconds, failures, left_out)
        yield _count(
            name.KV_BLOCKS_LOST, "Blocks that were evicted before a tier of this worker had them", self._tiers.num_lost
        )


class _CostAndDeviceCollector(Collector):
    def __init__(self, host: WorkerHost, clock: Clock) -> None:
        self._host = host
        self._clock = clock
        self._since_s = clock.now()

    def collect(self) -> Iterator[Metric]:
        host, name = self._host, names.Metric
        hours = (self._clock.now() - self._since_s) / 3600
        text = "Cost of this worker since it serves, idle or not, by --cost-per-hour and in its currency"
        yield _count(name.COST, text, hours * host.config.cost_per_hour)
        memory = GaugeMetricFamily(name.DEVICE_MEMORY, "Accelerator memory, bytes; none on the CPU", labels=["kind"])
        for kind, num_bytes in host.engine.device_memory().items():
            memory.add_metric([kind], num_bytes)
        yield memory


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(name, text, value=value)


def _count(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(name, text, value=value)


def _histogram(name: str, text: str, buckets: Buckets) -> Metric:
    """Returns a histogram in Prometheus form, whose buckets are cumulative."""
    total, cumulated = 0, []
    for bound, count in zip((*map(str, buckets.bounds), "+Inf"), buckets.counts, strict=True):
        total += count
        cumulated.append((bound, total))
    return HistogramMetricFamily(name, text, buckets=cumulated, sum_value=buckets.sum)
