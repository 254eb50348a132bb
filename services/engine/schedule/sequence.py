"""Defines what the engine serves: a sequence, its parameters and events, and the records of a step (plan and result).

Pure data. Once a sequence was passed to an engine, that engine is the only writer and the only reader of it; workers
learn from events what becomes of it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from services.core.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Keeps the parameters by which the next token is chosen.

    Their ranges are those of `baton.v1.SamplingParams`, and are checked on arrival.
    """

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
    """How many of the most likely tokens are reported with their log-probabilities, besides the chosen one. With 0 only
    the chosen token's is reported, with None none is."""


@dataclass(frozen=True, slots=True)
class StoppingParams:
    """Keeps the parameters that end a sequence.

    `max_tokens` and `min_tokens` count from output position 0, so a replay keeps their meaning.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    """Tokens that end the sequence: the request's and, unless ignore_eos is set, the model's."""


class Mode(enum.Enum):
    """Says what a sequence does on this worker."""

    GENERATE = "generate"
    """The sequence is prefilled if needed, then decodes to its end."""
    PREFILL_ONLY = "prefill_only"
    """The prompt is computed and one token is sampled; the blocks are left to the lease."""


class State(enum.Enum):
    """Says where a sequence is in the scheduler."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    """The sequence's blocks were taken. It is computed again in chunks, before any new sequence is admitted."""
    FINISHED = "finished"


class Finish(enum.Enum):
    """Says why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True)
class Sequence:
    """Keeps the tokens of one leg and its state.

    `token_ids` is the prompt, then the output received before a replay, then the output produced here. Who makes a
    sequence gives the fields up to `cache_salt`; the others are the engine's.
    """

    seq_id: int
    """Id of the sequence, never used again by this engine."""
    token_ids: list[int]
    num_prompt_tokens: int
    """Tokens given on arrival: the prompt and replayed output. They must be computed before the first token is
    sampled."""
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
    """Tokens whose KV was found in the prefix cache at the (first) admission."""
    block_ids: list[int] = field(default_factory=list)
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of token_ids known so far."""
    admitted_s: float | None = None
    """When it got its blocks; None before."""
    decoding: bool = False
    """Whether the newest token was sampled by the last step, or handed over with the KV of all others."""
    draft_token_ids: tuple[int, ...] = ()
    """Tokens proposed to follow `token_ids`. The next step of the sequence checks as many as have room, and then none
    are left."""

    @property
    def num_new_tokens(self) -> int:
        """Returns how many output tokens were produced here."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def next_position(self) -> int:
        """Returns the output position of the next token to be sampled."""
        return self.output_base + self.num_new_tokens

    @property
    def num_uncomputed(self) -> int:
        return len(self.token_ids) - self.num_computed


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Keeps what the choice of one token depends on, besides the logits."""

    position: int
    """Output position of the token; a part of the noise's key."""
    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt, for the repetition penalty; empty unless `sampling` has penalties."""
    output_token_ids: tuple[int, ...] = ()
    """All output before the token: replayed output and drafts included; empty unless `sampling` has penalties."""
    masked_token_ids: tuple[int, ...] = ()
    """Stop ids that may not be sampled yet because of min_tokens."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Describes a sequence's part of one step, which computes the KV of its tokens from position `start` on."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    """The tokens to compute, at positions start, start + 1, …, of which the last `num_drafts` are drafts."""
    block_ids: tuple[int, ...]
    """Blocks that hold positions 0 … start + num_tokens - 1."""
    rows: tuple[SampleRow, ...] = ()
    """One for each of the last tokens of the part, whose logits are sampled: the sequence's newest token and its
    drafts. Empty if the step does not reach the sequence's newest token."""
    is_decode: bool = False
    """Whether the sequence was decoding (see `Sequence.decoding`) when the step was scheduled."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_drafts(self) -> int:
        return max(0, len(self.rows) - 1)

    @property
    def draft_token_ids(self) -> tuple[int, ...]:
        return self.token_ids[self.num_tokens - self.num_drafts :]


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Lists the parts that one step runs, decodes first. Without parts there is nothing to run."""

    step_number: int
    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[int, ...] = ()
    """Ids of the sequences that were preempted when the step was scheduled."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_decodes(self) -> int:
        """Returns how many sequences decode."""
        return sum(sequence.is_decode for sequence in self.sequences)

    @property
    def num_prefill_tokens(self) -> int:
        """Returns how many tokens the other sequences compute: of prompts, or again."""
        return self.num_tokens - self.num_decode_tokens

    @property
    def num_decode_tokens(self) -> int:
        """Returns how many tokens the decoding sequences compute: one each, and their drafts."""
        return sum(sequence.num_tokens for sequence in self.sequences if sequence.is_decode)


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Keeps a token that was sampled, with log-probabilities if they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens as (token id, log-probability), the likeliest first."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Keeps the result of one step."""

    sampled: Mapping[int, tuple[SampledToken, ...]]
    """The tokens sampled from the rows of each part that has rows, by seq_id. `step.accepted` returns those that are
    output: tokens after a wrong draft are not."""
    inputs_s: float = 0.0
    """Seconds that it took to prepare the inputs."""
    model_s: float = 0.0
    """Seconds of the forward pass; on an accelerator only those of starting it."""
    sample_s: float = 0.0
    """Seconds of sampling; on an accelerator also those of waiting for the forward pass."""


# The events that the scheduler returns, in order (see `Scheduler`).


@dataclass(frozen=True, slots=True)
class Admitted:
    """A waiting sequence got all blocks of its prompt. For PREFILL_ONLY the lease's references are taken already."""

    seq_id: int
    block_ids: tuple[int, ...]
    num_cached: int
    now: float


@dataclass(frozen=True, slots=True)
class Progress:
    """The KV of a PREFILL_ONLY sequence's first `num_computed` tokens is in the pool, and final."""

    seq_id: int
    num_computed: int
    now: float


@dataclass(frozen=True, slots=True)
class Token:
    """A sequence's next token was sampled. `finish` says why it ends the sequence's output; None if it does not."""

    seq_id: int
    position: int
    token: SampledToken
    finish: Finish | None
    stop_token_id: int | None
    now: float


@dataclass(frozen=True, slots=True)
class Failed:
    """The sequence ended with an error: its step raised, or it can never fit."""

    seq_id: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Preempted:
    """The sequence's blocks went to others. It waits, is computed again and goes on; no further event reports that."""

    seq_id: int
    now: float


SequenceEvent = Admitted | Progress | Token | Failed | Preempted
