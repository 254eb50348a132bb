"""Makes the router's spans of one request: the root, and below it tokenize, queue, place, prefill, decode.

Owns: open spans. Never: when a stage begins or ends; the coordinator's actions say so.
"""

from __future__ import annotations

import asyncio

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import BatonError, Cancelled
from services.router.coordinator.events import FinishReason, SendLeg, Stage, StageEnded, Summary
from services.router.policy import PlacementChoice, Role
from services.router.policy.explanation import ScoredWorker
from services.router.telemetry.timelines import Timelines, TimelineStage, TokenTimes
from services.router.tenants.tenant import OPEN, Tenant, TokenUsage
from services.rpc.logging import ids
from services.rpc.names import Attr, Event, Span
from services.rpc.telemetry import Attributes, OpenSpan, Tracer

_NAMES = {
    Stage.QUEUE: Span.QUEUE,
    Stage.PLACE: Span.PLACE,
    Stage.PREFILL: Span.PREFILL,
    Stage.PARK: Span.PARK,
    Stage.DECODE: Span.DECODE,
}
_LEGS = {Role.PREFILL: Span.PREFILL, Role.DECODE: Span.DECODE, Role.STORE: Span.PARK}
# Such a leg has no span of its own: it counts in PLACE's number of refusals.
_NEVER_RAN = "refused"


