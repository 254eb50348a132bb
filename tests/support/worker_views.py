"""Makes workers as the router's policies see them: small ones, at rest unless a test says otherwise."""

from __future__ import annotations

from dataclasses import replace

from services.router.policy import Fingerprint, Load, Role, WorkerView


def view(worker_id: str, roles: Role, *, busy: int = 0, **changes: object) -> WorkerView:
    """Returns a worker with 64 blocks of 16 tokens; `busy` of them are active."""
    worker = WorkerView(
        worker_id=worker_id,
        model="",
        roles=roles,
        ready=True,
        host_id="h1",
        fingerprint=Fingerprint("L"),
        block_size=16,
        num_blocks=64,
        max_model_len=1024,
        max_num_seqs=8,
        load=Load(sequence_number=1, blocks_active=busy, blocks_free=64 - busy, num_running=1 if busy else 0),
    )
    return replace(worker, **changes)  # type: ignore[arg-type]


def prefill(worker_id: str = "p", **changes: object) -> WorkerView:
    return view(worker_id, Role.PREFILL, **changes)  # type: ignore[arg-type]


def decode(worker_id: str = "d", **changes: object) -> WorkerView:
    return view(worker_id, Role.DECODE, **changes)  # type: ignore[arg-type]


def mixed(worker_id: str = "m", **changes: object) -> WorkerView:
    return view(worker_id, Role.MIXED, **changes)  # type: ignore[arg-type]
