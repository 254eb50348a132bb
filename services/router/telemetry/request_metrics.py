"""Measures requests: each has a record, which is informed as things happen to it.

Owns: the instruments, and the times of a request so far. Never: the cluster's state (`metrics`), or the rule of the
objectives (`slo`).
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from baton.v1 import inference_pb2, types_pb2
from services.core import errors
from services.router.coordinator.events import FinishReason, StageEnded
from services.router.telemetry.recent_requests import RecentRequest, RecentRequests
from services.router.telemetry.slo import Grade, grade, grade_failed
from services.router.telemetry.timelines import TokenTimes
from services.router.telemetry.tracing import error_outcome
from services.rpc import names
from services.rpc.prometheus import DURATION_BUCKETS, INTER_TOKEN_BUCKETS, PER_TOKEN_BUCKETS, TTFT_BUCKETS
from services.rpc.status import CODES

_MODEL = "model"
_LABELS = ("gen_ai_operation_name", "gen_ai_provider_name", "gen_ai_request_model")
_PROVIDER = "baton"
_OPERATIONS = ("chat", "text_completion")
_PHASES = ("prefill_wait", "prefill_compute", "transfer_exposed", "decode_wait", "decode_run")
_OUTCOMES = [
    *(reason.value for reason in FinishReason),
    *sorted({errors.BatonError.reason.lower(), *(kind.reason.lower() for kind in CODES)}),
]

_BOUNDS = (*map(str, INTER_TOKEN_BUCKETS), "+Inf")
_NONE = [0] * len(_BOUNDS)
_PARK_OUTCOMES = ("done", "refused", "failed")


def operation(request: inference_pb2.GenerateRequest) -> str:
    """Returns the request's operation by its name in the GenAI conventions."""
    return _OPERATIONS[0] if request.HasField("messages") else _OPERATIONS[1]


class RequestMetrics:
    """Holds the instruments of all requests of a router. Each model has its own series of them (`of`)."""

    def __init__(self, registry: CollectorRegistry, *, slo_ttft_s: float, slo_e2e_s: float) -> None:
        self.targets_s = {"ttft": slo_ttft_s, "e2e": slo_e2e_s}
        self.num_accepted = self.num_ended = self.num_prompt_tokens = self.num_output_tokens = 0
        """Totals for the activity line and the console; the counters of the library cannot be read back."""
        self._models: dict[str, ModelMetrics] = {}
        name = names.Metric

        def histogram(metric: str, text: str, labels: tuple[str, ...], buckets: tuple[float, ...]) -> Histogram:
            return Histogram(metric, text, labels, registry=registry, buckets=buckets)

        def counter(metric: str, text: str, *labels: str) -> Counter:
            return Counter(metric, text, labels, registry=registry)

        self.duration = histogram(
            name.REQUEST_DURATION, "From arrival to the end, seconds", (*_LABELS, "error_type"), DURATION_BUCKETS
        )
        self.ttft = histogram(
            name.TIME_TO_FIRST_TOKEN,
            "From arrival to the first token, of requests that succeed, seconds",
            _LABELS,
            TTFT_BUCKETS,
        )
        self.per_token = histogram(
            name.TIME_PER_OUTPUT_TOKEN,
            "Mean per token after the first, of requests that succeed, seconds",
            _LABELS,
            PER_TOKEN_BUCKETS,
        )
        self.tokens = TokenCounts(registry, _MODEL)
        self.queue = histogram(name.QUEUE_SECONDS, "Each wait for a placement, seconds", (_MODEL,), TTFT_BUCKETS)
        self.phases = histogram(
            name.PHASE_SECONDS, "Phases of requests that succeed, seconds", (_MODEL, "phase"), DURATION_BUCKETS
        )
        self.success = counter(
            names.VllmMetric.REQUEST_SUCCESS, "Requests that succeeded", "model_name", "finished_reason"
        )
        self.requests = counter(
            name.REQUESTS,
            "Requests ended, by outcome; of no model: could not be read, or named none that is served",
            _MODEL,
            "outcome",
        )
        self.prompt_tokens = counter(name.PROMPT_TOKENS, "Prompt tokens of accepted requests", _MODEL)
        self.retries = counter(name.RETRIES, "Times a request was placed again", _MODEL)
        self.parked = counter(
            name.HANDOFFS_PARKED, "Handoffs sent to a store, by what came of it: done is kept there", _MODEL, "outcome"
        )
        self.slo = counter(
            name.SLO_REQUESTS, "Requests, by whether they met a latency objective", _MODEL, "slo", "result"
        )
        targets = Gauge(
            name.SLO_TARGET_SECONDS, "Latency objectives, as the router's flags give them", ["slo"], registry=registry
        )
        for slo, target_s in self.targets_s.items():
            targets.labels(slo).set(target_s)
        for outcome in _OUTCOMES:
            self.requests.labels("", outcome)

    def of(self, model_id: str) -> ModelMetrics:
        """Returns the series of one model, at first all with 0."""
        if model_id not in self._models:
            self._models[model_id] = ModelMetrics(self, model_id)
        return self._models[model_id]

    def forget(self, model_id: str) -> None:
        """Removes a model's series: it is served no longer. Nobody sees what a last request of it still counts."""
        model = self._models.pop(model_id, None)
        if model is None:
            return
        model.totals = RequestMetrics(
            CollectorRegistry(), slo_ttft_s=self.targets_s["ttft"], slo_e2e_s=self.targets_s["e2e"]
        )
        self.tokens.forget(model_id)
        for label, instruments in (
            (_MODEL, (self.queue, self.phases, self.requests, self.prompt_tokens, self.retries, self.parked, self.slo)),
            ("gen_ai_request_model", (self.duration, self.ttft, self.per_token)),
            ("model_name", (self.success,)),
        ):
            for instrument in instruments:
                instrument.remove_by_labels({label: model_id})

    def failed(self, error: BaseException) -> None:
        """Counts a request that could not be read, or that named no model which is served."""
        self.num_ended += 1
        self.requests.labels("", error_outcome(error)).inc()