class RequestTrace:
    def __init__(
        self,
        tracer: Tracer,
        request: inference_pb2.GenerateRequest,
        *,
        model_id: str,
        parent: str,
        stream: bool,
        arrived_s: float,
        timelines: Timelines,
        times: TokenTimes,
        tenant: Tenant = OPEN,
    ) -> None:
        """Begins the root. `parent` is the caller's traceparent, or empty. The tenant's prices say what it costs."""
        self._tracer = tracer
        self._timelines = timelines
        self._label = request.request_id
        self._arrived_s = arrived_s
        self._tenant = tenant
        self._legs: dict[int, OpenSpan] = {}
        self.is_split = False
        """Whether it decodes, or did last, on another worker than the one that computed its prompt."""
        self._root = tracer.start(
            Span.REQUEST,
            request_id=request.request_id,
            start_s=arrived_s,
            parent=parent,
            attributes={**_asked_for(request, model_id, stream=stream), Attr.TENANT: tenant.name or None},
            server=True,
        )
        self.timeline = timelines.begin(request.request_id, model_id, arrived_s, times, request.priority)
        self.timeline.trace_id = self._root.trace_id if self._root.is_recorded else ""

    @property
    def traceparent(self) -> str:
        return self._root.traceparent

    @property
    def log_ids(self) -> dict[str, str]:
        """Returns the `extra` of the request's log records."""
        return ids(self._label, self.traceparent)

    def tokenized(self, start_s: float, end_s: float, num_tokens: int) -> None:
        self.timeline.tokenized(start_s, end_s, num_tokens)
        self._root.set({Attr.INPUT_TOKENS: num_tokens})
        self._child(Span.TOKENIZE, start_s, end_s, {Attr.NUM_TOKENS: num_tokens})

    def leg_sent(self, command: SendLeg, now: float) -> str:
        """Opens the leg's span. Returns its traceparent, the parent of the worker's spans."""
        stage = _LEGS[command.phase]
        attributes: Attributes = {
            Attr.LEG: command.leg,
            Attr.WORKER: command.worker_id,
            Attr.ATTEMPT: command.attempt,
        }
        span = self._tracer.start(
            stage, request_id=self._label, start_s=now, parent=self.traceparent, attributes=attributes
        )
        if command.choice is not None and span.is_recorded:
            span.set(_why(command.choice))
        self._legs[command.leg] = span
        self.timeline.leg_sent(stage, command.worker_id, command.leg, command.attempt, now)
        if command.phase is Role.DECODE:
            self.is_split = command.handoff is not None and command.worker_id != self.timeline.prefill_worker
        return span.traceparent

    def stage_ended(self, ended: StageEnded) -> None:
        self.timeline.stage_ended(
            TimelineStage(
                _NAMES[ended.stage],
                ended.started_s,
                ended.ended_s,
                ended.worker_id,
                ended.leg,
                ended.attempt,
                ended.outcome,
            )
        )
        attributes: Attributes = {
            Attr.ATTEMPT: ended.attempt,
            Attr.OUTCOME: ended.outcome,
            Attr.WORKER: ended.worker_id or None,
        }
        if ended.leg:
            span = self._legs.pop(ended.leg)
            if ended.outcome != _NEVER_RAN:
                span.set(attributes)
                span.end(ended.ended_s)
            return
        if ended.stage is Stage.PLACE:
            attributes = {**attributes, Attr.NUM_REFUSALS: ended.num_refusals}
            if ended.choice is not None and self._root.is_recorded:
                attributes = {**attributes, **_why(ended.choice)}
        elif ended.attempt > 1:
            self._root.event(Event.RETRY, ended.started_s, {Attr.ATTEMPT: ended.attempt})
        self._child(_NAMES[ended.stage], ended.started_s, ended.ended_s, attributes)

    def show_output(self, text: str) -> None:
        """Keeps the beginning of the output, as much as may be shown. Called before the end."""
        self.timeline.output = text[: self.timeline.text_chars]

    def first_token(self, now: float) -> None:
        self._root.event(Event.FIRST_TOKEN, now)
        self._root.set({Attr.TTFT_MS: (now - self._arrived_s) * 1000, Attr.TIME_TO_FIRST_CHUNK: now - self._arrived_s})

    def finished(
        self,
        summary: Summary,
        reason: FinishReason,
        timings: types_pb2.PhaseTimings,
        *,
        usage: TokenUsage,
        now: float,
    ) -> None:
        timeline = self.timeline
        timeline.timings, timeline.cached_tokens = timings, summary.cached_tokens
        timeline.prefill_worker, timeline.decode_worker = summary.prefill_worker, summary.decode_worker
        timeline.num_retries = summary.num_retries
        self._timelines.end(timeline, reason.value, now)
        self._root.set(
            {
                Attr.FINISH_REASONS: [reason.value],
                **self._charged(usage),
                Attr.PREFILL_WORKER: summary.prefill_worker,
                Attr.DECODE_WORKER: summary.decode_worker or None,
                Attr.RETRIES: summary.num_retries,
            }
        )
        self._root.end(now)

    def failed(self, error: BaseException, now: float, usage: TokenUsage | None = None) -> None:
        """Ends the trace. `usage` is what is charged nevertheless; None of a request that was never submitted."""
        self._timelines.end(self.timeline, error_outcome(error), now, _told(error))
        for span in self._legs.values():  # nothing else will report how they ended
            span.set({Attr.OUTCOME: error_outcome(error)})
            span.end(now)
        self._legs.clear()
        if usage is not None:
            self._root.set(self._charged(usage))
        self._root.fail(error)
        self._root.end(now)

    def _charged(self, usage: TokenUsage) -> Attributes:
        return {
            Attr.OUTPUT_TOKENS: usage.output,
            Attr.CACHE_READ_INPUT_TOKENS: usage.cached,
            Attr.REQUEST_COST: self._tenant.prices.cost(usage) if self._tenant.name else None,
        }

    def _child(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        self._tracer.span(
            name,
            request_id=self._label,
            start_s=start_s,
            end_s=end_s,
            parent=self.traceparent,
            attributes=attributes,
        )


def _asked_for(request: inference_pb2.GenerateRequest, model_id: str, *, stream: bool) -> Attributes:
    sampling = request.sampling
    return {
        Attr.OPERATION: "chat" if request.HasField("messages") else "text_completion",
        Attr.PROVIDER: "baton",
        Attr.REQUEST_MODEL: request.model or model_id,
        Attr.RESPONSE_MODEL: model_id,
        Attr.RESPONSE_ID: request.request_id,
        Attr.REQUEST_STREAM: stream,
        Attr.REQUEST_MAX_TOKENS: request.stopping.max_tokens if request.stopping.HasField("max_tokens") else None,
        Attr.REQUEST_TEMPERATURE: sampling.temperature if sampling.HasField("temperature") else None,
        Attr.REQUEST_TOP_P: sampling.top_p if sampling.HasField("top_p") else None,
        Attr.REQUEST_TOP_K: sampling.top_k if sampling.HasField("top_k") else None,
        Attr.REQUEST_SEED: str(sampling.seed) if sampling.HasField("seed") else None,
        Attr.CONVERSATION_ID: request.session or None,
        Attr.PRIORITY: request.priority or None,
    }


def _why(choice: PlacementChoice) -> Attributes:
    """Returns why the worker was chosen, and what the next best had: seven attributes at most."""
    verdict, other = choice.verdict(), choice.runner_up
    return {
        Attr.PLACEMENT_DECIDED_BY: verdict.term or verdict.decider.value,
        Attr.PLACEMENT_NUM_CANDIDATES: choice.num_candidates,
        Attr.PLACEMENT_SCORE: choice.winner.score,
        Attr.PLACEMENT_TERMS: _terms(choice, choice.winner),
        Attr.RUNNER_UP: other.worker_id if other is not None else None,
        Attr.RUNNER_UP_SCORE: other.score if other is not None else None,
        Attr.RUNNER_UP_TERMS: _terms(choice, other) if other is not None else None,
    }


def _terms(choice: PlacementChoice, scored: ScoredWorker) -> list[str]:
    return [f"{name}={value:.4g}" for name, value in choice.weighted(scored)]


def _told(error: BaseException) -> str:
    """Returns what the client is told; nothing of an error that nobody has foreseen, which may quote a prompt."""
    return str(error) if isinstance(error, BatonError) else error_outcome(error)


def error_outcome(error: BaseException) -> str:
    """Returns the outcome that metrics show: the error's reason in lower case."""
    if isinstance(error, asyncio.CancelledError):
        return Cancelled.reason.lower()
    return error.reason.lower() if isinstance(error, BatonError) else "internal"
