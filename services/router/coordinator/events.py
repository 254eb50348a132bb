"""What workers tell the router, as plain data (mirrors of the session protos; `wire.py` converts).

Fields typed `object` are passed through and never looked into by pure code.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass

from services.core.errors import BatonError
from services.router.policy import Role


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """Mirror of `baton.v1.WorkerDescription`, as far as the coordinator needs it."""

    worker_id: str
    role: Role
    incarnation: int
    layout: Hashable
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    host_id: str = ""
    description: object = None
    """The whole of it, for shells."""


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class Finish:
    reason: FinishReason
    stop_token_id: int | None = None
    timings: object = None


@dataclass(frozen=True, slots=True)
class Tokens:
    """Output from `position` on. The first token of a decode leg repeats the one its prefill leg sampled."""

    leg: int
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[object, ...] = ()
    """Empty, or one per token."""
    finish: Finish | None = None
    timings: object = None
    """What a prefill worker measured."""


@dataclass(frozen=True, slots=True)
class LegFailed:
    leg: int
    error: BatonError


@dataclass(frozen=True, slots=True)
class PrefillStarted:
    leg: int
    lease_id: bytes
    source: object
    """Where the lease is fetched; goes into the decode command."""
    cached_tokens: int = 0


class LeaseEnd(enum.Enum):
    RELEASED = "released"
    EXPIRED = "expired"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class LeaseEnded:
    leg: int
    lease_id: bytes
    reason: LeaseEnd


@dataclass(frozen=True, slots=True)
class DecodeAdmitted:
    leg: int
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class DecodeRefused:
    leg: int
    needed_blocks: int = 0
    missing_blocks: int = 0


@dataclass(frozen=True, slots=True)
class ImportReady:
    leg: int


@dataclass(frozen=True, slots=True)
class ImportFailed:
    leg: int
    lease_alive: bool
    error: BatonError


PrefillEvent = PrefillStarted | Tokens | LegFailed | LeaseEnded
DecodeEvent = DecodeAdmitted | DecodeRefused | ImportReady | ImportFailed | Tokens | LegFailed
