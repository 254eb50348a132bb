"""Scores workers by what makes them a good choice, in [0, 1], with weights. Pure.

A new criterion is one more `Term` in `PolicyConfig`; named sets of them are in `presets.py`. A term scores all
candidates of a choice at once, since some compare them. What a worker could bring of a prompt counts by what computing
as much would take; from whom a leg brings in the end (`choose_source`) depends on who is busy, too.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from services.core.errors import ConfigError
from services.router.policy.handoff_time import HandoffTime
from services.router.policy.known_cache import MARGIN, KnownCache, PrefixIndex, most_told
from services.router.policy.views import Job, Role, Source, WorkerView, cached_blocks


class Question(NamedTuple):
    """Holds what a worker is wanted for."""

    job: Job
    source: Source | None
    """The worker that holds the handoff's lease, or is to; None where no handoff is to be taken over."""
    now: float
    lenders: Collection[WorkerView] = ()
    """From whom the candidates could bring a part of the prompt."""


Term = Callable[[Sequence[WorkerView], Question], Sequence[float]]
"""Maps all candidates, and what they are wanted for, to the score of each in [0, 1]; higher is better."""

_WAIT_SCALE_MS = 500.0
_GUESSED_MS_PER_PREFILL_TOKEN = 0.5
_STEP_SCALE_MS = 50.0
_GUESSED_MS_PER_DECODE_STEP = 20.0
_HANDOFF_SCALE_MS = 50.0
"""A handoff that takes no longer shows as one step more, as others' prompts make there be."""
LOAD_BOUND = 1.25
"""The most requests of a worker that a conversation does not pass over, as a multiple of the mean: the `c` of
consistent hashing with bounded loads (arXiv 1608.01350)."""
_HITS_WELL = 0.75
"""A conversation's own worker hits well if it has this share of what the worker has that knows most of the prompt."""
_WORTH_GOING = 0.25
"""The share of a prompt in a prefix cache for which a request without a better reason goes there."""


