"""Measures requests: each has a record, which is informed as things happen to it.

Owns: the instruments, and the times of a request so far. Never: the cluster's state (`metrics`), or the rule of the
objectives (`slo`).
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from baton.v1 import inference_pb2, types_pb2
from services.core import errors
from services.router.coordinator.actions import StageEnded
from services.router.coordinator.events import FinishReason
from services.router.slo import Grade, grade, grade_failed
from services.router.tracing import error_outcome
from services.rpc import names
from services.rpc.metrics import DURATION_BUCKETS, INTER_TOKEN_BUCKETS, PER_TOKEN_BUCKETS, TTFT_BUCKETS
from services.rpc.status import CODES

_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_OPERATIONS = ("chat", "text_completion")
_PHASES = ("prefill_wait", "prefill_compute", "transfer_exposed", "decode_wait", "decode_run")
_OUTCOMES = [
    *(reason.value for reason in FinishReason),
    *sorted({errors.BatonError.reason.lower(), *(kind.reason.lower() for kind in CODES)}),
]


def operation(request: inference_pb2.GenerateRequest) -> str:
    """Returns the request's operation by its name in the GenAI conventions."""
    return _OPERATIONS[0] if request.HasField("messages") else _OPERATIONS[1]


class RequestMetrics:
    def __init__(self, registry: CollectorRegistry, model_id: str, *, slo_ttft_s: float, slo_e2e_s: float) -> None:
        self._model = ("baton", model_id)
        self.targets_s = {"ttft": slo_ttft_s, "e2e": slo_e2e_s}
        self.num_accepted = self.num_ended = self.num_output_tokens = 0
        """Totals for the activity line; the counters of the library cannot be read back."""
        self._declare(registry, model_id)
        self._declare_counts(registry)
        self._show_zeros()

    def begin(self, request: inference_pb2.GenerateRequest, arrived_s: float) -> RequestRecord:
        return RequestRecord(self, operation(request), arrived_s)

    def _declare(self, registry: CollectorRegistry, model_id: str) -> None:
        name = names.Metric

        def histogram(metric: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(metric, text, labels, registry=registry, buckets=buckets)

        self._duration = histogram(
            name.REQUEST_DURATION, "From arrival to the end, seconds", (*_LABELS, "error_type"), DURATION_BUCKETS
        )
        self._ttft = histogram(
            name.TIME_TO_FIRST_TOKEN,
            "From arrival to the first token, of requests that succeed, seconds",
            _LABELS,
            TTFT_BUCKETS,
        )
        self._per_token = histogram(
            name.TIME_PER_OUTPUT_TOKEN,
            "Mean per token after the first, of requests that succeed, seconds",
            _LABELS,
            PER_TOKEN_BUCKETS,
        )
        self.inter_token = histogram(
            name.INTER_TOKEN_SECONDS, "Between one token and the next, seconds", (), INTER_TOKEN_BUCKETS
        )
        self._queue = histogram(name.QUEUE_SECONDS, "Each wait for a placement, seconds", (), TTFT_BUCKETS)
        self._phases = histogram(
            name.PHASE_SECONDS, "Phases of requests that succeed, seconds", ("phase",), DURATION_BUCKETS
        )
        self._success = Counter(
            names.VllmMetric.REQUEST_SUCCESS,
            "Requests that succeeded",
            ["model_name", "finished_reason"],
            registry=registry,
        )
        self._model_id = model_id

    def _declare_counts(self, registry: CollectorRegistry) -> None:
        name = names.Metric
        self._requests = Counter(name.REQUESTS, "Requests ended, by outcome", ["outcome"], registry=registry)
        self.prompt_tokens = Counter(name.PROMPT_TOKENS, "Prompt tokens of accepted requests", registry=registry)
        self.output_tokens = Counter(name.OUTPUT_TOKENS, "Output tokens passed on to clients", registry=registry)
        self._retries = Counter(name.RETRIES, "Times a request was placed again", registry=registry)
        self._slo = Counter(
            name.SLO_REQUESTS, "Requests, by whether they met a latency objective", ["slo", "result"], registry=registry
        )
        targets = Gauge(
            name.SLO_TARGET_SECONDS, "Latency objectives, as the router's flags give them", ["slo"], registry=registry
        )
        for slo, target_s in self.targets_s.items():
            targets.labels(slo).set(target_s)

    def _show_zeros(self) -> None:
        """Creates every series with 0, since a series that begins with its first event hides that event from `rate`."""
        for outcome in _OUTCOMES:
            self._requests.labels(outcome)
        for slo in self.targets_s:
            for result in Grade:
                self._slo.labels(slo, result.value)
        for phase in _PHASES:
            self._phases.labels(phase)
        for reason in FinishReason:
            self._success.labels(self._model_id, reason.value)
        for each in _OPERATIONS:
            self._duration.labels(each, *self._model, "")
            self._ttft.labels(each, *self._model)
            self._per_token.labels(each, *self._model)

    # What records report

    def finished(self, reason: FinishReason) -> None:
        self.num_ended += 1
        self._requests.labels(reason.value).inc()
        self._success.labels(self._model_id, reason.value).inc()

    def failed(self, error: BaseException) -> None:
        self.num_ended += 1
        self._requests.labels(error_outcome(error)).inc()

    def queued(self, stage: StageEnded) -> None:
        """Notes that a wait in the queue is over: the request has a worker, or has ended."""
        self._queue.observe(stage.ended_s - stage.started_s)
        if stage.attempt > 1:
            self._retries.inc()

    def graded(self, slo: str, result: Grade | None) -> None:
        if result is not None:
            self._slo.labels(slo, result.value).inc()

    def duration(self, operation: str, seconds: float, error_type: str = "") -> None:
        self._duration.labels(operation, *self._model, error_type).observe(seconds)

    def latencies(self, operation: str, ttft_s: float, per_token_s: float | None) -> None:
        self._ttft.labels(operation, *self._model).observe(ttft_s)
        if per_token_s is not None:
            self._per_token.labels(operation, *self._model).observe(per_token_s)

    def phases(self, timings: types_pb2.PhaseTimings) -> None:
        for phase in _PHASES:
            if timings.HasField(f"{phase}_ms"):
                self._phases.labels(phase).observe(getattr(timings, f"{phase}_ms") / 1000)


class RequestRecord:
    """The times of one request, from its arrival. Exactly one of `finished` and `failed` is called, once."""

    def __init__(self, metrics: RequestMetrics, operation: str, arrived_s: float) -> None:
        self._metrics = metrics
        self._operation = operation
        self._arrived_s = arrived_s
        self._first_token_s: float | None = None
        self._last_token_s = arrived_s
        self._num_tokens = 0

    def accepted(self, num_prompt_tokens: int) -> None:
        self._metrics.num_accepted += 1
        self._metrics.prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, num_tokens: int, now: float) -> None:
        """Notes output tokens that arrived together; the time between them counts as 0."""
        if num_tokens < 1:
            return
        self._metrics.num_output_tokens += num_tokens
        self._metrics.output_tokens.inc(num_tokens)
        self._num_tokens += num_tokens
        if self._first_token_s is None:
            self._first_token_s = now
            ttft_s = now - self._arrived_s
            self._metrics.graded("ttft", grade(ttft_s, self._metrics.targets_s["ttft"]))
        else:
            self._metrics.inter_token.observe(now - self._last_token_s)
        for _ in range(num_tokens - 1):
            self._metrics.inter_token.observe(0.0)
        self._last_token_s = now

    def finished(self, reason: FinishReason, timings: types_pb2.PhaseTimings, now: float) -> None:
        elapsed_s, metrics = now - self._arrived_s, self._metrics
        metrics.finished(reason)
        metrics.duration(self._operation, elapsed_s)
        metrics.graded("e2e", grade(elapsed_s, metrics.targets_s["e2e"]))
        metrics.phases(timings)
        if self._first_token_s is not None:
            after = self._num_tokens - 1
            per_token_s = (self._last_token_s - self._first_token_s) / after if after > 0 else None
            metrics.latencies(self._operation, self._first_token_s - self._arrived_s, per_token_s)

    def failed(self, error: BaseException, now: float) -> None:
        elapsed_s, metrics = now - self._arrived_s, self._metrics
        if isinstance(error, asyncio.CancelledError):  # the task was: its client has left
            error = errors.Cancelled("the client has left")
        metrics.failed(error)
        metrics.duration(self._operation, elapsed_s, error_outcome(error))
        metrics.graded("e2e", grade_failed(error, elapsed_s, metrics.targets_s["e2e"]))
        if self._first_token_s is None:
            metrics.graded("ttft", grade_failed(error, elapsed_s, metrics.targets_s["ttft"]))
