"""Defines the coordinator's actions: plain data that says what is to be done.

The shells carry them out; the simulator does so on a simulated network. A command to a worker whose session has just
ended may be dropped: the coordinator learns of the lost session by itself.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from services.core.errors import BatonError
from services.core.records import record
from services.router.coordinator.events import FinishReason, RequestSpec, WorkerInfo
from services.router.policy import PlacementChoice, Role, VainAttempt
from services.router.policy.health import Health
from services.router.policy.outliers import Ejection

if TYPE_CHECKING:
    from baton.v1 import types_pb2


@record
class HandoffRef:
    """Names the lease that a decode worker is to take over, and its source."""

    lease_id: bytes
    source: types_pb2.KVSource


@record
class SendLeg:
    """Commands one phase of a request from a worker."""

    phase: Role
    """PREFILL or DECODE."""
    worker: WorkerInfo
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
    choice: PlacementChoice | None = None
    """Why it is this worker; None for a canary."""

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id


@record
class CancelLeg:
    worker: WorkerInfo
    leg: int


@record
class EmitStarted:
    """Tells the client which worker prefills its prompt. It comes once per request, before the first token."""

    request_id: str
    prefill_worker: str
    cached_tokens: int


@record
class EmitTokens:
    """Brings new output tokens. A request's tokens come in order, without a gap or a repeat."""

    request_id: str
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[types_pb2.TokenLogprobs, ...]


@record
class Summary:
    """Tells what happened to a finished request. Durations are in seconds; None means that the event did not happen."""

    num_output_tokens: int
    cached_tokens: int
    prefill_worker: str
    decode_worker: str
    num_retries: int
    queue_s: float
    ttft_s: float | None
    total_s: float
    prefill_wait_s: float | None
    """From the prefill command to the opened lease, as the router saw it."""
    prefill_compute_s: float | None
    """From the opened lease to the first token, as the router saw it."""
    worker_timings: tuple[types_pb2.PhaseTimings, ...]
    """What the workers measured, in order of arrival."""


@record
class EmitFinished:
    request_id: str
    reason: FinishReason
    stop_token_id: int | None
    summary: Summary


@record
class EmitFailed:
    request_id: str
    error: BatonError


class Stage(enum.Enum):
    """Names the router's spans below a request's root span."""

    QUEUE = "queue"
    PLACE = "place"
    PREFILL = "prefill"
    DECODE = "decode"


@record
class StageEnded:
    """Reports a span that has ended.

    PREFILL and DECODE belong to the leg that a `SendLeg` started; a refused DECODE never ran.
    """

    request_id: str
    stage: Stage
    leg: int
    """The leg's number; 0 for QUEUE and PLACE."""
    worker_id: str
    attempt: int
    started_s: float
    ended_s: float
    outcome: str
    """How the stage ended: "done", "refused", "lost", "cancelled", ..."""
    num_refusals: int = 0
    """For PLACE, how many times a worker refused the handoff."""
    choice: PlacementChoice | None = None
    """For PLACE, why it was the last worker that was asked."""
    vain_attempt: VainAttempt | None = None
    """For QUEUE and PLACE, the last attempt that found no worker, if the request has ended without one."""


@record
class HealthChanged:
    """Reports, for the log, that the health of a worker or of a pair has changed."""

    worker_id: str
    source_id: str
    """Empty if the worker's own health changed; else the source of the pair whose health changed."""
    state: Health
    reason: str


@record
class EjectionChanged:
    """Reports, for the log, that a worker is ejected since it is slower than its peers, or is back."""

    worker_id: str
    ejection: Ejection | None
    """None if it is back."""


@record
class GroupsChanged:
    """Reports, for the log, that ready workers of one model compute differently, or no longer do."""

    groups: tuple[tuple[str, tuple[str, ...]], ...]
    """Each group as (kv fingerprint, worker ids). Workers of different groups do not pair."""


@record
class Defect:
    """Reports, for the log and the metrics, an exception that the coordinator did not expect.

    If it was met on behalf of a request, that request has been ended.
    """

    where: str
    """What was being done: "event", "tick", "placement", "session" or "action"."""
    request_id: str
    """The request on whose behalf it was met; empty if there is none."""
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
    | EjectionChanged
    | GroupsChanged
    | Defect
)
