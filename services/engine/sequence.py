"""What the engine serves: a sequence, its parameters, and the two records of a step (plan and result).

Pure data. The scheduler is the only writer of `Sequence`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen; ranges are those of `baton.v1.SamplingParams`, checked on arrival."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    num_logprobs: int | None = None
    """None: no log-probabilities. 0: only the chosen token's."""


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """`max_tokens` and `min_tokens` count from output position 0, so a replay keeps their meaning."""

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Effective stop ids: the request's and, unless ignore_eos, the model's."""


class Mode(enum.Enum):
    GENERATE = "generate"
    """Prefill if needed, then decode to the end."""
    PREFILL_ONLY = "prefill_only"
    """Compute the prompt, sample one token, leave the blocks to the lease."""


class State(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """Blocks were taken; recomputes in chunks, before any new sequence is admitted."""
    FINISHED = "finished"


class Finish(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class Sequence:
    """One leg's work. `token_ids` = prompt, output received before a replay, output produced here."""

    seq_id: int
    """Unique in this engine for its lifetime."""
    token_ids: list[int]
    num_prompt_tokens: int
    """Tokens given on arrival (prompt and replayed output); what must be computed before the first sample."""
    sampling: SamplingParams
    stopping: StoppingParams
    arrival_s: float
    output_base: int = 0
    """Output position of the first token sampled here."""
    mode: Mode = Mode.GENERATE
    priority: int = 0
    cache_salt: str = ""
    state: State = State.WAITING
    num_computed: int = 0
    """Tokens whose KV is in the pool."""
    num_cached: int = 0
    """Of these, found in the prefix cache at (first) admission."""
    block_ids: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of token_ids known so far."""
    admitted_s: float | None = None

    @property
    def num_new_tokens(self) -> int:
        """Output tokens produced here."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def next_position(self) -> int:
        """Output position of the next token sampled."""
        return self.output_base + self.num_new_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's part of one step: compute KV of token_ids[start : start + num_tokens]."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    """The num_tokens tokens to run, at positions start, start + 1, …"""
    block_ids: tuple[int, ...]
    """Blocks covering positions 0 … start + num_tokens - 1."""
    samples: bool
    """The last token's logits are sampled (the step reaches the end of token_ids)."""
    position: int
    """Output position of the sampled token (noise key)."""
    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    """Given tokens, for repetition penalty; only filled when `sampling` has penalties."""
    output_token_ids: tuple[int, ...] = ()
    """All output so far including what was replayed; only filled when `sampling` has penalties."""
    masked_token_ids: tuple[int, ...] = ()
    """Stop ids that may not be sampled yet (min_tokens)."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step runs; `sequences` has decodes first. Empty: nothing to do."""

    step_number: int
    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_decodes(self) -> int:
        """Sequences that compute a single token."""
        return sum(sequence.num_tokens == 1 for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class SampledToken:
    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """(token id, log-probability), best first."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled tokens by seq_id, for the sequences with `samples`."""

    sampled: Mapping[int, SampledToken]
    inputs_s: float = 0.0
    """How long the device took, part by part: inputs, the forward pass, sampling."""
    model_s: float = 0.0
    sample_s: float = 0.0


# What `Scheduler.schedule` and `Scheduler.update` report, in order.


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting sequence has all its prompt's blocks. For PREFILL_ONLY the lease's references are taken already."""

    seq_id: int
    block_ids: tuple[int, ...]
    num_cached: int
    now: float


@dataclass(frozen=True, slots=True)
class Progress:
    """A PREFILL_ONLY sequence's first `num_computed` tokens are in the pool, and final."""

    seq_id: int
    num_computed: int
    now: float


@dataclass(frozen=True, slots=True)
class Token:
    seq_id: int
    position: int
    token: SampledToken
    finish: Finish | None
    stop_token_id: int | None
    now: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence ended without finishing (its step raised, or it can never fit)."""

    seq_id: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Preempted:
    """Its blocks went to others. It waits, is computed again, and goes on: no other event tells of that."""

    seq_id: int
    now: float


SequenceEvent = Admitted | Progress | Token | Failed | Preempted
