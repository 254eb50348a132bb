"""Decides whether a prompt runs apart from its decode, by what workers and their handoffs have been measured to cost.
Pure.

Splitting keeps prompts from delaying streams, and costs a handoff. A prompt that is not split runs on the worker that
decodes: it needs no handoff, but every sequence that decodes there waits for it. Both sides are compared in
milliseconds of waiting. What both have in common, such as the fixed part of a step, is left out.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

from services.router.policy.views import Job, WorkerView

TPOT_WEIGHT = 20.0
"""How many milliseconds until the new request's first token are worth one more for each token of one stream: as many as
in the usual objectives, which allow 2 s for the first token and 100 ms for each further one."""


_SIMILAR_STEPS = 2.0
"""Costs are compared as measured if the steps of which they are differ in prompt tokens by at most this factor."""


class Split(enum.Enum):
    """Says which prompts run apart from their decodes, where both ways are open."""

    AUTO = "auto"
    """Those for which it pays."""
    ALWAYS = "always"
    NEVER = "never"


DEFAULT_SPLIT = Split.ALWAYS
"""What a token costs is measured in steps of the sizes that workers have had: `auto` is for those who ask for it, until
it is shown to hold for real workers."""


class WhyUnsplit(enum.Enum):
    """Says what weighed most for not splitting a sequence; the values are words for people."""

    QUEUE = "prompts wait at the prefill workers"
    PREFIX = "more of the prompt is cached at the decode worker"
    HANDOFF = "the handoff would take longer than the prompt delays others"
    SPEED = "the decode worker computes prompts faster"
    NEVER = "--split never"


class WhySplit(enum.Enum):
    """Says why a prompt runs apart under `Split.AUTO`; the values are words for people."""

    CHEAPER = "it costs less"
    NO_ROOM = "no decode worker has room for all of it beside the handoffs on their way"
    UNKNOWN = "what a prompt costs is not yet measured at both"


@dataclass(frozen=True, slots=True)
class SplitCosts:
    """Holds what the two ways cost, in milliseconds of waiting."""

    queue_ms: float
    """Until the prompt's turn at the prefill worker."""
    prefill_ms: float
    """To compute there what its prefix cache lacks."""
    handoff_ms: float
    """From there to the decode worker, as far as nothing hides it; 0 while it is not known."""
    unsplit_queue_ms: float
    """Until the prompt's turn at the decode worker, and what its sequences add to the prompt's step."""
    unsplit_prefill_ms: float
    """To compute there what its prefix cache lacks."""
    disturbance_ms: float
    """What the sequences there wait for that, all together, and weighted: see `split_costs`."""
    cached_tokens: int
    """Tokens of the prompt that the prefill worker need not compute."""
    unsplit_cached_tokens: int
    """Those that the decode worker need not compute."""

    @property
    def split_ms(self) -> float:
        return self.queue_ms + self.prefill_ms + self.handoff_ms

    @property
    def unsplit_ms(self) -> float:
        return self.unsplit_queue_ms + self.unsplit_prefill_ms + self.disturbance_ms

    @property
    def splits(self) -> bool:
        return self.split_ms <= self.unsplit_ms

    @property
    def why_unsplit(self) -> WhyUnsplit:
        """Returns what speaks most for running all of it on the decode worker."""
        has_more = self.unsplit_cached_tokens > self.cached_tokens
        savings = {
            WhyUnsplit.HANDOFF: self.handoff_ms,
            WhyUnsplit.PREFIX if has_more else WhyUnsplit.SPEED: self.prefill_ms - self.unsplit_prefill_ms,
            WhyUnsplit.QUEUE: self.queue_ms - self.unsplit_queue_ms,
        }
        return max(savings, key=savings.__getitem__)


