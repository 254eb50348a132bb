"""Counts what a worker could bring of a prompt's KV, by what computing as much would take. Pure.

Owns: which workers have most of a prompt, and what that is worth to another. Never: from whom a leg brings in the end
(`choose_source`), which also looks at who is busy lending.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from services.router.policy.known_cache import MARGIN, KnownCache, most_told
from services.router.policy.prefix_index import PrefixIndex
from services.router.policy.views import Job, WorkerView

_MOST_LENDERS = 4
"""So many of those that have most of a prompt are looked at: there is one that may lend to nearly everybody."""

Lent = Sequence[tuple[WorkerView, int]]
"""Workers with the number of the prompt's first blocks that they could lend, those with most first."""


def lent_by(lenders: Iterable[WorkerView], job: Job) -> Lent:
    """Returns those of the lenders that have told of most of the job's prompt."""
    groups: dict[PrefixIndex, list[tuple[WorkerView, KnownCache]]] = {}
    for lender in lenders:
        if lender.cache is not None and lender.bring_times is not None and lender.ready:
            groups.setdefault(lender.cache.index, []).append((lender, lender.cache))
    found: list[tuple[WorkerView, int]] = []
    for group in groups.values():
        hashes = job.block_hashes.get(group[0][0].block_size, ())
        most = most_told([cache for _, cache in group], hashes, _MOST_LENDERS)
        found += [(group[place][0], num_blocks) for place, num_blocks in most]
    return sorted(found, key=lambda each: (-each[1], each[0].worker_id))


def brought_tokens(worker: WorkerView, num_blocks: int, lent: Lent) -> float:
    """Returns how many tokens the worker need not compute because it can bring them, less as many as it would compute
    while they come. `num_blocks` are those of the prompt that it has."""
    token_ms = worker.load.saved_ms_per_token
    if worker.bring_times is None or not token_ms:
        return 0.0
    for lender, most in lent:
        more = (most - num_blocks) * worker.block_size
        if more <= 0 or lender.fingerprint.kv != worker.fingerprint.kv or lender.worker_id in worker.barred:
            continue
        return max(0.0, more - MARGIN * worker.bring_times[lender.worker_id].ms(more) / token_ms)
    return 0.0