def short_queue(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Falls with the time until this prompt's turn: it is a half at half a second."""
    guess = _GUESSED_MS_PER_PREFILL_TOKEN
    return [
        _WAIT_SCALE_MS / (_WAIT_SCALE_MS + worker.queued_tokens * (worker.load.ms_per_prefill_token or guess))
        for worker in workers
    ]


def free_memory(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns the share of the pool that is still available with the job in it."""
    num_tokens = asked.job.num_tokens
    return [
        left / worker.num_blocks if (left := worker.available_blocks - worker.blocks_for(num_tokens)) > 0 else 0.0
        for worker in workers
    ]


def small_batch(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns the share of the batch that is empty."""
    return [share if (share := 1.0 - worker.num_sequences / worker.max_num_seqs) > 0 else 0.0 for worker in workers]


def dedicated(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Prefers workers with one phase, since a mixed worker would disturb its other phase."""
    mixed = Role.MIXED  # to look a member up takes as long as all the rest
    return [0.0 if worker.roles is mixed else 1.0 for worker in workers]


def near(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns 1 in place (no byte moves), 0.5 on the same host (shared memory), 0 elsewhere."""
    source = asked.source
    if source is None:
        return [1.0] * len(workers)
    return [
        1.0 if worker.worker_id == source.worker_id else 0.5 if worker.host_id == source.host_id else 0.0
        for worker in workers
    ]


def quick_handoff(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Falls with what the handoff between the two is expected to take that nothing hides, by those before it and by
    what its blocks take at the pair's rate: it is 1 up to 50 ms, and a half at 100 ms. It is 1 as well in place, and
    while that is not known, so that every pair is tried."""
    source = asked.source
    if source is None:
        return [1.0] * len(workers)
    return [
        1.0
        if (time := worker.handoff_times.get(source.worker_id)) is None
        else _handoff_share(time, worker, source, asked)
        for worker in workers
    ]


def _handoff_share(time: HandoffTime, worker: WorkerView, source: Source, asked: Question) -> float:
    job, now = asked.job, asked.now
    ms = time.expected_ms(job.num_tokens, source.step_tokens, source.token_ms, now)
    if ms is None or ms <= _HANDOFF_SCALE_MS:
        return 1.0
    # Only now it is looked up what the worker need not copy: few pairs are so slow.
    ms = time.expected_ms(worker.uncached_tokens(job), source.step_tokens, source.token_ms, now)
    return 1.0 if ms is None or ms <= _HANDOFF_SCALE_MS else _HANDOFF_SCALE_MS / ms


def trusted(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns less than 1 after a failure, and in the slow start of a worker that was down; it grows with time."""
    return [1.0 if worker.ramp is None else worker.ramp.at(asked.now) for worker in workers]


PARK_TERMS: tuple[tuple[float, Term], ...] = ((2.0, near), (1.0, free_memory), (1.0, trusted))
"""What a store is chosen by: one on the source's host is best, since most of the time the bytes need not leave it; then
the one with the most memory left."""


def same_conversation(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns 1 where the job's conversation was placed lately, else 0."""
    conversation = asked.job.conversation
    return [
        1.0 if worker.cache is not None and worker.cache.has_conversation(conversation) else 0.0 for worker in workers
    ]


def few_requests(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Falls with the requests that the worker has, whatever their lengths: it is a half with one."""
    return [1.0 / (1.0 + worker.num_requests) for worker in workers]


def free_capacity(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Falls with the requests that the worker would have for each unit of its declared capacity: it is a half where
    they are as many as the capacity."""
    return [worker.capacity / (worker.capacity + worker.num_requests + 1) for worker in workers]


def soon_computed(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Falls with the time until the whole prompt is computed, those before it included, by the milliseconds per token
    that the worker has measured of itself: it is a half at half a second."""
    token_ms = [worker.load.ms_per_prefill_token or _GUESSED_MS_PER_PREFILL_TOKEN for worker in workers]
    return [
        1.0 / (1.0 + (worker.queued_tokens + asked.job.num_tokens) * ms / _WAIT_SCALE_MS)
        for worker, ms in zip(workers, token_ms, strict=True)
    ]


def quick_steps(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Falls with the time of a decode step that has the job in it too, by the milliseconds that the worker has measured
    of itself: it is a half at 50 ms. It is 1 for a worker that does not decode: nobody's tokens wait for its steps."""
    step_ms = [worker.step_ms(worker.num_sequences + 1) or _GUESSED_MS_PER_DECODE_STEP for worker in workers]
    return [
        1.0 / (1.0 + ms / _STEP_SCALE_MS) if worker.roles.can_decode else 1.0
        for worker, ms in zip(workers, step_ms, strict=True)
    ]


def in_place(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns 1 where the job's KV stands already, so that no byte moves, else 0."""
    here = asked.source.worker_id if asked.source is not None else None
    return [1.0 if worker.worker_id == here else 0.0 for worker in workers]


def room_for_urgent(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns the share of the worker's batch that is empty, as far as the caller's priority counts: nothing at 0 or
    below, a half of it at 1, and nearly all of it at 10.

    A priority alone is the same number for all workers, and would choose none.
    """
    urgency = max(0, asked.job.priority)
    return [urgency / (1.0 + urgency) * share for share in small_batch(workers, asked)]


def least_recent(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns 1 for the worker whose newest leg is the oldest, and less for each that was placed to later.

    Nothing is kept for it: the numbers of legs grow, and say in which order workers were chosen.
    """
    oldest_first = sorted(workers, key=lambda worker: (worker.newest_leg, worker.worker_id))
    places = {worker.worker_id: place for place, worker in enumerate(oldest_first)}
    return [1.0 - places[worker.worker_id] / len(workers) for worker in workers]


def prefix_cached(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns the share of the job's tokens that stand in full blocks which the worker's prefix cache has, by what it
    told, or will have, by the prompts it was given: of a long prompt up to a 64th less. What it can bring from a lender
    counts too, less the tokens that it could compute meanwhile."""
    job, lent = asked.job, lent_by(asked.lenders, asked.job)
    found = {
        worker.worker_id: num_blocks * worker.block_size + brought_tokens(worker, num_blocks, lent)
        for worker, num_blocks in cached_blocks(workers, job)
    }
    return [found[worker.worker_id] / job.num_tokens for worker in workers]


def conversation_place(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Returns 1 for the conversation's own worker, 1/2 for the next in its order, 1/3 for the one after it; 0 for all
    if the job belongs to no conversation.

    It is consistent hashing with bounded loads (arXiv 1608.01350): a hash of conversation and worker puts the workers
    in order (rendezvous hashing, which has no ring to keep), so that a worker that comes or goes moves only the
    conversations that it gains or loses, and routers agree without telling each other. Workers that would have more
    than `LOAD_BOUND` times the mean of requests come last.
    """
    order = _conversation_order(workers, asked.job) if asked.job.conversation else []
    scores = {worker.worker_id: 1.0 / place for place, worker in enumerate(order, start=1)}
    return [scores.get(worker.worker_id, 0.0) for worker in workers]


def conversation_or_prefix(workers: Sequence[WorkerView], asked: Question) -> list[float]:
    """Scores as `conversation_place` while the conversation's own worker hits well, else by the share of the prompt
    that each worker's prefix cache has, if that is worth going there, else 0 for all. Workers over the bound of
    `conversation_place` do not count, so that what many prompts share, such as a system prompt, does not draw all of
    them to one worker.

    The worker hits well if, of what is cached of the prompt anywhere, it has nearly as much as any, or can bring it: of
    a new conversation with a new prompt, nobody has anything, and it begins where it will be found again.
    """
    job, most_requests = asked.job, _most_requests(workers)
    usable = [worker for worker in workers if worker.num_requests < most_requests]
    shares = dict.fromkeys((worker.worker_id for worker in workers), 0.0)
    shares.update(zip((worker.worker_id for worker in usable), prefix_cached(usable, asked), strict=True))
    most = max(shares.values())
    if job.conversation and shares[_conversation_order(workers, job)[0].worker_id] >= _HITS_WELL * most:
        return conversation_place(workers, asked)
    return list(shares.values()) if most >= _WORTH_GOING else [0.0] * len(workers)


def _most_requests(workers: Sequence[WorkerView]) -> int:
    """Returns how many requests a worker may have, the new one included, that is not to be passed over."""
    return math.ceil(LOAD_BOUND * (sum(worker.num_requests for worker in workers) + 1) / len(workers))


def _conversation_order(workers: Sequence[WorkerView], job: Job) -> list[WorkerView]:
    """Returns the workers in the order in which the job's conversation would use them."""
    most_requests = _most_requests(workers)
    conversation = hashlib.blake2b(f"{job.tenant}\0{job.conversation}".encode(), digest_size=16).digest()

    def rank(worker: WorkerView) -> tuple[bool, bytes]:
        hash = hashlib.blake2b(worker.worker_id.encode(), digest_size=8, key=conversation).digest()
        return worker.num_requests >= most_requests, hash

    return sorted(workers, key=rank)


TERMS: Mapping[str, Term] = {
    term.__name__: term
    for term in (
        short_queue,
        free_memory,
        small_batch,
        dedicated,
        near,
        quick_handoff,
        trusted,
        prefix_cached,
        same_conversation,
        few_requests,
        free_capacity,
        soon_computed,
        quick_steps,
        in_place,
        room_for_urgent,
        least_recent,
        conversation_place,
        conversation_or_prefix,
    )
}
LOOKING_AT_PROMPTS: frozenset[Term] = frozenset({prefix_cached, same_conversation, conversation_or_prefix})
"""Terms that need `PolicyConfig.hash_prompts`."""
MOST_WEIGHT = 1e6
"""The largest weight of a term: beyond it, the other terms' shares of a score would be lost in rounding."""


@dataclass(frozen=True)
class PolicyConfig:
    hash_prompts: bool = False
    """Whether workers' prefix caches are followed, and prompts hashed: for terms that look at them, which none does by
    default, or so that workers can bring prefixes."""
    share_prefixes: bool = True
    """Whether workers bring prefixes from one another, where prompts are hashed."""
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
        (1.0, quick_handoff),
        (4.0, trusted),
    )

    @property
    def looks_at_prompts(self) -> bool:
        """Returns whether a term looks at prompts' hashes."""
        return any(term in LOOKING_AT_PROMPTS for _, term in (*self.prefill_terms, *self.decode_terms))


SHARING = ("auto", "never")
"""Values of `--share-prefixes`."""


def sharing(policy: PolicyConfig, share_prefixes: str) -> PolicyConfig:
    """Returns the policy with one of `SHARING`: whether caches are followed, whatever its terms look at, so that
    workers can bring prefixes."""
    assert share_prefixes in SHARING, share_prefixes
    shares = share_prefixes == "auto"
    return replace(policy, share_prefixes=shares, hash_prompts=policy.hash_prompts or shares)


def weighted(policy: PolicyConfig, weights: Sequence[str], flag: str) -> PolicyConfig:
    """Returns the policy with the weights of PHASE.TERM=W, such as prefill.prefix_cached=8. Raises ConfigError, which
    names the flag."""
    for weight in weights:
        match = re.fullmatch(r"(prefill|decode)\.(\w+)=(\d+(?:\.\d+)?)", weight, re.ASCII)
        term = TERMS.get(match[2]) if match is not None else None
        if match is None or term is None:
            raise ConfigError(f"{flag}: {weight!r} is not like prefill.short_queue=4; there are {', '.join(TERMS)}")
        policy = reweighted(policy, match[1], term, float(match[3]), f"{flag}: {weight!r}")
    return policy


def reweighted(policy: PolicyConfig, phase: str, term: Term, weight: float, origin: str) -> PolicyConfig:
    """Returns the policy with another weight for a term of a phase, "prefill" or "decode"; a term of weight 0 is left
    out. Prompts are hashed where a term looks at them. Raises ConfigError, which names `origin`, for a weight that is
    out of range."""
    if not 0 <= weight <= MOST_WEIGHT:
        shown = f"{weight:g}" if isinstance(weight, float) or abs(weight) < 1 << 1000 else "beyond 1e300"
        raise ConfigError(f"{origin}: the weight {shown} is not in [0, {MOST_WEIGHT:g}]")
    terms = {"prefill": policy.prefill_terms, "decode": policy.decode_terms}
    others = tuple(each for each in terms[phase] if each[1] is not term)
    terms[phase] = (*others, (weight, term)) if weight else others
    policy = replace(policy, prefill_terms=terms["prefill"], decode_terms=terms["decode"])
    return replace(policy, hash_prompts=policy.hash_prompts or policy.looks_at_prompts)


_MOST_LENDERS = 4
"""The lenders that are looked at, those that have most of the prompt: one of them may lend to nearly everybody."""

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