class ModelMetrics:
    """Holds one model's series of the instruments."""

    def __init__(self, instruments: RequestMetrics, model_id: str) -> None:
        self.totals = instruments
        self.targets_s = instruments.targets_s
        self._tokens = instruments.tokens.of(model_id)
        self.prompt_tokens = instruments.prompt_tokens.labels(model_id)
        self.recent = RecentRequests()
        self._model_id = model_id
        self._retries = instruments.retries.labels(model_id)
        self._queue = instruments.queue.labels(model_id)
        self._show_zeros()

    def begin(self, request: inference_pb2.GenerateRequest, arrived_s: float) -> RequestRecord:
        return RequestRecord(self, operation(request), arrived_s)

    def _show_zeros(self) -> None:
        """Creates every series with 0, since a series that begins with its first event hides that event from `rate`."""
        all_, model_id = self.totals, self._model_id
        for outcome in _OUTCOMES:
            all_.requests.labels(model_id, outcome)
        for outcome in _PARK_OUTCOMES:
            all_.parked.labels(model_id, outcome)
        for slo in self.targets_s:
            for result in Grade:
                all_.slo.labels(model_id, slo, result.value)
        for phase in _PHASES:
            all_.phases.labels(model_id, phase)
        for reason in FinishReason:
            all_.success.labels(model_id, reason.value)
        for each in _OPERATIONS:
            all_.duration.labels(each, _PROVIDER, model_id, "")
            all_.ttft.labels(each, _PROVIDER, model_id)
            all_.per_token.labels(each, _PROVIDER, model_id)

    # What records report

    def accepted(self, num_prompt_tokens: int) -> None:
        self.totals.num_accepted += 1
        self.totals.num_prompt_tokens += num_prompt_tokens
        self.prompt_tokens.inc(num_prompt_tokens)

    def tokens(self, num_tokens: int, gap_s: float | None, *, is_split: bool) -> None:
        self.totals.num_output_tokens += num_tokens
        self._tokens.add(num_tokens, gap_s, is_split=is_split)

    def finished(self, reason: FinishReason) -> None:
        self.totals.num_ended += 1
        self.totals.requests.labels(self._model_id, reason.value).inc()
        self.totals.success.labels(self._model_id, reason.value).inc()

    def failed(self, error: BaseException) -> None:
        self.totals.num_ended += 1
        self.totals.requests.labels(self._model_id, error_outcome(error)).inc()

    def queued(self, stage: StageEnded) -> None:
        """Notes that a wait in the queue is over: the request has a worker, or has ended."""
        self._queue.observe(stage.ended_s - stage.started_s)
        if stage.attempt > 1:
            self._retries.inc()

    def parked(self, stage: StageEnded) -> None:
        """Notes that a store has a handoff, or will not have it."""
        outcome = stage.outcome if stage.outcome in _PARK_OUTCOMES else "failed"
        self.totals.parked.labels(self._model_id, outcome).inc()

    def graded(self, slo: str, result: Grade | None) -> None:
        if result is not None:
            self.totals.slo.labels(self._model_id, slo, result.value).inc()

    def duration(self, operation: str, seconds: float, error_type: str = "") -> None:
        self.totals.duration.labels(operation, _PROVIDER, self._model_id, error_type).observe(seconds)

    def latencies(self, operation: str, ttft_s: float, per_token_s: float | None) -> None:
        self.totals.ttft.labels(operation, _PROVIDER, self._model_id).observe(ttft_s)
        if per_token_s is not None:
            self.totals.per_token.labels(operation, _PROVIDER, self._model_id).observe(per_token_s)

    def phases(self, timings: types_pb2.PhaseTimings) -> None:
        for phase in _PHASES:
            if timings.HasField(f"{phase}_ms"):
                self.totals.phases.labels(self._model_id, phase).observe(getattr(timings, f"{phase}_ms") / 1000)


