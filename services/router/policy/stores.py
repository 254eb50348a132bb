"""Says which stores could keep a handoff that no decode worker has room for, and which of them have room now. Pure.

Owns: these filters. Never: which store is the best (`placement.place_park`), or when a handoff goes there.
"""

from __future__ import annotations

from services.router.policy.explanation import WhyNot
from services.router.policy.views import Job, Role, Source, WorkerView


def can_park(job: Job, source: Source, store: WorkerView) -> bool:
    """Returns whether it is a store that could ever keep the handoff, whatever it keeps now."""
    return store.roles is Role.STORE and _why_never(job, source, store) is None


def has_room_to_keep(job: Job, store: WorkerView) -> bool:
    """Returns whether the store has room by its newest snapshot, and takes in one more now; it decides itself."""
    return store.available_blocks >= store.blocks_for(job.num_tokens) and store.num_sequences < store.max_num_seqs


def why_no_park(job: Job, source: Source, store: WorkerView) -> WhyNot | None:
    """Returns why the store cannot keep the handoff now, or None if it can."""
    if (why := _why_never(job, source, store)) is not None or has_room_to_keep(job, store):
        return why
    return WhyNot.NO_BLOCKS if store.available_blocks < store.blocks_for(job.num_tokens) else WhyNot.FULL_BATCH


def _why_never(job: Job, source: Source, store: WorkerView) -> WhyNot | None:
    if not store.ready:
        return WhyNot.NOT_READY
    if store.model != job.model or store.fingerprint.kv != source.fingerprint.kv:
        return WhyNot.OTHER_FINGERPRINT
    if source.worker_id in store.barred:
        return WhyNot.BARRED
    return WhyNot.TOO_LONG if store.blocks_for(job.num_tokens) > store.num_blocks else None
