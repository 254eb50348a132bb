"""Scores workers by what makes them a good choice, in [0, 1], with weights. Pure.

A new criterion is one more `Term` in `PolicyConfig`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.core.errors import ConfigError
from services.router.policy.views import Job, Role, Source, WorkerView

Term = Callable[[WorkerView, Job, Source | None, float], float]
"""Maps (worker, job, source of the handoff if there is one, now) to a score in [0, 1]; higher is better."""

_WAIT_SCALE_MS = 500.0
_GUESSED_MS_PER_PREFILL_TOKEN = 0.5


def short_queue(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Falls with the time until this prompt's turn: it is a half at half a second."""
    wait_ms = worker.queued_tokens * (worker.load.ms_per_prefill_token or _GUESSED_MS_PER_PREFILL_TOKEN)
    return 1.0 / (1.0 + wait_ms / _WAIT_SCALE_MS)


def free_memory(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Returns the share of the pool that is still available with the job in it."""
    left = worker.available_blocks - worker.blocks_for(job.num_tokens)
    return max(0.0, left / worker.num_blocks)


def small_batch(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    return max(0.0, 1.0 - worker.num_sequences / worker.max_num_seqs)


def dedicated(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Prefers workers with one phase, since a mixed worker would disturb its other phase."""
    return 0.0 if worker.roles is Role.MIXED else 1.0


def near(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Returns 1 in place (no byte moves), 0.5 on the same host (shared memory), 0 elsewhere."""
    if source is None or worker.worker_id == source.worker_id:
        return 1.0
    return 0.5 if worker.host_id == source.host_id else 0.0


def trusted(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Returns less than 1 after a failure, and in the slow start of a worker that was down; it grows with time."""
    return 1.0 if worker.ramp is None else worker.ramp.at(now)


def prefix_cached(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Returns the share of the job's tokens that stand in full blocks which the worker's prefix cache has, by what it
    told, or will have, by the prompts it was given."""
    if worker.cache is None:
        return 0.0
    num_blocks = worker.cache.num_blocks(job.block_hashes.get(worker.block_size, ()))
    return num_blocks * worker.block_size / job.num_tokens


def same_conversation(worker: WorkerView, job: Job, source: Source | None, now: float) -> float:
    """Returns 1 where the job's conversation was placed lately, else 0."""
    return 1.0 if worker.cache is not None and worker.cache.has_conversation(job.conversation) else 0.0


TERMS: Mapping[str, Term] = {
    term.__name__: term
    for term in (short_queue, free_memory, small_batch, dedicated, near, trusted, prefix_cached, same_conversation)
}
LOOKING_AT_PROMPTS = frozenset({prefix_cached, same_conversation})
"""Terms that need `PolicyConfig.hash_prompts`."""


@dataclass(frozen=True)
class PolicyConfig:
    hash_prompts: bool = False
    """Whether prompts are hashed, and workers' prefix caches followed, for terms that look at them. No term does by
    default."""
    max_queued_tokens: int = 8192
    """The most tokens that may wait at a prefill worker before it is given no further prompt: what waits in the router
    instead keeps its priority and its choice of worker.
    """
    prefill_terms: tuple[tuple[float, Term], ...] = (
        (4.0, short_queue),
        (1.0, free_memory),
        (1.0, small_batch),
        (2.0, dedicated),
        (4.0, trusted),
    )
    decode_terms: tuple[tuple[float, Term], ...] = (
        (4.0, dedicated),
        (2.0, free_memory),
        (2.0, small_batch),
        (1.0, near),
        (4.0, trusted),
    )


def weighted(policy: PolicyConfig, weights: Sequence[str], flag: str) -> PolicyConfig:
    """Returns the policy with the weights of PHASE.TERM=W, such as prefill.prefix_cached=8; a term of weight 0 is left
    out. Prompts are hashed where a term looks at them. Raises ConfigError, which names the flag."""
    terms = {"prefill": policy.prefill_terms, "decode": policy.decode_terms}
    for weight in weights:
        match = re.fullmatch(r"(prefill|decode)\.(\w+)=(\d+(?:\.\d+)?)", weight, re.ASCII)
        term = TERMS.get(match[2]) if match is not None else None
        if match is None or term is None:
            raise ConfigError(f"{flag}: {weight!r} is not like prefill.short_queue=4; there are {', '.join(TERMS)}")
        others = tuple(each for each in terms[match[1]] if each[1] is not term)
        terms[match[1]] = (*others, (float(match[3]), term)) if float(match[3]) else others
    looks = any(term in LOOKING_AT_PROMPTS for of_phase in terms.values() for _, term in of_phase)
    return replace(
        policy,
        hash_prompts=policy.hash_prompts or looks,
        prefill_terms=terms["prefill"],
        decode_terms=terms["decode"],
    )
