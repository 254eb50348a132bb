"""Makes the router's spans of one request: the root, and below it tokenize, queue, place, prefill, decode.

Owns: open spans. Never: when a stage begins or ends; the coordinator's actions say so.
"""

from __future__ import annotations

import asyncio

from baton.v1 import inference_pb2
from services.core.errors import BatonError, Cancelled
from services.router.coordinator.actions import SendLeg, Stage, StageEnded, Summary
from services.router.coordinator.events import FinishReason
from services.router.policy import PlacementChoice, Role
from services.router.policy.explanation import ScoredWorker
from services.rpc.names import Attr, Event, Span
from services.rpc.telemetry import Attributes, OpenSpan, Tracer

_NAMES = {Stage.QUEUE: Span.QUEUE, Stage.PLACE: Span.PLACE, Stage.PREFILL: Span.PREFILL, Stage.DECODE: Span.DECODE}
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
    ) -> None:
        """Begins the root. `parent` is the caller's traceparent, or empty."""
        self._tracer = tracer
        self._request_id = request.request_id
        self._arrived_s = arrived_s
        self._legs: dict[int, OpenSpan] = {}
        self._root = tracer.start(
            Span.REQUEST,
            request_id=request.request_id,
            start_s=arrived_s,
            parent=parent,
            attributes=_asked_for(request, model_id, stream=stream),
            server=True,
        )

    @property
    def traceparent(self) -> str:
        return self._root.traceparent

    def tokenized(self, start_s: float, end_s: float, num_tokens: int) -> None:
        self._root.set({Attr.INPUT_TOKENS: num_tokens})
        self._child(Span.TOKENIZE, start_s, end_s, {Attr.NUM_TOKENS: num_tokens})

    def leg_sent(self, command: SendLeg, now: float) -> str:
        """Opens the leg's span. Returns its traceparent, the parent of the worker's spans."""
        stage = Span.PREFILL if command.phase is Role.PREFILL else Span.DECODE
        attributes: Attributes = {
            Attr.LEG: command.leg,
            Attr.WORKER: command.worker_id,
            Attr.ATTEMPT: command.attempt,
        }
        span = self._tracer.start(
            stage, request_id=self._request_id, start_s=now, parent=self.traceparent, attributes=attributes
        )
        if command.choice is not None and span.is_recorded:
            span.set(_why(command.choice))
        self._legs[command.leg] = span
        return span.traceparent

    def stage_ended(self, ended: StageEnded) -> None:
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

    def first_token(self, now: float) -> None:
        self._root.event(Event.FIRST_TOKEN, now)
        self._root.set({Attr.TTFT_MS: (now - self._arrived_s) * 1000, Attr.TIME_TO_FIRST_CHUNK: now - self._arrived_s})

    def finished(self, summary: Summary, reason: FinishReason, *, num_output_tokens: int, now: float) -> None:
        self._root.set(
            {
                Attr.FINISH_REASONS: [reason.value],
                Attr.OUTPUT_TOKENS: num_output_tokens,
                Attr.CACHE_READ_INPUT_TOKENS: summary.cached_tokens,
                Attr.PREFILL_WORKER: summary.prefill_worker,
                Attr.DECODE_WORKER: summary.decode_worker or None,
                Attr.RETRIES: summary.num_retries,
            }
        )
        self._root.end(now)

    def failed(self, error: BaseException, now: float) -> None:
        for span in self._legs.values():  # nothing else will report how they ended
            span.set({Attr.OUTCOME: error_outcome(error)})
            span.end(now)
        self._legs.clear()
        self._root.fail(error)
        self._root.end(now)

    def _child(self, name: str, start_s: float, end_s: float, attributes: Attributes) -> None:
        self._tracer.span(
            name,
            request_id=self._request_id,
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


def error_outcome(error: BaseException) -> str:
    """Returns the outcome that metrics show: the error's reason in lower case."""
    if isinstance(error, asyncio.CancelledError):
        return Cancelled.reason.lower()
    return error.reason.lower() if isinstance(error, BatonError) else "internal"
