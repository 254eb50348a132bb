"""Defines the coordinator's actions: plain data that says what is to be done.

The shells carry them out; the simulator does so on a simulated network. A command to a worker whose session has just
ended may be dropped: the coordinator learns of the lost session by itself.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, NamedTuple

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
    """PREFILL, DECODE, or STORE for a handoff that is to be parked."""
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
    """The lease that a decode leg or a store takes over. None: it computes the prompt itself."""
    age_s: float = 0.0
    """How long the handoff has been waiting."""
    choice: PlacementChoice | None = None
    """Why it is this worker; None for a canary."""
    scores_prompt: bool = False
    """Whether the leg is to tell the log-probabilities of the prompt."""
    num_answers: int = 1
    """How many answers the leg makes, from that of `index` on."""
    index: int = 0
    """Which of the request's answers the leg's first is."""
    prefix_source: WorkerInfo | None = None
    """Who has more of the prompt's KV than the worker, if bringing it costs less than computing it."""
    keep_at: WorkerInfo | None = None
    """The store that is to be offered the prompt's KV, and the output's, once it is computed."""
    goes_ahead: bool = False
    """Whether its tenant had less than its share of what is placed: then it goes before all others at the worker."""

    @property
    def worker_id(self) -> str:
        return self.worker.worker_id

    @property
    def priority(self) -> int:
        """Returns the priority at the worker."""
        return self.spec.worker_priority(goes_ahead=self.goes_ahead)


@record
class CancelLeg:
    worker: WorkerInfo
    leg: int
    index: int | None = None
    """The only one of the leg's answers that is given up; None for the whole leg."""


@record
class EmitStarted:
    """Tells the client which worker prefills its prompt. It comes once per request, before the first token."""

    request_id: str
    prefill_worker: str
    cached_tokens: int


@record
class EmitPromptTokens:
    """Brings log-probabilities of the prompt's tokens. They come in order, without a gap or a repeat, and before any
    output."""

    request_id: str
    position: int
    logprobs: tuple[types_pb2.TokenLogprobs, ...]


@record
class EmitTokens:
    """Brings new output tokens of one answer. An answer's tokens come in order, without a gap or a repeat."""

    request_id: str
    position: int
    token_ids: tuple[int, ...]
    logprobs: tuple[types_pb2.TokenLogprobs, ...]
    index: int = 0
    is_stopped: bool = False
    """Whether the last of them is a stop token, which has ended the answer."""


@record
class Summary:
    """Tells what happened to a request by the end of an answer. Durations are in seconds; None means that the event did
    not happen."""

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
    """Reports that an answer is complete, and the request too if it is the last."""

    request_id: str
    reason: FinishReason
    stop_token_id: int | None
    summary: Summary
    index: int = 0
    is_last: bool = True


@record
class EmitFailed:
    request_id: str
    error: BatonError


class Stage(enum.Enum):
    """Names the router's spans below a request's root span."""

    QUEUE = "queue"
    PLACE = "place"
    PREFILL = "prefill"
    PARK = "park"
    """A store takes the handoff over."""
    DECODE = "decode"


@record
class StageEnded:
    """Reports a span that has ended.

    PREFILL, PARK and DECODE belong to the leg that a `SendLeg` started; a refused DECODE never ran.
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


class KVGroup(NamedTuple):
    """Names ready workers of one model that can exchange KV, as far as what they compute goes."""

    kv: str
    engine: str
    worker_ids: tuple[str, ...]


@record
class GroupsChanged:
    """Reports, for the log, that ready workers of one model compute differently, or no longer do."""

    groups: tuple[KVGroup, ...]
    """Workers of different groups do not pair."""

    @property
    def are_engines(self) -> bool:
        """Returns whether each group has an engine of its own: then nothing is amiss."""
        return len({group.engine for group in self.groups}) == len(self.groups)


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
    | EmitPromptTokens
    | EmitTokens
    | EmitFinished
    | EmitFailed
    | StageEnded
    | HealthChanged
    | EjectionChanged
    | GroupsChanged
    | Defect
)
