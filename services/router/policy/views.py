"""Defines what policy may look at: workers as the router knows them, and the job to be placed. Pure data."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from itertools import repeat

from services.core.hashing import ShortHash, num_blocks_for
from services.core.records import record
from services.core.step_average import StepAverage
from services.kv.layout import TORCH
from services.router.policy.handoff_time import HandoffTime
from services.router.policy.health import Ramp
from services.router.policy.known_cache import BringTime, KnownCache, PrefixIndex, num_blocks_of

_MOST_BLOCK_SIZES = 8
"""The most block sizes for which sums are kept: a cluster has one, or a few."""


class Role(enum.Flag):
    """Names a set of roles: the commands that a worker takes. A single role is the set of that one."""

    PREFILL = enum.auto()
    DECODE = enum.auto()
    MIXED = PREFILL | DECODE
    STORE = enum.auto()
    """Computes nothing: it keeps handoffs, and what others computed. It is no worker's role beside another."""

    @property
    def can_prefill(self) -> bool:
        return Role.PREFILL in self

    @property
    def can_decode(self) -> bool:
        return Role.DECODE in self

    @property
    def gives_kv(self) -> bool:
        """Returns whether leases are fetched from it."""
        return bool(self & (Role.PREFILL | Role.STORE))

    @property
    def takes_kv(self) -> bool:
        """Returns whether it fetches leases."""
        return bool(self & (Role.DECODE | Role.STORE))

    @property
    def label(self) -> str:
        """Returns "prefill", "decode", "mixed" or "store", for people and metrics."""
        assert self.name is not None, "a worker has a role"
        return self.name.lower()


@record
class Fingerprint:
    """Names what a worker computes (mirror of `baton.v1.Fingerprint`)."""

    kv: str
    """Workers exchange KV only if this is equal."""
    numerics: str = ""
    """Streams are continued, and answers compared, only if this is equal too."""
    engine: str = TORCH
    """What computes it, as the layout of which `kv` is the hash says."""

    @property
    def short(self) -> str:
        """Returns the beginning of `kv`, for people."""
        return self.kv[:8]

    def __str__(self) -> str:
        """Returns all of it, for people."""
        return f"{self.short} ({self.engine}; {self.numerics})"


@record
class Load:
    """Counts a worker's load (mirror of `baton.v1.LoadSnapshot`, in the same units)."""

    sequence_number: int = 0
    blocks_importing: int = 0
    blocks_leased: int = 0
    blocks_active: int = 0
    blocks_cached: int = 0
    blocks_free: int = 0
    num_running: int = 0
    num_waiting: int = 0
    queued_prefill_tokens: int = 0
    num_importing: int = 0
    ms_per_prefill_token: float = 0.0
    ms_per_further_prefill_token: float = 0.0
    ms_per_decode_step: float = 0.0
    ms_per_decode_sequence: float = 0.0
    tokens_per_prefill_step: float = 0.0
    prefill_step: StepAverage = StepAverage()
    decode_step: StepAverage = StepAverage()
    current_step_ms: float = 0.0
    prefix_tokens_queried: int = 0
    prefix_tokens_hit: int = 0
    draining: bool = False

    @property
    def available_blocks(self) -> int:
        """Counts free and cached blocks: cached ones are evicted when needed."""
        return self.blocks_free + self.blocks_cached

    @property
    def saved_ms_per_token(self) -> float:
        """Returns what is saved for each token of a prompt that need not be computed: the rest of it takes a step of
        its own in any case. 0 if it is not known."""
        return self.ms_per_further_prefill_token or self.ms_per_prefill_token

    @property
    def at_rest(self) -> bool:
        """Returns whether it computes nothing and holds nothing, so that whatever waits there could begin."""
        return not (self.blocks_importing or self.blocks_leased or self.blocks_active or self.num_running)

    @property
    def idle(self) -> bool:
        return not (self.blocks_importing or self.blocks_leased or self.blocks_active or self.num_waiting)

    def shows_more_room_than(self, other: Load) -> bool:
        """Returns whether something that found no place by the other may find one by this."""
        return (
            self.available_blocks > other.available_blocks
            or self.num_running + self.num_importing < other.num_running + other.num_importing
            or self.queued_prefill_tokens < other.queued_prefill_tokens
            or (self.idle and not other.idle)
        )

    def has_steps_like(self, other: Load, factor: float) -> bool:
        """Returns whether costs of prompt tokens may be compared: part of a step's cost is shared by its tokens, so
        that steps must differ in prompt tokens by at most this factor."""
        mine, theirs = self.tokens_per_prefill_step, other.tokens_per_prefill_step
        return max(mine, theirs) <= factor * min(mine, theirs)