class RequestRecord:
    """Measures the times of one request, from its arrival. Exactly one of `finished` and `failed` is called, once."""

    def __init__(self, metrics: ModelMetrics, operation: str, arrived_s: float) -> None:
        self._metrics = metrics
        self._operation = operation
        self._arrived_s = arrived_s
        self.times = TokenTimes()
        self.outcome = errors.BatonError.reason.lower()
        """How the request has ended: its reason to finish, or of its error. Internal until one is known."""
        self._asked: tuple[int, int | None, int] | None = None

    def asked(self, num_prompt_tokens: int, max_tokens: int | None, priority: int) -> None:
        """Notes what is asked for, so that the request is remembered when it ends, also if it is refused."""
        self._asked = (num_prompt_tokens, max_tokens, priority)

    def accepted(self, num_prompt_tokens: int) -> None:
        self._metrics.accepted(num_prompt_tokens)

    def tokens(self, num_tokens: int, now: float, index: int = 0, *, is_split: bool = False) -> None:
        """Notes output tokens of an answer that arrived together; the time between them counts as 0. `is_split` says
        that they were decoded on another worker than the prompt was computed on."""
        if num_tokens < 1:
            return
        if self.times.first_s is None:
            ttft_s = now - self._arrived_s
            self._metrics.graded("ttft", grade(ttft_s, self._metrics.targets_s["ttft"]))
        self._metrics.tokens(num_tokens, self.times.add(num_tokens, now, index), is_split=is_split)

    def finished(self, reason: FinishReason, timings: types_pb2.PhaseTimings, now: float) -> None:
        elapsed_s, metrics = now - self._arrived_s, self._metrics
        self.outcome = reason.value
        self._remember(now, failed=False)
        metrics.finished(reason)
        metrics.duration(self._operation, elapsed_s)
        metrics.graded("e2e", grade(elapsed_s, metrics.targets_s["e2e"]))
        metrics.phases(timings)
        if self.times.first_s is not None:
            metrics.latencies(self._operation, self.times.first_s - self._arrived_s, self.times.per_token_s)

    def failed(self, error: BaseException, now: float) -> None:
        elapsed_s, metrics = now - self._arrived_s, self._metrics
        if isinstance(error, asyncio.CancelledError):  # the task was: its client has left
            error = errors.Cancelled("the client has left")
        self.outcome = error_outcome(error)
        self._remember(now, failed=True)
        metrics.failed(error)
        metrics.duration(self._operation, elapsed_s, error_outcome(error))
        metrics.graded("e2e", grade_failed(error, elapsed_s, metrics.targets_s["e2e"]))
        if self.times.first_s is None:
            metrics.graded("ttft", grade_failed(error, elapsed_s, metrics.targets_s["ttft"]))

    def _remember(self, now: float, *, failed: bool) -> None:
        if self._asked is None:
            return
        num_prompt_tokens, max_tokens, priority = self._asked
        first_s = self.times.first_s
        self._metrics.recent.add(
            RecentRequest(
                self._arrived_s,
                num_prompt_tokens,
                self.times.num_tokens,
                max_tokens,
                priority,
                None if first_s is None else first_s - self._arrived_s,
                now - self._arrived_s,
                failed,
            )
        )


