"""Says what stands in a worker's way to take a job: the reason, or None. Each filter is written here once. Pure.

Owns: the reasons, the filters that look at workers' views, and which prefill workers long prompts leave to short ones
(`LongPrompts`). Never: which of the workers left is best (`terms.py`), or what the coordinator knows beside the views:
claims and refusals.

There are two filters for each phase. An *obstacle* lasts whatever the worker's load is, so that what it says is found
once per kind of job (`cluster.Fit`). A *shortage* is of room, by the worker's newest snapshot, and the worker itself
decides. Both are asked of workers with the role of the phase. A third kind, `unless_all`, leaves workers out only while
others are left. Placing and the record of it ask the same functions: a reason is a constant, and becomes words
(`WhyNot.value`) only where somebody reads it.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from services.core.records import record
from services.router.policy.shares import OVER_SHARE_LINE
from services.router.policy.views import Job, Source, WorkerView, uncached_tokens

MOST_NAMED = 8
"""The most workers that a record names as left out."""


class WhyNot(enum.Enum):
    """Says by which filter a worker was left out of a choice; the values are words for people."""

    NOT_READY = "not ready"
    TOO_LONG = "cannot hold so long a sequence"
    OTHER_FINGERPRINT = "computes something else"
    BARRED = "transfers from the source fail"
    NO_TAKER = "no decode worker could take over from it"
    BLAMED = "failed under this request"
    UNTRIED = "no transfer has proven the pair yet"
    CLAIMED = "kept for a request that has waited too long"
    REFUSED = "refused this handoff just now"
    NO_BLOCKS = "no room: too few blocks"
    FULL_BATCH = "no room: its batch is full"
    QUEUE_LIMIT = "no room: its queue is at the limit"
    NO_DECODE_ROOM = "no room at decode workers for one more handoff"
    RESERVED = "no room: what it has is for handoffs on their way"
    KEPT = "kept for shorter prompts"
    OVER_SHARE = "its last room is kept for other tenants"
    EJECTED = "ejected for a while: slower than its peers"


Reasons = dict[str, WhyNot]
"""Why workers were left out, by worker id, in the order in which that was found."""


class LeftOut(NamedTuple):
    worker_id: str
    why: WhyNot


@record
class LeftOutWorkers:
    """Names some of the workers that had the role, and were no candidates."""

    named: tuple[LeftOut, ...] = ()
    """At most `MOST_NAMED`."""
    number: int = 0
    """All of them, named or not."""

    def after(self, first: Mapping[str, WhyNot]) -> LeftOutWorkers:
        """Returns these after others."""
        if not first:
            return self
        named = tuple([LeftOut(*each) for each in islice(first.items(), MOST_NAMED)])
        return LeftOutWorkers((named + self.named)[:MOST_NAMED], len(first) + self.number)


def sift(
    workers: Iterable[WorkerView], obstacle: Callable[[WorkerView], WhyNot | None], left_out: Reasons
) -> list[WorkerView]:
    """Returns the workers in whose way nothing stands, and notes of each other one what does."""
    left = []
    for worker in workers:
        if (why := obstacle(worker)) is None:
            left.append(worker)
        else:
            left_out[worker.worker_id] = why
    return left


def unless_all(
    workers: list[WorkerView], last_resort: Collection[str], why: WhyNot, left_out: Reasons
) -> list[WorkerView]:
    """Returns the workers that are no last resort, and notes `why` of the others; all of them if each is one."""
    left = [worker for worker in workers if worker.worker_id not in last_resort] if last_resort else workers
    if not left or len(left) == len(workers):
        return workers
    left_out.update((worker.worker_id, why) for worker in workers if worker.worker_id in last_resort)
    return left


def preferred(workers: list[WorkerView], job: Job, source: Source | None, left_out: Reasons) -> list[WorkerView]:
    """Returns, as far as there are any, the workers that have not failed under this job and, of these, those that are
    known to take over what runs at the source; notes why of the others.

    Room does not matter: the worker that failed often looks the freest, and a job that went back there because the
    others have no room would use up its attempts.
    """
    fair = unless_all(workers, job.avoid, WhyNot.BLAMED, left_out)
    return fair if source is None else unless_untried(fair, source, left_out)


def unless_untried(workers: list[WorkerView], source: Source, left_out: Reasons) -> list[WorkerView]:
    """Returns the workers that are known to take over what runs at the source, or all of them if none is."""
    untried = [worker.worker_id for worker in workers if source.worker_id in worker.untried]
    return unless_all(workers, untried, WhyNot.UNTRIED, left_out)


# Obstacles


def prefill_obstacle(job: Job, worker: WorkerView) -> WhyNot | None:
    """Returns why the worker could never run the job's prompt."""
    if not worker.ready:
        return WhyNot.NOT_READY
    if job.num_tokens >= worker.context_tokens:
        return WhyNot.TOO_LONG
    return None if _may_compute(job, worker) else WhyNot.OTHER_FINGERPRINT


