"""Reports on a worker: what it is, at each registration and in its sessions; how busy it is, in every message of those.

Never: changes anything.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from baton.v1 import control_pb2, types_pb2
from services.core.ids import host_id
from services.core.step_average import StepAverage
from services.engine.config import EngineInfo, EngineStats
from services.kv.layout import Layout
from services.kvtransfer.wire import layout_to_proto


def describe(
    info: EngineInfo,
    layout: Layout,
    *,
    worker_id: str,
    roles: Iterable[types_pb2.WorkerRole],
    address: str,
    incarnation: int,
    max_num_seqs: int,
    capacity: float = 1.0,
    num_tier_blocks: int = 0,
    withheld: str = "",
) -> control_pb2.WorkerDescription:
    return control_pb2.WorkerDescription(
        worker_id=worker_id,
        roles=sorted(roles),
        address=address,
        incarnation=incarnation,
        pid=os.getpid(),
        layout=layout_to_proto(layout),
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=max_num_seqs,
        host_id=host_id(),
        vocab_size=info.vocab_size,
        device=str(info.device),
        fingerprint=types_pb2.Fingerprint(kv=layout.fingerprint, numerics=info.numerics),
        kernels=info.kernels,
        capacity=None if capacity == 1.0 else capacity,
        num_tier_blocks=num_tier_blocks or None,
        withheld=withheld,
    )


def snapshot(
    stats: EngineStats,
    *,
    current_step_ms: float,
    number: int,
    num_preparing: int,
    preparing_tokens: int,
    num_importing: int,
    num_leases: int,
    draining: bool,
) -> types_pb2.LoadSnapshot:
    """Returns the worker's load. `current_step_ms` is how long the step under way has run, as `StepAge` counts.
    `number` counts up: of two snapshots, the one with the higher number is newer.

    `num_preparing` legs are not yet the engine's, since their constraints are being compiled or their prefixes brought.
    They count as running: without them the worker would seem to have nothing to do, and routers would give the legs up.
    `preparing_tokens` are those of prompts whose prefixes are being brought."""
    return types_pb2.LoadSnapshot(
        sequence_number=number,
        blocks_importing=stats.ledger.importing,
        blocks_leased=stats.ledger.leased,
        blocks_active=stats.ledger.active,
        blocks_cached=stats.ledger.cached,
        blocks_free=stats.ledger.free,
        num_running=stats.num_running + num_preparing,
        num_waiting=stats.num_waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens + preparing_tokens,
        num_importing=num_importing,
        num_leases=num_leases,
        num_preemptions=stats.num_preemptions,
        ms_per_prefill_token=stats.ms_per_prefill_token,
        ms_per_further_prefill_token=stats.ms_per_further_prefill_token,
        ms_per_decode_step=stats.ms_per_decode_step,
        ms_per_decode_sequence=stats.ms_per_decode_sequence,
        tokens_per_prefill_step=stats.tokens_per_prefill_step,
        prefill_step=_step_average(stats.prefill_step),
        decode_step=_step_average(stats.decode_step),
        num_tokens=stats.num_tokens,
        current_step_ms=current_step_ms,
        prefix_tokens_queried=stats.prefix_tokens_queried,
        prefix_tokens_hit=stats.prefix_tokens_hit,
        draining=draining,
        consecutive_step_failures=stats.consecutive_step_failures,
    )


class StepAge:
    """Tells how long the step under way has run, without the time for which this process was stopped or waited for a
    processor: such a step is late, and not stuck."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._missed_before_s = 0.0
        """What the process had missed when the step was new."""

    def ms(self, num_steps: int, current_step_ms: float, missed_s: float) -> float:
        """Returns milliseconds of awake time, 0 between steps. The step has run for `current_step_ms`, and `num_steps`
        have ended before it; `missed_s` is what the awake clock has not counted so far. Call it at every heartbeat."""
        if not current_step_ms or num_steps != self._num_steps:
            self._num_steps, self._missed_before_s = num_steps, missed_s
        return max(0.0, current_step_ms - (missed_s - self._missed_before_s) * 1e3)


def _step_average(average: StepAverage) -> types_pb2.StepAverage | None:
    if not average.tokens:
        return None
    return types_pb2.StepAverage(
        ms=average.ms,
        tokens=average.tokens,
        attended_tokens=average.attended_tokens,
        num_steps=average.num_steps,
    )
