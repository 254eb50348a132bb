"""Defines what workers tell the router, as plain data. The records mirror the session protos; `wire.py` converts.

Messages of `baton.v1` are passed through: pure code never reads them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import field, replace
from typing import TYPE_CHECKING

from services.core.errors import BatonError
from services.core.hashing import ShortHash
from services.core.records import record
from services.router.policy import Fingerprint, Role

if TYPE_CHECKING:
    from baton.v1 import control_pb2, inference_pb2, types_pb2


@record
class WorkerInfo:
    """Mirrors `baton.v1.WorkerDescription`, as far as the coordinator needs it."""

    worker_id: str
    roles: Role
    incarnation: int
    fingerprint: Fingerprint
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    model_id: str = ""
    host_id: str = ""
    capacity: float = 1.0
    """Its share of the requests beside that of others, as declared; above 0."""
    num_tier_blocks: int = 0
    """Blocks that it may have below its pool, and tells of as cached."""
    hardware: str = ""
    """What it computes on and by which kernels, as far as it says."""
    token_bytes: int = 0
    """The size of one token's KV; 0 if it does not say."""
    description: control_pb2.WorkerDescription | None = None
    """The whole description, for the shells."""

    def is_as(self, other: WorkerInfo) -> bool:
        """Returns whether both are of one process, at one address, and differ in nothing but the roles."""
        addresses = {info.description.address if info.description is not None else "" for info in (self, other)}
        return len(addresses) == 1 and replace(self, roles=other.roles, description=other.description) == other


@record
class LoadingWorker:
    """Mirrors `baton.v1.LoadingWorker`: what a worker knows of itself before its weights are loaded."""

    worker_id: str
    roles: Role
    ready_within_s: float
    """It expects to serve within this time."""
    progress: str = ""
    """How far it has come, for people."""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@record
class SequenceEnd:
    """Says how a worker ended a sequence."""

    reason: FinishReason
    stop_token_id: int | None = None
    timings: types_pb2.PhaseTimings | None = None


@record
class Tokens:
    """Brings output of one answer from `position` on. A decode leg's first token repeats the one that its prefill leg
    sampled."""

    leg: int
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[types_pb2.TokenLogprobs, ...] = ()
    """Empty, or one entry per token."""
    finish: SequenceEnd | None = None
    timings: types_pb2.PhaseTimings | None = None
    """What a prefill worker measured. A decode worker's are in `finish`."""
    index: int = 0
    """Which of the leg's answers it is of."""


@record
class PromptTokens:
    """Brings log-probabilities of the prompt's tokens, of the one at `position` first; they come before any output."""

    leg: int
    position: int
    logprobs: tuple[types_pb2.TokenLogprobs, ...]


@record
class LegFailed:
    leg: int
    error: BatonError


@record
class PrefillStarted:
    leg: int
    lease_id: bytes
    source: types_pb2.KVSource
    """Where the lease can be fetched; it is passed on in the decode command."""
    cached_tokens: int = 0


@record
class PromptComputed:
    """Says how much of a prefill leg's prompt has been computed, for clients that wait."""

    leg: int
    num_tokens: int


class LeaseEnd(enum.Enum):
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


@record
class LeaseEnded:
    leg: int
    reason: LeaseEnd


@record
class DecodeAdmitted:
    leg: int
    cached_tokens: int = 0


@record
class DecodeRefused:
    leg: int
    needed_blocks: int = 0
    missing_blocks: int = 0


@record
class ImportReady:
    leg: int
    num_bytes: int = 0
    """How many were copied."""
    copy_ms: float = 0.0


@record
class Parked:
    """Says that a store has a handoff's KV, and under which lease it hands it over."""

    leg: int
    lease_id: bytes
    source: types_pb2.KVSource


@record
class ImportFailed:
    leg: int
    lease_alive: bool
    error: BatonError


@record
class PrefixBrought:
    """Says what has come of a command's prefix source. No tokens: the prefix is computed."""

    leg: int
    num_tokens: int
    ms: float


LegEvent = (
    PrefillStarted
    | LeaseEnded
    | DecodeAdmitted
    | DecodeRefused
    | ImportReady
    | ImportFailed
    | Parked
    | PrefixBrought
    | PromptComputed
    | PromptTokens
    | Tokens
    | LegFailed
)
"""Prefill legs have `PrefillStarted`, `LeaseEnded` and `PromptComputed`; decode legs have `DecodeAdmitted`,
`DecodeRefused`, `ImportReady` and `ImportFailed`; both have `PrefixBrought`, `PromptTokens`, `Tokens` and `LegFailed`.
A store's leg has those of a decode leg up to `Parked`, and then those of a prefill leg whose lease is sealed."""


_AHEAD = 1000
"""More than any two priorities differ."""


@record
class RequestSpec:
    """Describes a validated and tokenised request."""

    request_id: str
    """The router's own id of it, which no other request ever has."""
    token_ids: tuple[int, ...]
    max_tokens: int | None = None
    """The most output tokens; None for as many as the context leaves."""
    priority: int = 0
    deadline_s: float | None = None
    """The deadline on the coordinator's clock; None for none."""
    cache_salt: str = ""
    epoch: str = ""
    """The epoch in which its blocks are named (`Verdicts`)."""
    block_hashes: Mapping[int, tuple[ShortHash, ...]] = field(default_factory=dict, hash=False)
    """The short hashes of the full blocks of its prompt, for each size of `Coordinator.block_sizes_to_hash`."""
    conversation: str = ""
    """The conversation it belongs to, as the client names it; empty for none."""
    tenant: str = ""
    """Whose request it is; empty where nobody is asked for a key."""
    weight: float = 1.0
    """The tenant's, as it is now."""
    model: str = ""
    """The model that is to answer, by the name that its workers register."""
    min_tokens: int = 0
    """The fewest output tokens; admission compares their cost with the deadline."""
    scores_prompt: bool = False
    """Whether the log-probabilities of its prompt are wanted: of all its tokens but the first, which has none."""
    num_answers: int = 1
    """Answers to make of the one prompt."""
    label: str = ""
    """The id that its client gave or was given, for logs, traces and `baton explain`; others may have the same."""
    payload: inference_pb2.GenerateRequest | None = None
    """Sampling, stopping and response options, for the commands; pure code never reads them."""

    def worker_priority(self, *, goes_ahead: bool) -> int:
        """Returns its priority at a worker: those that go ahead, whoever sent them, come before all others."""
        return self.priority + _AHEAD if goes_ahead else self.priority


@record
class ExpectedRequest:
    """Describes a validated request whose prompt is about to be tokenised."""

    fewest_tokens: int
    """The fewest tokens that its prompt can have, by the text's length."""
    tokenise_s: float
    """How long it is expected to wait for the tokenizer, by what was measured so far."""
    max_tokens: int | None = None
    priority: int = 0
    deadline_s: float | None = None
    min_tokens: int = 0
    tenant: str = ""
    weight: float = 1.0
    model: str = ""