def decode_obstacle(job: Job, source: Source | None, worker: WorkerView) -> WhyNot | None:
    """Returns why the worker could never take over the handoff of the source; without a source, why it could never run
    the whole sequence.

    In place it needs no new block; elsewhere it needs all the prompt's blocks and one.
    """
    in_place = source is not None and worker.worker_id == source.worker_id
    if not worker.ready and not (in_place and worker.on_trial):
        return WhyNot.NOT_READY
    if job.total_tokens > worker.context_tokens:
        return WhyNot.TOO_LONG
    if source is None:
        return None if _may_compute(job, worker) else WhyNot.OTHER_FINGERPRINT
    if in_place:
        return None if worker.model == job.model else WhyNot.OTHER_FINGERPRINT
    if import_blocks(job, worker) > worker.num_blocks:
        return WhyNot.TOO_LONG
    return _fetch_obstacle(job, source, worker)


def park_obstacle(job: Job, source: Source, store: WorkerView) -> WhyNot | None:
    """Returns why the store could never keep the handoff of the source."""
    if not store.ready:
        return WhyNot.NOT_READY
    if store.blocks_for(job.num_tokens) > store.num_blocks:
        return WhyNot.TOO_LONG
    return _fetch_obstacle(job, source, store)


def _fetch_obstacle(job: Job, source: Source, worker: WorkerView) -> WhyNot | None:
    """Returns why the worker could not fetch the job's KV from the source: to take over KV, an equal `kv` is enough,
    and the model."""
    if source.worker_id in worker.barred:
        return WhyNot.BARRED
    is_same = worker.model == job.model and worker.fingerprint.kv == source.fingerprint.kv
    return None if is_same else WhyNot.OTHER_FINGERPRINT


def _may_compute(job: Job, worker: WorkerView) -> bool:
    """Returns whether the worker may compute the job: one of its model and of an engine that serves such a job, and
    after tokens were streamed, only one of an equal fingerprint, or of another engine where the job may go there."""
    bound, found = job.fingerprint, worker.fingerprint
    if worker.model != job.model or found.engine in job.unserved_by:
        return False
    return bound is None or found == bound or (job.across_engines and found.engine != bound.engine)


def can_decode(job: Job, worker: WorkerView) -> bool:
    """Returns whether the worker could ever run the whole sequence, whatever its load is now."""
    return worker.roles.can_decode and decode_obstacle(job, None, worker) is None


def can_take_over(job: Job, source: Source, worker: WorkerView) -> bool:
    """Returns whether the worker could ever take over the handoff, whatever its load is now."""
    return worker.roles.can_decode and decode_obstacle(job, source, worker) is None


# Shortages


def prefill_shortage(job: Job, worker: WorkerView, max_queued_tokens: int) -> WhyNot | None:
    """Returns why the worker has no room for the job's prompt now."""
    if worker.worker_id in job.kept_off:
        return WhyNot.KEPT
    if worker.idle:
        return None
    num_blocks = worker.blocks_for(job.num_tokens)
    if worker.available_blocks < num_blocks:
        return WhyNot.NO_BLOCKS
    if worker.queued_tokens >= max_queued_tokens:
        return WhyNot.QUEUE_LIMIT
    if job.headroom:
        kept = kept_for_others(job, worker.num_blocks, num_blocks)
        if worker.available_blocks < num_blocks + kept or worker.queued_tokens >= OVER_SHARE_LINE * max_queued_tokens:
            return WhyNot.OVER_SHARE
    return None


def decode_shortage(job: Job, source: Source | None, worker: WorkerView) -> WhyNot | None:
    """Returns why the worker has no room for the handoff of the source, or for the whole sequence, now.

    An idle worker always has room, since it can evict its cached blocks; adoption in place takes no new blocks.
    """
    if worker.idle or (source is not None and worker.worker_id == source.worker_id):
        return None
    num_blocks, num_places = import_blocks(job, worker), job.num_answers
    if worker.available_blocks < num_blocks:
        return WhyNot.NO_BLOCKS
    places = worker.max_num_seqs - worker.num_sequences
    if places < num_places and worker.num_sequences:  # more answers than it has places run one after the other
        return WhyNot.FULL_BATCH
    if job.headroom:
        kept = kept_for_others(job, worker.num_blocks, num_blocks)
        num_places = min(num_places, worker.max_num_seqs)
        kept_places = kept_for_others(job, worker.max_num_seqs, num_places)
        if worker.available_blocks < num_blocks + kept or places < num_places + kept_places:
            return WhyNot.OVER_SHARE
    return None


def park_shortage(job: Job, store: WorkerView) -> WhyNot | None:
    """Returns why the store has no room for the handoff now, or takes none in."""
    if store.available_blocks < store.blocks_for(job.num_tokens):
        return WhyNot.NO_BLOCKS
    return None if store.num_sequences < store.max_num_seqs else WhyNot.FULL_BATCH


def import_blocks(job: Job, worker: WorkerView) -> int:
    """Returns the blocks that a decode worker sets aside for a handoff: its prompt's and one to grow into, and one for
    each further answer, as far as its pool is large enough."""
    fewest = worker.blocks_for(job.num_tokens) + 1
    return fewest if job.num_answers == 1 else max(fewest, min(fewest + job.num_answers - 1, worker.num_blocks))


