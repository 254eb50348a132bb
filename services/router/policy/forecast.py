"""Forecasts how soon a request could be finished, from the costs that workers measure. Pure.

A forecast has two kinds of figures. The earliest times are lower bounds throughout, since a request that is refused by
them must be one that could not have been met. They assume that the work ahead is divided among the workers so that each
part begins as early as possible, that prompts are found in prefix caches as often as they were so far, and that decode
steps take as long as those of the fastest worker.

The expected times assume that the output is as long as others' were, and that its decode steps are shared with all
sequences under way. Without them a busy cluster would accept more than it can finish, and finish everything late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    """Sequences of requests that no decode worker has yet."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Holds what the cluster's workers cost at one moment. Make it once for many requests."""

    prefill: _Lane | None
    """The prefill and mixed workers; None if there is none, or not every one has measured its cost."""
    whole: _Lane | None
    """The workers that decode, for prompts that no prefill worker can hold; None as for `prefill`."""
    prefill_context: int
    """Prompts must have fewer tokens than this to run on prefill workers."""
    decoders: tuple[WorkerView, ...]

    @staticmethod
    def of(workers: Sequence[WorkerView]) -> Costs:
        ready = [worker for worker in workers if worker.ready]
        prefillers = [worker for worker in ready if worker.roles.can_prefill]
        decoders = [worker for worker in ready if worker.roles.can_decode]
        return Costs(
            _Lane.of(prefillers),
            _Lane.of(decoders),
            max((worker.context_tokens for worker in prefillers), default=0),
            tuple(decoders),
        )

    def forecast(self, work: Work, ahead: Ahead, *, overtakes: bool) -> Forecast | None:
        """Returns the forecast of one request, or None while it is not known what a prompt costs.

        `overtakes` means that it goes before what the workers have queued.
        """
        lane = self.prefill if work.num_tokens < self.prefill_context else self.whole
        if lane is None:
            return None
        prompt_ms = work.num_tokens * lane.fastest_ms
        wait_ms = lane.wait_ms(ahead.num_tokens, overtakes=overtakes)
        step_ms = min((worker.step_ms(1) for worker in self.decoders), default=0.0)
        return Forecast(
            wait_s=wait_ms / 1000,
            run_s=(prompt_ms + max(0, work.fewest_output_tokens - 1) * step_ms) / 1000,
            expected_s=(wait_ms + prompt_ms + self._decode_ms(work.output_tokens, ahead.num_sequences)) / 1000,
            alone_s=(prompt_ms + max(0.0, work.output_tokens - 1) * step_ms) / 1000,
        )

    def _decode_ms(self, output_tokens: float, sequences_ahead: int) -> float:
        """Returns the milliseconds of its decode on the worker where it ends first; those ahead are spread evenly."""
        return min(
            (
                _decode_ms(worker, output_tokens, worker.num_sequences + sequences_ahead / len(self.decoders) + 1)
                for worker in self.decoders
            ),
            default=0.0,
        )


def _decode_ms(worker: WorkerView, output_tokens: float, num_sequences: float) -> float:
    """Returns the milliseconds of one sequence's decode among `num_sequences`.

    Sequences that do not fit in a step wait until others, assumed to be as long, have ended.
    """
    step_ms = worker.step_ms(num_sequences)
    turns = max(0.0, num_sequences / worker.max_num_seqs - 1)
    return (max(0.0, output_tokens - 1) + turns * output_tokens) * step_ms


@dataclass(frozen=True, slots=True)
class _Lane:
    """Holds the workers that could run a prompt, with their queues."""

    queues: tuple[tuple[float, float], ...]
    """For each worker (milliseconds until it is free, milliseconds per token); the first to be free comes first."""

    @staticmethod
    def of(workers: Sequence[WorkerView]) -> _Lane | None:
        if not workers or any(worker.load.ms_per_prefill_token <= 0 for worker in workers):
            return None
        uncached = min(_uncached_share(worker) for worker in workers)
        costs = [(worker.queued_tokens, worker.load.ms_per_prefill_token * uncached) for worker in workers]
        return _Lane(tuple(sorted((num_tokens * token_ms, token_ms) for num_tokens, token_ms in costs)))

    @property
    def fastest_ms(self) -> float:
        return min(token_ms for _, token_ms in self.queues)

    def wait_ms(self, tokens: float, *, overtakes: bool) -> float:
        """Returns the milliseconds until a worker is free after `tokens` more, each begun where it can be first."""
        level_ms, tokens_per_ms = 0.0 if overtakes else self.queues[0][0], 0.0
        for queue_ms, token_ms in self.queues:
            start_ms = 0.0 if overtakes else queue_ms
            taken = (start_ms - level_ms) * tokens_per_ms
            if taken > tokens:
                break
            tokens -= taken
            level_ms = start_ms
            tokens_per_ms += 1 / token_ms if token_ms else 0.0
        return level_ms + tokens / tokens_per_ms if tokens_per_ms else level_ms


def _uncached_share(worker: WorkerView) -> float:
    load = worker.load
    return 1.0 - load.prefix_tokens_hit / load.prefix_tokens_queried if load.prefix_tokens_queried else 1.0