@record
class WorkerView:
    """Holds what policy knows of a worker: its description, its newest snapshot, and what was sent there since."""

    worker_id: str
    model: str
    """The model that it serves."""
    roles: Role
    ready: bool
    host_id: str
    fingerprint: Fingerprint
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    load: Load
    predicted_blocks: int = 0
    """Blocks that commands in flight will take and that the snapshot does not show yet."""
    predicted_tokens: int = 0
    cancelled_tokens: int = 0
    """Tokens of prompts that the snapshot counts and that were cancelled since."""
    predicted_sequences: int = 0
    on_trial: bool = False
    """Whether it takes only a single request, after failures. The handoff of that request may be adopted there."""
    ramp: Ramp | None = None
    """Trust that grows again after failures; None for full trust."""
    barred: frozenset[str] = frozenset()
    """Workers whose leases it cannot fetch."""
    untried: frozenset[str] = frozenset()
    """Workers whose leases it may be unable to fetch: a last resort until a transfer has succeeded."""
    handoff_times: Mapping[str, HandoffTime] = field(default_factory=dict)
    """What handoffs to it from each source have taken."""
    cache: KnownCache | None = None
    """What is known of its prefix cache, and which conversations it was given lately; None if prompts are not
    hashed."""
    bring_times: Mapping[str, BringTime] | None = None
    """What it takes it to bring a prefix from each worker or store; None if it neither brings nor lends any."""
    capacity: float = 1.0
    """Its share of the requests beside that of others, as its operator has declared it."""
    num_legs: int = 0
    """Legs of this router's requests that run there now, or wait there, or whose leases it holds."""
    newest_leg: int = 0
    """The number of the newest leg that was placed there from elsewhere; 0 for none. A leg that adopts a lease in place
    does not count."""
    hardware: str = ""
    """What it computes on, as far as known: workers that say the same should be as fast as each other."""
    ejected: bool = False
    """Whether it is given nothing new while others can take it, since it is slower than its peers (`outliers.py`)."""

    context_tokens: int = field(init=False)
    """Tokens of the longest sequence that this worker can ever hold, prompt and output together."""
    available_blocks: int = field(init=False)
    idle: bool = field(init=False)
    num_sequences: int = field(init=False)
    """Sequences that will share its decode steps, as far as known."""
    queued_tokens: int = field(init=False)
    num_requests: int = field(init=False)
    """Requests that it has, as far as known: this router's legs, or what its snapshot counts if that is more, as it is
    where several routers use it."""

    def __post_init__(self) -> None:
        # A view is looked at much more often than it is made.
        load = self.load
        for name, value in (
            ("context_tokens", min(self.max_model_len, self.num_blocks * self.block_size)),
            ("available_blocks", max(0, load.available_blocks - self.predicted_blocks)),
            ("idle", load.idle and not self.predicted_sequences),
            ("num_sequences", load.num_running + load.num_importing + self.predicted_sequences),
            ("queued_tokens", max(0, load.queued_prefill_tokens - self.cancelled_tokens) + self.predicted_tokens),
            ("num_requests", max(self.num_legs, load.num_running + load.num_waiting + load.num_importing)),
        ):
            object.__setattr__(self, name, value)

    def step_ms(self, num_sequences: float) -> float:
        """Returns the milliseconds of a decode step of `num_sequences`, or of as many of them as fit in one."""
        further = max(0.0, min(num_sequences, self.max_num_seqs) - 1)
        return self.load.ms_per_decode_step + further * self.load.ms_per_decode_sequence

    @property
    def as_source(self) -> Source:
        """Returns what names it where it is to hold a handoff's lease."""
        return Source(self.worker_id, self.host_id, self.fingerprint)

    @property
    def as_prefill(self) -> Source:
        """Returns the same where it is still to compute the prompt, some of which is copied meanwhile."""
        load = self.load
        step_tokens = load.tokens_per_prefill_step or math.inf
        return Source(self.worker_id, self.host_id, self.fingerprint, step_tokens, load.ms_per_prefill_token)

    def cached_blocks(self, job: Job) -> int:
        """Returns how many of the prompt's first blocks its prefix cache has, as far as known."""
        return self.cache.num_blocks(job.block_hashes.get(self.block_size, ())) if self.cache is not None else 0

    def uncached_tokens(self, job: Job) -> int:
        """Returns how many tokens of the prompt the worker would compute, as far as its prefix cache is known. The last
        one is always computed."""
        return self.uncached_of(job, self.cached_blocks(job))

    def uncached_of(self, job: Job, num_blocks: int) -> int:
        """Returns the same for a worker whose cache has that many of the prompt's blocks."""
        return job.num_tokens - min(num_blocks, (job.num_tokens - 1) // self.block_size) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)  # `num_blocks_for`, which is one call more for each worker


@record
class Job:
    """Describes a leg that is to be placed. Lengths are in tokens."""

    num_tokens: int
    """Prompt and replayed output: what is computed before the next token can be sampled."""
    total_tokens: int
    """Prompt and max_tokens: how long the sequence may become."""
    avoid: frozenset[str] = frozenset()
    """Workers on which it failed lately; they are chosen only if there is no other."""
    fingerprint: Fingerprint | None = None
    """The fingerprint of the worker that began the stream: only an equal one may compute its tokens again.

    None if nothing was streamed yet.
    """
    across_engines: bool = False
    """Whether workers of other engines may too, since no equal one could (`Cluster.replay_across_engines`)."""
    unserved_by: frozenset[str] = frozenset()
    """Engines that do not serve what it asks for: none of their workers may compute it."""
    conversation: str = ""
    """The conversation it belongs to; empty for none."""
    tenant: str = ""
    """The tenant that sent the request; empty for none."""
    model: str = ""
    """The model that is to compute it. No worker of another model may."""
    priority: int = 0
    """Its caller's priority; a higher one comes first, and 0 is usual."""
    headroom: float = 0.0
    """The part of each worker's room that it is to leave to other tenants, since its own has more than its share."""
    kept_off: frozenset[str] = frozenset()
    """Workers that its prompt is to leave to shorter ones."""
    block_hashes: Mapping[int, tuple[ShortHash, ...]] = field(default_factory=dict, hash=False)
    """The short hashes of the prompt's full blocks, by block size, as workers' prefix caches know them. Replayed output
    is not in them. Empty if prompts are not hashed (`PolicyConfig.hash_prompts`)."""
    num_answers: int = 1
    """Sequences that go on from the prompt. They share its full blocks."""


@record
class Source:
    """Names the worker that holds a handoff's lease."""

    worker_id: str
    host_id: str
    fingerprint: Fingerprint
    step_tokens: float = math.inf
    """How many of the prompt's tokens it computes at once; infinite where the prompt is computed, or that is not known:
    then nothing is computed while others are copied."""
    token_ms: float = 0.0
    """What it takes to compute one of them."""


class HandoffsInFlight:
    """Counts the prompts whose handoffs still need room on a decode worker, added up as they come and go."""

    def __init__(self, lengths: Iterable[int] = ()) -> None:
        """`lengths` are the tokens of each."""
        self._lengths = Counter(lengths)
        self._num_blocks: dict[int, int] = {}

    def __bool__(self) -> bool:
        return bool(self._lengths)

    @property
    def number(self) -> int:
        return self._lengths.total()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HandoffsInFlight) and self._lengths == other._lengths

    def check(self) -> None:
        """Raises AssertionError if a kept sum is not what is found anew. For tests and the simulator."""
        fresh = HandoffsInFlight(self._lengths.elements())
        for block_size, num_blocks in self._num_blocks.items():
            assert num_blocks == fresh.num_blocks(block_size)

    def change(self, before: int, after: int) -> None:
        """Removes a handoff of `before` tokens and adds one of `after`; 0 is none."""
        if before:
            self.remove(before)
        if after:
            self.add(after)

    def add(self, num_tokens: int) -> None:
        self._lengths[num_tokens] += 1
        for block_size in self._num_blocks:
            self._num_blocks[block_size] += num_blocks_for(num_tokens, block_size) + 1

    def remove(self, num_tokens: int) -> None:
        self._lengths[num_tokens] -= 1
        if not self._lengths[num_tokens]:
            del self._lengths[num_tokens]
        for block_size in self._num_blocks:
            self._num_blocks[block_size] -= num_blocks_for(num_tokens, block_size) + 1

    def longest_first(self) -> Iterator[int]:
        """Yields the tokens of each."""
        for num_tokens in sorted(self._lengths, reverse=True):
            yield from repeat(num_tokens, self._lengths[num_tokens])

    def num_blocks(self, block_size: int) -> int:
        """Returns all blocks they will take, with one each to grow into."""
        if block_size not in self._num_blocks:
            if len(self._num_blocks) >= _MOST_BLOCK_SIZES:
                self._num_blocks.clear()
            self._num_blocks[block_size] = sum(
                number * (num_blocks_for(num_tokens, block_size) + 1) for num_tokens, number in self._lengths.items()
            )
        return self._num_blocks[block_size]


def cached_blocks(workers: Iterable[WorkerView], job: Job) -> Iterator[tuple[WorkerView, int]]:
    """Yields each worker with the number of the prompt's first blocks that its prefix cache is known to have, or of a
    long prompt up to a 64th less: all are looked up together, which takes less than one by one."""
    groups: dict[PrefixIndex, list[tuple[WorkerView, KnownCache]]] = {}
    for worker in workers:
        if worker.cache is None:
            yield worker, 0
        else:
            groups.setdefault(worker.cache.index, []).append((worker, worker.cache))
    for group in groups.values():
        hashes = job.block_hashes.get(group[0][0].block_size, ())
        counts = num_blocks_of([cache for _, cache in group], hashes)
        yield from zip((worker for worker, _ in group), counts, strict=True)


def uncached_tokens(workers: Iterable[WorkerView], job: Job) -> dict[str, int]:
    """Returns how many tokens of the prompt each worker would compute, by its id, as far as caches are known."""
    return {worker.worker_id: worker.uncached_of(job, blocks) for worker, blocks in cached_blocks(workers, job)}
