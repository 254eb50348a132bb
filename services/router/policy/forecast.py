"""How soon a request could be through, by the costs that workers measure (DESIGN §8). Pure.

At the earliest: lower bounds throughout, since whoever refuses by them must not refuse what could have been met. Work
ahead flows like water to the workers that are free first, prompts are found in prefix caches as often as they were so
far, and decode steps are those of the fastest worker.

As expected: its output is as long as others' were, and it shares its decode steps with all that is under way. Without
that a busy cluster takes on more than it can finish, and finishes everything late.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.router.policy.views import WorkerView


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds."""

    wait_s: float
    """Until its prompt begins, behind what is queued."""
    run_s: float
    """From there to its last token, were it alone, with the shortest output."""
    expected_s: float
    """Until its last token, among the others."""
    alone_s: float
    """The same, were it alone."""


@dataclass(frozen=True, slots=True)
class Work:
    """A request, in tokens."""

    num_tokens: int
    """Its prompt."""
    fewest_output_tokens: int
    output_tokens: float
    """As many as are expected."""


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the router has accepted before it."""

    num_tokens: int = 0
    """Of prompts that are still queued in the router."""
    num_sequences: int = 0
    """Of requests that no decode worker has yet."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of the cluster at one moment; made once for many requests."""

    prefill: _Lane | None
    """Dedicated and mixed prefill workers. None: there is none, or not every one has measured its cost."""
    whole: _Lane | None
    """Workers that decode, for prompts that no prefill worker can hold."""
    prefill_context: int
    """Prompts must be shorter to run on prefill workers, tokens."""
    decoders: tuple[WorkerView, ...]

    @staticmethod
    def of(workers: Sequence[WorkerView]) -> Costs:
        ready = [worker for worker in workers if worker.ready]
        prefillers = [worker for worker in ready if worker.role.can_prefill]
        decoders = [worker for worker in ready if worker.role.can_decode]
        return Costs(
            _Lane.of(prefillers),
            _Lane.of(decoders),
            max((worker.context_tokens for worker in prefillers), default=0),
            tuple(decoders),
        )

    def forecast(self, work: Work, ahead: Ahead, *, overtakes: bool) -> Forecast | None:
        """None while it is not known what a prompt costs. `overtakes`: it goes before what workers have queued."""
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
        """On the decode worker where it is over first; those ahead are spread evenly."""
        return min(
            (
                _decode_ms(worker, output_tokens, worker.num_sequences + sequences_ahead / len(self.decoders) + 1)
                for worker in self.decoders
            ),
            default=0.0,
        )


def _decode_ms(worker: WorkerView, output_tokens: float, num_sequences: float) -> float:
    """Of one among so many; more than fit in a step wait until others, as long as it, have ended."""
    step_ms = worker.step_ms(num_sequences)
    turns = max(0.0, num_sequences / worker.max_num_seqs - 1)
    return (max(0.0, output_tokens - 1) + turns * output_tokens) * step_ms


@dataclass(frozen=True, slots=True)
class _Lane:
    """Workers that could run a prompt."""

    queues: tuple[tuple[float, float], ...]
    """Of each, the one that is free first before others: milliseconds until then, and milliseconds a token."""

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
        """When the first worker is free, after `tokens` more went wherever they could begin first."""
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
