"""Defines what the engine serves: a sequence, its parameters and events, and the records of a step (plan and result).

Pure data. Once a sequence was passed to an engine, that engine is the only writer and the only reader of it; workers
learn from events what becomes of it.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.core.errors import BatonError
from services.core.hashing import BlockHash
from services.engine.schedule.constraint import TokenConstraint


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
    allowed_token_ids: tuple[int, ...] = ()
    """The only tokens that may be sampled; empty for all."""
    bad_token_ids: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that the output never has."""
    num_logprobs: int | None = None
    """How many of the most likely tokens are reported with their log-probabilities, besides the chosen one. With 0 only
    the chosen token's is reported, with None none is."""

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0

    def barred_after(self, output: Seq[int]) -> tuple[int, ...]:
        """Returns the tokens that would complete one of `bad_token_ids` after this output."""
        return tuple(
            bad[-1]
            for bad in self.bad_token_ids
            if len(output) >= len(bad) - 1 and tuple(output[len(output) - len(bad) + 1 :]) == bad[:-1]
        )


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
    sequence gives the fields up to `num_prompt_logprobs`; the others are the engine's.
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
    constraint: TokenConstraint | None = None
    """What its output is held to: tokens that it does not allow are masked, after biases and penalties and before
    temperature and filters, and the stop tokens are allowed exactly where the output may end. It has taken the output
    received before a replay; the engine tells it what is sampled here, token 0 of a handoff included. The sequence
    fails with ConstraintUnsatisfied where nothing is left. An engine without masks is given none."""
    num_prompt_logprobs: int | None = None
    """How many of the most likely tokens are reported for each token of the prompt, besides that token itself
    (`PromptScored`); with None none is. Replayed output is not part of the prompt."""
    further: list[Sequence] = field(default_factory=list)
    """Sequences of the same tokens, one for each further answer, with sampling of their own. This one computes the
    tokens for all: their first tokens are sampled from the same logits as its own, and then each goes on by itself.
    Only a sequence that is added has them; they are not added, and have none."""
    state: State = State.WAITING
    num_computed: int = 0
    """Tokens whose KV is in the pool."""
    num_cached: int = 0
    """Tokens whose KV was found in the prefix cache at the (first) admission."""
    block_ids: list[int] = field(default_factory=list)
    reserved_ids: list[int] = field(default_factory=list)
    """Blocks set aside for the further sequences, each of which needs one of its own if the last block of the prompt is
    not full."""
    hashes: list[BlockHash] = field(default_factory=list)
    """Hashes of the full blocks of token_ids known so far."""
    admitted_s: float | None = None
    """When it got its blocks; None before."""
    decoding: bool = False
    """Whether the newest token was sampled by the last step, or handed over with the KV of all others."""
    num_told: int = 0
    """How many of the output tokens produced here the constraint was told of."""
    num_scored: int = 1
    """Tokens of the prompt whose log-probabilities were reported, if they are wanted. The first token counts: it has
    none."""

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

    @property
    def is_scored(self) -> bool:
        """Returns whether no log-probability of its prompt is to be reported any more."""
        return self.num_prompt_logprobs is None or self.num_scored >= self.num_prompt_tokens - self.output_base


@dataclass(frozen=True, slots=True)
class SampleRow:
    """Keeps what the choice of one token depends on, besides the logits."""

    position: int
    """Output position of the token; a part of the noise's key."""
    sampling: SamplingParams
    prompt_token_ids: tuple[int, ...] = ()
    """The prompt, for the repetition penalty; empty unless `sampling` has penalties."""
    output_token_ids: tuple[int, ...] = ()
    """All output before the token, replayed output included; empty unless `sampling` has penalties."""
    masked_token_ids: tuple[int, ...] = ()
    """Stop ids that may not be sampled yet because of min_tokens."""
    barred_token_ids: tuple[int, ...] = ()
    """Tokens that would complete one of `sampling.bad_token_ids`."""