def split_costs(
    job: Job, source: WorkerView, target: WorkerView, handoff_ms: float | None, output_tokens: float
) -> SplitCosts | None:
    """Returns what it costs to run the prompt on `source` and hand it over, and to run all of it on `target`; None
    while either has not measured what a prompt costs.

    `handoff_ms` is what the handoff is expected to take; None while that is not known. A sequence that waits shares the
    delay among its tokens, which are `output_tokens` as a rule; 1 while that is not known, which counts for splitting.
    """
    if (ms := _token_ms(source, target)) is None:
        return None
    source_ms, target_ms = ms
    uncached, unsplit_uncached = source.uncached_tokens(job), target.uncached_tokens(job)
    unsplit_prefill_ms = unsplit_uncached * target_ms
    return SplitCosts(
        queue_ms=source.queued_tokens * source_ms,
        prefill_ms=uncached * source_ms,
        handoff_ms=handoff_ms or 0.0,
        unsplit_queue_ms=_unsplit_queue_ms(target, target_ms),
        unsplit_prefill_ms=unsplit_prefill_ms,
        disturbance_ms=_disturbance(target, output_tokens) * unsplit_prefill_ms,
        cached_tokens=job.num_tokens - uncached,
        unsplit_cached_tokens=job.num_tokens - unsplit_uncached,
    )


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Says from where on splitting pays, as things are."""

    prefill_id: str
    decode_id: str
    """The worker that a handoff would go to. An unsplit sequence may be given another."""
    tokens: float
    """Prompts with fewer uncached tokens had better not be split: 0 if none had, infinite if all had."""
    handoff_ms: float | None
    """What the handoff of such a prompt takes, or of a step's tokens where no prompt is long enough; None while that is
    not known."""


_MOST_TOKENS = 2.0**40
"""The longest prompt that is looked at: where splitting does not pay for it, it pays for none."""


def break_even(
    source: WorkerView, target: WorkerView, handoff_ms: Callable[[float], float | None], output_tokens: float
) -> BreakEven | None:
    """Returns the break-even between the two workers, by the same costs; None while it is not known what a prompt costs
    there. `handoff_ms` maps the tokens of a handoff to the milliseconds that it is expected to take."""
    if (ms := _token_ms(source, target)) is None:
        return None
    source_ms, target_ms = ms
    saved_ms = source.queued_tokens * source_ms - _unsplit_queue_ms(target, target_ms)
    token_ms = (1 + _disturbance(target, output_tokens)) * target_ms - source_ms

    def pays(tokens: float) -> bool:
        return saved_ms + (handoff_ms(tokens) or 0.0) <= tokens * token_ms

    # Of a slow pair a few tokens may pay, more not, and many again, since those are copied while others are computed.
    fewer, tokens = 0.0, _MOST_TOKENS if pays(_MOST_TOKENS) else math.inf
    while math.isfinite(tokens) and tokens - fewer > 0.01:
        middle = (fewer + tokens) / 2
        fewer, tokens = (fewer, middle) if pays(middle) else (middle, tokens)
    tokens = tokens if fewer or math.isinf(tokens) else 0.0
    shown = handoff_ms(source.load.tokens_per_prefill_step if math.isinf(tokens) else tokens)
    return BreakEven(source.worker_id, target.worker_id, tokens, shown)


def _token_ms(source: WorkerView, target: WorkerView) -> tuple[float, float] | None:
    """Returns what a token of a prompt costs at each of the two, in milliseconds; None while it is not known.

    Part of what a step costs does not depend on its tokens, and each of them seems to cost more where steps have few: a
    decode worker has hardly any others. So figures of steps that differ much in size are not compared: that of the
    larger steps counts for both workers, if they are of one kind.
    """
    mine, theirs = source.load, target.load
    if not mine.ms_per_prefill_token or not theirs.ms_per_prefill_token:
        return None
    if mine.has_steps_like(theirs, _SIMILAR_STEPS):
        return mine.ms_per_prefill_token, theirs.ms_per_prefill_token
    many = max(mine, theirs, key=lambda load: load.tokens_per_prefill_step)
    return (many.ms_per_prefill_token,) * 2 if source.hardware == target.hardware else None


def _unsplit_queue_ms(target: WorkerView, token_ms: float) -> float:
    return target.queued_tokens * token_ms + target.num_sequences * target.load.ms_per_decode_sequence


def _disturbance(target: WorkerView, output_tokens: float) -> float:
    """Returns what a millisecond of a prompt costs the sequences there. The one that comes next counts too: else an
    idle worker would be given the longest prompts."""
    return TPOT_WEIGHT * (target.num_sequences + 1) / max(1.0, output_tokens)