def kept_for_others(job: Job, room: int, needed: int) -> int:
    """Returns how much of some room the job must leave to other tenants. It is at most half of what the job does not
    need itself: else one that needs most of a worker had to wait until nobody else has anything there."""
    return min(math.ceil(job.headroom * room), max(0, room - needed + 1) // 2) if job.headroom else 0


ISOLATIONS = ("off", "auto")
_MOST_WORKERS = 65536
"""The most names of workers for which it is kept when short prompts used them, before all are forgotten."""
_NOBODY: frozenset[str] = frozenset()


@dataclass(frozen=True)
class LongPromptConfig:
    isolation: str = "off"
    """One of `ISOLATIONS`: whether long prompts are kept off some workers, as far as that pays."""
    window: int = 256
    """How many of the newest prompts say which ones are long."""
    fewest: int = 32
    """With fewer prompts than these nothing is kept."""
    times_mean: float = 2.0
    """The longest prompt that is not long, as a multiple of the mean."""
    most_short: float = 0.5
    """The largest share of the work that the other prompts may be for anything to be kept: beyond it long prompts are
    too few, or too short, and all workers together serve everybody sooner."""
    most_crowded: float = 1.1
    """The most work that a worker left to long prompts may have for it, as a multiple of the mean: it says how many
    workers are kept."""


class LongPrompts:
    """Keeps long prompts off some of the prefill workers, so that short ones need not wait behind them.

    It keeps the lengths of the newest prompts, and when short ones last used each worker; from these follow which
    prompts are long, and how many workers are kept for the others. It is size-interval task assignment, as far as short
    prompts go: they get the workers that their share of the work is worth. But short prompts may use all workers, and
    long ones may use a kept one that nobody seems to need. The length of a prompt is what is to be computed of it: what
    a worker's prefix cache is known to have does not count for that worker.
    """

    def __init__(self, config: LongPromptConfig) -> None:
        self._config = config
        self._newest: deque[int] = deque(maxlen=config.window)
        self._found: tuple[int, float] | None = None
        """What `_bounds` returns, until the next prompt arrives."""
        self._used_s: dict[str, float] = {}

    @property
    def is_on(self) -> bool:
        return self._config.isolation == "auto"

    def arrived(self, num_tokens: int) -> None:
        """Notes a prompt; `num_tokens` of it are in no prefix cache."""
        if self.is_on:
            self._newest.append(num_tokens)
            self._found = None

    def started(self, worker_id: str, num_tokens: int, now: float) -> None:
        """Notes where a prompt was placed; `num_tokens` of it are not in the prefix cache there."""
        if self.is_on and not self.is_long(num_tokens):
            if len(self._used_s) >= _MOST_WORKERS:
                self._used_s.clear()
            self._used_s[worker_id] = now

    def is_long(self, num_tokens: int) -> bool:
        """Returns whether a prompt of `num_tokens` is kept off workers that have none of it in their prefix caches, if
        there are enough workers."""
        longest, share = self._bounds()
        return share > 0 and num_tokens > longest

    def kept(self, job: Job, workers: Sequence[WorkerView], now: float) -> frozenset[str]:
        """Returns those of the workers, each of which could run the job's prompt, that it is to leave to shorter ones:
        never all of them, and of the same ones while the number of workers does not change.

        A worker that has so much of the prompt in its prefix cache that the rest is not long is not left to others.
        """
        if not self.is_long(job.num_tokens):
            return _NOBODY
        _, share = self._bounds()
        needed = math.ceil((1 - share) * len(workers) / self._config.most_crowded)
        kept = sorted(workers, key=lambda worker: worker.worker_id)[: len(workers) - needed]
        uncached = uncached_tokens(kept, job)
        return frozenset(worker.worker_id for worker in kept if not self._may_use(worker, uncached, now))

    def _may_use(self, worker: WorkerView, uncached: Mapping[str, int], now: float) -> bool:
        num_tokens = uncached[worker.worker_id]
        return not self.is_long(num_tokens) or self._is_free(worker, num_tokens, now)

    def _is_free(self, worker: WorkerView, num_tokens: int, now: float) -> bool:
        """Returns whether a kept worker is idle, and short prompts have not needed it for as long as `num_tokens` take
        there: those that come meanwhile wait for all of them. A worker that has measured nothing is not free."""
        takes_s = num_tokens * worker.load.ms_per_prefill_token / 1000
        return worker.idle and takes_s > 0 and now - self._used_s.get(worker.worker_id, -math.inf) >= takes_s

    def _bounds(self) -> tuple[int, float]:
        """Returns the longest prompt that is not long, and the share of the work that these are; (0, 0) if nothing is
        to be kept."""
        if self._found is None:
            config, lengths, self._found = self._config, self._newest, (0, 0.0)
            if len(lengths) >= config.fewest:
                work = sum(lengths)
                longest = int(config.times_mean * work / len(lengths))
                share = sum(length for length in lengths if length <= longest) / work
                if share <= config.most_short:
                    self._found = (longest, share)
        return self._found
