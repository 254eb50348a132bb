"""How soon a request could be through at the earliest, by the costs that workers measure (DESIGN §8). Pure.

Lower bounds throughout: whoever refuses by them must not refuse what could have been met. Work ahead flows like water
to the workers that are free first, prompts are found in prefix caches as often as they were so far, and decode steps
are those of the fastest worker.
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
    """From there to its last token, were it alone."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Of the cluster at one moment; made once for many requests."""

    prefill: _Lane | None
    """Dedicated and mixed prefill workers. None: there is none, or not every one has measured its cost."""
    whole: _Lane | None
    """Workers that decode, for prompts that no prefill worker can hold."""
    prefill_context: int
    """Prompts must be shorter to run on prefill workers, tokens."""
    step_ms: float

    @staticmethod
    def of(workers: Sequence[WorkerView]) -> Costs:
        ready = [worker for worker in workers if worker.ready]
        prefillers = [worker for worker in ready if worker.role.can_prefill]
        decoders = [worker for worker in ready if worker.role.can_decode]
        return Costs(
            _Lane.of(prefillers),
            _Lane.of(decoders),
            max((worker.context_tokens for worker in prefillers), default=0),
            min((worker.load.ms_per_decode_step for worker in decoders), default=0.0),
        )

    def forecast(
        self, num_tokens: int, num_output_tokens: int, tokens_ahead: int, *, overtakes: bool
    ) -> Forecast | None:
        """None while it is not known what its prompt would cost.

        `num_output_tokens`: the fewest it may need; `tokens_ahead`: prompts queued before it in the router;
        `overtakes`: it goes before what is queued at the workers.
        """
        lane = self.prefill if num_tokens < self.prefill_context else self.whole
        if lane is None:
            return None
        prompt_ms = num_tokens * lane.fastest_ms
        run_ms = prompt_ms + max(0, num_output_tokens - 1) * self.step_ms
        return Forecast(lane.wait_ms(tokens_ahead, overtakes=overtakes) / 1000, run_ms / 1000)


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
