"""What a worker says of itself: who it is, at each registration; how busy it is, in every message to a router.

Pure reading. Never: changes anything.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from baton.v1 import control_pb2, types_pb2
from services.core.ids import host_id
from services.kvtransfer.wire import layout_to_proto

if TYPE_CHECKING:
    from services.worker.host import WorkerHost


def describe(host: WorkerHost) -> control_pb2.WorkerDescription:
    info = host.engine.info
    return control_pb2.WorkerDescription(
        worker_id=host.worker_id,
        role=host.role,
        address=host.address,
        incarnation=host.incarnation,
        pid=os.getpid(),
        layout=layout_to_proto(host.layout),
        num_blocks=info.num_blocks,
        max_model_len=info.max_model_len,
        max_num_seqs=host.config.max_num_seqs,
        shm_socket=host.transfer.socket_name,
        host_id=host_id(),
        vocab_size=info.vocab_size,
        device=str(info.device),
    )


def snapshot(host: WorkerHost, number: int) -> types_pb2.LoadSnapshot:
    """`number` counts up: of two snapshots the higher one is newer."""
    stats = host.engine.stats()
    return types_pb2.LoadSnapshot(
        sequence_number=number,
        blocks_importing=stats.ledger.importing,
        blocks_leased=stats.ledger.leased,
        blocks_active=stats.ledger.active,
        blocks_cached=stats.ledger.cached,
        blocks_free=stats.ledger.free,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        queued_prefill_tokens=stats.queued_prefill_tokens,
        num_importing=len(host.imports),
        num_leases=len(host.leases),
        num_preemptions=stats.num_preemptions,
        ms_per_prefill_token=stats.ms_per_prefill_token,
        ms_per_decode_step=stats.ms_per_decode_step,
        ms_per_decode_sequence=stats.ms_per_decode_sequence,
        current_step_ms=stats.current_step_ms,
        prefix_tokens_queried=stats.prefix_tokens_queried,
        prefix_tokens_hit=stats.prefix_tokens_hit,
        draining=host.draining,
        consecutive_step_failures=stats.consecutive_step_failures,
    )