@dataclass(frozen=True, slots=True)
class PromptScoring:
    """Names the tokens of a prompt whose log-probabilities a part computes. They follow one another."""

    position: int
    """Place in the prompt of the first of them. Its logits are those of the token before it."""
    token_ids: tuple[int, ...]
    num_top: int
    """How many of the most likely tokens are reported at each place."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Describes a sequence's part of one step, which computes the KV of its tokens from position `start` on."""

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    """The tokens to compute, at positions start, start + 1, …"""
    block_ids: tuple[int, ...]
    """Blocks that hold positions 0 … start + num_tokens - 1."""
    rows: tuple[SampleRow, ...] = ()
    """What is sampled from the logits of the part's last token: the sequence's next token, then one for each further
    answer. Empty if the step does not reach the sequence's newest token."""
    is_decode: bool = False
    """Whether the sequence was decoding (see `Sequence.decoding`) when the step was scheduled."""
    scoring: PromptScoring | None = None
    """The tokens of the prompt whose log-probabilities are wanted and can be told from the part's logits, if any."""
    constraint: TokenConstraint | None = None
    """What the tokens sampled from the rows are held to. It is told of `untold_token_ids` first."""
    untold_token_ids: tuple[int, ...] = ()
    """Output tokens that the constraint was not told of yet."""
    stop_token_ids: tuple[int, ...] = ()
    """The sequence's, if it has a constraint: they are allowed where the output may end."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Names a block whose content is copied into another before the step computes anything."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Lists the parts that one step runs, decodes first. Without parts there is nothing to run."""

    step_number: int
    sequences: tuple[ScheduledSequence, ...]
    preempted: tuple[int, ...] = ()
    """Ids of the sequences that were preempted when the step was scheduled."""
    copies: tuple[BlockCopy, ...] = ()
    """Blocks to copy first: a step may write the source, and the target is read and written only after that."""

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_decodes(self) -> int:
        """Returns how many sequences decode. Each of them computes one token."""
        return sum(sequence.is_decode for sequence in self.sequences)

    @property
    def num_prefill_tokens(self) -> int:
        """Returns how many tokens the other sequences compute: of prompts, or again."""
        return self.num_tokens - self.num_decodes

    @property
    def attended_tokens(self) -> int:
        """Returns the sum of what each token of the step attends to: itself, and all that stand before it."""
        return sum(
            sequence.num_tokens * sequence.start + sequence.num_tokens * (sequence.num_tokens + 1) // 2
            for sequence in self.sequences
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """Keeps a token that was sampled, with log-probabilities if they were asked for."""

    token_id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens as (token id, log-probability), the likeliest first."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """Keeps the log-probability of a token of the prompt. It is the model's own: no penalty, bias or temperature
    changes it."""

    logprob: float
    rank: int
    """1 if no token is likelier, 2 if one is, and so on."""
    top: tuple[tuple[int, float], ...] = ()
    """The most likely tokens as (token id, log-probability), the likeliest first."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Keeps the result of one step."""

    sampled: Mapping[int, tuple[SampledToken, ...]]
    """The tokens sampled from the rows of each part that has rows, by seq_id."""
    scored: Mapping[int, tuple[ScoredToken, ...]] = field(default_factory=dict)
    """What was computed for the `scoring` of each part that has one, by seq_id."""
    failed: Mapping[int, BatonError] = field(default_factory=dict)
    """Why nothing was sampled for other parts that have rows, by seq_id: each such sequence ends with its error, and
    the step has succeeded all the same."""
    inputs_s: float = 0.0
    """Seconds that it took to prepare the inputs."""
    model_s: float = 0.0
    """Seconds of the forward pass; on an accelerator only those of starting it."""
    masks_s: float = 0.0
    """Seconds that sampling waited for the masks of constraints."""
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
class PromptScored:
    """The log-probabilities of some more tokens of the prompt are known, of the one at `position` first. The first
    token of a prompt has none."""

    seq_id: int
    position: int
    tokens: tuple[ScoredToken, ...]


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
    """The sequence's blocks went to others. It waits, is computed again and goes on."""

    seq_id: int
    now: float


@dataclass(frozen=True, slots=True)
class Resumed:
    """A preempted sequence got blocks again, and found the KV of `num_cached` tokens in the prefix cache."""

    seq_id: int
    num_cached: int


SequenceEvent = Admitted | Progress | PromptScored | Token | Failed | Preempted | Resumed
