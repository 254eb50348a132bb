"""What the coordinator wants done, as plain data. Shells do it; the simulator does it on a simulated network.

Sends to a worker whose session has just ended may be dropped: the coordinator hears of the loss by itself.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.core.errors import BatonError
from services.router.coordinator.events import FinishReason, RequestSpec
from services.router.health import Health
from services.router.policy import Role

if TYPE_CHECKING:
    from baton.v1 import types_pb2


@dataclass(frozen=True, slots=True)
class HandoffRef:
    """The lease a decode worker is to take over."""

    lease_id: bytes
    source: types_pb2.KVSource


@dataclass(frozen=True, slots=True)
class SendLeg:
    """A command for one phase of a request."""

    phase: Role
    """PREFILL or DECODE."""
    worker_id: str
    incarnation: int
    leg: int
    spec: RequestSpec
    max_tokens: int
    token_ids: tuple[int, ...]
    """The prompt, and the output received so far. With a handoff: exactly what its KV covers."""
    output_base: int
    remaining_s: float | None
    attempt: int
    handoff: HandoffRef | None = None
    """The lease that a decode leg takes over. None: it computes the prompt itself."""
    age_s: float = 0.0
    """How long the handoff has been waiting."""


@dataclass(frozen=True, slots=True)
class CancelLeg:
    worker_id: str
    incarnation: int
    leg: int


@dataclass(frozen=True, slots=True)
class EmitStarted:
    """Once per request, before its first token."""

    request_id: str
    prefill_worker: str
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class EmitTokens:
    """In order, without gap or repeat."""

    request_id: str
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[types_pb2.TokenLogprobs, ...]


@dataclass(frozen=True, slots=True)
class Summary:
    """A finished request's story. Durations in seconds; None: did not happen."""

    num_output_tokens: int
    cached_tokens: int
    prefill_worker: str
    decode_worker: str
    num_retries: int
    queue_s: float
    ttft_s: float | None
    total_s: float
    prefill_wait_s: float | None
    """From command to lease, as the router saw it."""
    prefill_compute_s: float | None
    """From lease to the first token, as the router saw it."""
    worker_timings: tuple[types_pb2.PhaseTimings, ...]
    """What the workers measured, in order of arrival."""


@dataclass(frozen=True, slots=True)
class EmitFinished:
    request_id: str
    reason: FinishReason
    stop_token_id: int | None
    summary: Summary


@dataclass(frozen=True, slots=True)
class EmitFailed:
    request_id: str
    error: BatonError


class Stage(enum.Enum):
    """The router's spans below a request's root."""

    QUEUE = "queue"
    PLACE = "place"
    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class StageEnded:
    """One span. PREFILL and DECODE belong to the leg a Send* action started; a refused DECODE never ran."""

    request_id: str
    stage: Stage
    leg: int
    """0 for QUEUE and PLACE."""
    worker_id: str
    attempt: int
    started_s: float
    ended_s: float
    outcome: str
    """"done", "refused", "lost", "cancelled", ...: how it ended."""
    num_refusals: int = 0
    """PLACE: workers that said no."""


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """For the log."""

    worker_id: str
    source_id: str
    """With one: not the worker's health, but that of its transfers from there."""
    state: Health
    reason: str


@dataclass(frozen=True, slots=True)
class GroupsChanged:
    """For the log: ready workers of one model that compute differently, or that no longer do."""

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """(kv fingerprint, worker ids) each; those of different groups do not pair."""


@dataclass(frozen=True, slots=True)
class Defect:
    """The coordinator met an exception that it did not expect. For the log and the metrics; the request it happened to,
    if to one, has been ended."""

    where: str
    """"event", "tick" or "placement": what was being done."""
    request_id: str
    """Empty: nobody's."""
    error: Exception


Action = (
    SendLeg
    | CancelLeg
    | EmitStarted
    | EmitTokens
    | EmitFinished
    | EmitFailed
    | StageEnded
    | HealthChanged
    | GroupsChanged
    | Defect
)
