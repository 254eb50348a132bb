"""Forecasts how soon a request could be finished, from the costs that workers measure. Pure.

A forecast has two kinds of figures. The earliest times are lower bounds throughout, since a request that is refused by
them must be one that could not have been met. They assume that the work ahead is divided among the workers so that each
part begins as early as possible, that prompts are found in prefix caches as often as they were so far, and that decode
steps take as long as those of the fastest worker. Where a prompt could run apart from its decode or not, they are those
of prefill and decode workers together: the work ahead may go either way too.

The expected times assume that the output is as long as others' were, and that its decode steps are shared with all
sequences under way, and with prompts where decode workers compute these. Without them a busy cluster would accept more
than it can finish, and finish everything late.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from services.router.policy.splitting import Split
from services.router.policy.views import WorkerView


@dataclass(frozen=True, slots=True)
class Forecast:
    """Says when a request could run and end. All times are in seconds."""

    wait_s: float
    """Earliest time until its prompt begins, behind what is queued."""
    run_s: float
    """Time from the beginning of its prompt to its last token, if it were alone and had the shortest output."""
    expected_s: float
    """Expected time until its last token, among the other sequences."""
    alone_s: float
    """Expected time until its last token, if it were alone."""


@dataclass(frozen=True, slots=True)
class Work:
    """Describes a request by its tokens."""

    num_tokens: int
    """Tokens of its prompt."""
    fewest_output_tokens: int
    output_tokens: float
    """As many output tokens as are expected."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """Counts what the router has accepted before the request."""

    num_tokens: int = 0
    """Tokens of prompts that are still queued in the router."""
    num_sequences: int = 0
    """Sequences of requests that no decode worker has yet, queued or on their way."""
    prompt_tokens: float = 0.0
    """Tokens of all their prompts, together."""
    output_tokens: float = 0.0
    """As many output tokens as are expected of all of them, together."""
    tokens_left: Sequence[float] = ()
    """Output tokens that sequences which decode now are still expected to get, in ascending order. It may have some of
    the workers' sequences only: then it stands for the others too. Empty if nothing is known: then they are assumed to
    end evenly."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds what the cluster's workers cost at one moment. Make it once for many requests."""

    usual: tuple[_Way, ...]
    """The ways of a prompt that a prefill worker can hold, as `--split` has it; none while it is not known what one
    costs there."""
    unsplit: tuple[_Way, ...]
    """As `usual`, for prompts that no prefill worker can hold."""
    prefill_context: int
    """Prompts must have fewer tokens than this to run on prefill workers."""
    decoders: tuple[WorkerView, ...]
    """Without those that are ejected, unless all are. The emptiest first: there a request is likeliest to end soon
    enough, and the search for a worker ends."""
    lone_step_ms: float
    """Milliseconds of the fastest worker's step with a single sequence."""

    @staticmethod
    def of(workers: Sequence[WorkerView], split: Split = Split.ALWAYS) -> Costs:
        ready = [worker for worker in workers if worker.ready]
        prefillers = [worker for worker in ready if worker.roles.can_prefill]
        decoders = [worker for worker in ready if worker.roles.can_decode]
        quick = [worker for worker in decoders if not worker.ejected] or decoders
        apart, on_decoders = _ways(prefillers), _ways(decoders, decoders_prefill=True)
        usual = on_decoders if split is Split.NEVER and decoders else apart
        if split is Split.AUTO and apart:  # one that has measured no prompt is given none that could be split
            others = [worker for worker in decoders if not worker.roles.can_prefill]
            measured = [worker for worker in others if worker.load.ms_per_prefill_token]
            usual = apart + (_ways([*prefillers, *measured], decoders_prefill=True) if measured else ())
        return Costs(
            usual,
            on_decoders,
            max((worker.context_tokens for worker in prefillers), default=0),
            tuple(sorted(quick, key=lambda worker: worker.num_sequences / worker.max_num_seqs)),
            min((worker.step_ms(1) for worker in decoders), default=0.0),
        )

    def forecast(self, work: Work, ahead: Ahead, *, overtakes: bool, enough_s: float = 0.0) -> Forecast | None:
        """Returns the forecast of one request, or None while it is not known what a prompt costs.

        `overtakes` means that it goes before what the workers have queued. The expected time is that of the best way
        and worker, or of one that ends within `enough_s`: many forecasts are made in a turn of the event loop.
        """
        ways = self.usual if work.num_tokens < self.prefill_context else self.unsplit
        if not ways:
            return None
        wait_ms, expected_ms = math.inf, math.inf
        for way in ways:
            begins_ms = way.lane.wait_ms(ahead.num_tokens, overtakes=overtakes)
            wait_ms = min(wait_ms, begins_ms)
            if expected_ms > enough_s * 1000:
                begins_ms += work.num_tokens * way.lane.fastest_ms
                expected_ms = min(
                    expected_ms, begins_ms + self._decode_ms(work, ahead, way, enough_s * 1000 - begins_ms)
                )
        prompt_ms = work.num_tokens * min(way.lane.fastest_ms for way in ways)
        return Forecast(
            wait_s=wait_ms / 1000,
            run_s=(prompt_ms + max(0, work.fewest_output_tokens - 1) * self.lone_step_ms) / 1000,
            expected_s=expected_ms / 1000,
            alone_s=(prompt_ms + max(0.0, work.output_tokens - 1) * self.lone_step_ms) / 1000,
        )

    def _decode_ms(self, work: Work, ahead: Ahead, way: _Way, enough_ms: float) -> float:
        """Returns the milliseconds of its decode on the worker where it ends first, or on one where they are at most
        `enough_ms`, with its wait for a place in a worker's steps; those ahead are spread evenly."""
        if not self.decoders:
            return 0.0
        further = ahead.num_sequences / len(self.decoders) + 1
        each, fewest_ms = _average(work, ahead), math.inf
        for worker in self.decoders:
            prefills = way.decoders_prefill or worker.roles.can_prefill
            fewest_ms = min(fewest_ms, _decode_ms(worker, work, each, further, ahead.tokens_left, prefills=prefills))
            if fewest_ms <= enough_ms:
                break
        return fewest_ms