class ModelTokenCounts:
    """Counts one model's output tokens and the times between them. Use it on the event loop only.

    The library's own counters take a lock for each of three values, which costs as much as all the rest that the router
    counts of a token. These are plain numbers that the event loop alone changes; a scrape, in another thread, copies
    them.
    """

    def __init__(self) -> None:
        self.num_tokens = 0
        self.split, self.unsplit = [0] * len(_BOUNDS), [0] * len(_BOUNDS)
        """How many times between tokens fall between a bound and the one before it, of split requests and of others."""
        self.sum_s = 0.0

    def add(self, num_tokens: int, gap_s: float | None, *, is_split: bool) -> None:
        """Counts tokens of an answer that came together, `gap_s` seconds after the one before them; None if there is
        none. The time between them counts as 0."""
        buckets = self.split if is_split else self.unsplit
        self.num_tokens += num_tokens
        buckets[0] += num_tokens - 1
        if gap_s is not None:
            buckets[bisect_left(INTER_TOKEN_BUCKETS, gap_s)] += 1
            self.sum_s += gap_s


def _added(*counts: list[int]) -> list[int]:
    return [sum(each) for each in zip(_NONE, *counts, strict=True)]


class TokenCounts(Collector):
    def __init__(self, registry: CollectorRegistry, label: str) -> None:
        """`label` is the one that names the model."""
        self._models: dict[str, ModelTokenCounts] = {}
        self._label = label
        registry.register(self)

    def of(self, model_id: str) -> ModelTokenCounts:
        return self._models.setdefault(model_id, ModelTokenCounts())

    def buckets(self) -> tuple[list[int], list[int]]:
        """Returns how many times between tokens of any model fall between a bound (`INTER_TOKEN_BUCKETS`, then none)
        and the one before it: of split requests, and of others."""
        models = self._models.values()
        return _added(*(each.split for each in models)), _added(*(each.unsplit for each in models))

    def forget(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def describe(self) -> Iterator[Metric]:
        yield from self._families({})

    def collect(self) -> Iterator[Metric]:
        yield from self._families(dict(self._models))

    def _families(self, models: dict[str, ModelTokenCounts]) -> tuple[Metric, Metric]:
        tokens = CounterMetricFamily(
            names.Metric.OUTPUT_TOKENS, "Output tokens passed on to clients", labels=[self._label]
        )
        between = HistogramMetricFamily(
            names.Metric.INTER_TOKEN_SECONDS, "Between one token and the next, seconds", labels=[self._label]
        )
        for model_id, counts in models.items():
            tokens.add_metric([model_id], counts.num_tokens)
            cumulative = accumulate(_added(counts.split, counts.unsplit))
            between.add_metric([model_id], list(zip(_BOUNDS, cumulative, strict=True)), counts.sum_s)
        return tokens, between