def _average(work: Work, ahead: Ahead) -> Work:
    """Returns what the requests ahead and this one are on average. A long one among many short ones waits for those:
    if each were taken as a long one they would seem to need several times the room and the steps."""
    number = ahead.num_sequences + 1
    prompt_tokens = (ahead.prompt_tokens + work.num_tokens) / number
    return Work(math.ceil(prompt_tokens), 0, (ahead.output_tokens + work.output_tokens) / number)


def _decode_ms(
    worker: WorkerView, work: Work, each: Work, further: float, tokens_left: Sequence[float], *, prefills: bool
) -> float:
    """Returns the milliseconds of the decode of the last of `further` sequences, the others of which are as `each`.

    Sequences that the worker cannot run at once begin when others have ended. How many it can run follows from its
    pool: now from what those that run leave of it, and later, when these have ended, from the whole of it. On a worker
    that computes prompts too (`prefills`), one takes the place of each that ends, and is computed between the steps.
    """
    blocks_each = worker.blocks_for(math.ceil(each.num_tokens + each.output_tokens))
    to_grow = worker.num_sequences * each.output_tokens / 2 / worker.block_size  # they are half way, on average
    more = math.floor((worker.available_blocks - to_grow) / blocks_each)
    most_now = max(1, min(worker.max_num_seqs, worker.num_sequences + more))
    most_later = max(1, min(worker.max_num_seqs, worker.num_blocks // blocks_each))
    num_without_place = worker.num_sequences + further - most_now
    num_running = most_later if num_without_place > 0 else worker.num_sequences + further
    step_ms = worker.step_ms(num_running)
    if prefills:
        prompt_ms = each.num_tokens * worker.load.ms_per_prefill_token * _uncached_share(worker)
        step_ms += num_running / max(1.0, each.output_tokens) * prompt_ms
    waited_tokens = 0.0
    if num_without_place > 0:
        waited_tokens = _tokens_until_a_place(num_without_place, most_later, each.output_tokens, tokens_left)
    return (max(0.0, work.output_tokens - 1) + waited_tokens) * step_ms


def _tokens_until_a_place(number: float, most: int, output_tokens: float, tokens_left: Sequence[float]) -> float:
    """Returns the tokens of each running sequence until the one of that number in line has a place among `most`.

    Those in line take the places of the running ones in the order in which these end, and then one another's.
    """
    rounds, place = divmod(max(0.0, number - 1), most)
    first = tokens_left[int(place / most * len(tokens_left))] if tokens_left else (place + 1) / most * output_tokens
    return rounds * output_tokens + first


@dataclass(frozen=True, slots=True)
class _Way:
    """Says where prompts may be computed."""

    lane: _Lane
    decoders_prefill: bool
    """Whether decode workers compute prompts between their steps, so that streams wait for them."""


def _ways(workers: Sequence[WorkerView], *, decoders_prefill: bool = False) -> tuple[_Way, ...]:
    """Returns the way of prompts over these workers; none if there is none, or one has not measured its cost."""
    lane = _Lane.of(workers)
    return () if lane is None else (_Way(lane, decoders_prefill),)


@dataclass(frozen=True, slots=True)
class _Lane:
    """Holds the workers that could run a prompt: how their queues fill, each next token where it can begin first."""

    fastest_ms: float
    """Milliseconds per token of the fastest worker."""
    idle: _Filling
    """How they would fill if they had nothing queued."""
    queued: _Filling
    """How they fill on top of what they have queued."""

    @staticmethod
    def of(workers: Sequence[WorkerView]) -> _Lane | None:
        if not workers or any(worker.load.ms_per_prefill_token <= 0 for worker in workers):
            return None
        uncached = min(_uncached_share(worker) for worker in workers)
        costs = [(worker.queued_tokens, worker.load.ms_per_prefill_token * uncached) for worker in workers]
        return _Lane(
            min(token_ms for _, token_ms in costs),
            _Filling.of([(0.0, token_ms) for _, token_ms in costs]),
            _Filling.of([(num_tokens * token_ms, token_ms) for num_tokens, token_ms in costs]),
        )

    def wait_ms(self, tokens: float, *, overtakes: bool) -> float:
        """Returns the milliseconds until a worker is free after `tokens` more, each begun where it can be first."""
        return (self.idle if overtakes else self.queued).wait_ms(tokens)


@dataclass(frozen=True, slots=True)
class _Filling:
    """Maps tokens that are added to queues to the time until one of the workers is free."""

    tokens: tuple[float, ...]
    """The tokens with which one more worker's queue is as short as the others': ascending."""
    levels: tuple[tuple[float, float], ...]
    """For each of them (milliseconds until those workers are free, tokens they compute in a millisecond)."""

    @staticmethod
    def of(queues: Sequence[tuple[float, float]]) -> _Filling:
        """Makes it of each worker's (milliseconds until it is free, milliseconds per token)."""
        tokens: list[float] = []
        levels: list[tuple[float, float]] = []
        added, level_ms, speed = 0.0, min(queue_ms for queue_ms, _ in queues), 0.0
        for queue_ms, token_ms in sorted(queues):
            added += (queue_ms - level_ms) * speed
            level_ms = queue_ms
            speed += 1 / token_ms if token_ms else 0.0
            tokens.append(added)
            levels.append((level_ms, speed))
        return _Filling(tuple(tokens), tuple(levels))

    def wait_ms(self, tokens: float) -> float:
        index = bisect_right(self.tokens, tokens) - 1
        level_ms, speed = self.levels[index]
        return level_ms + (tokens - self.tokens[index]) / speed if speed else level_ms


def _uncached_share(worker: WorkerView) -> float:
    load = worker.load
    return 1.0 - load.prefix_tokens_hit / load.prefix_tokens_queried if load.prefix_tokens_queried else 1.0
