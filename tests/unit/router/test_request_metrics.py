"""Tests what a request's record leaves in the metrics."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import InvalidRequest, WorkerFailed
from services.router.coordinator.events import FinishReason, Stage, StageEnded
from services.router.telemetry.request_metrics import RequestMetrics, RequestRecord
from services.rpc.prometheus import DURATION_BUCKETS, PER_TOKEN_BUCKETS, TTFT_BUCKETS

MODEL = {"gen_ai_operation_name": "text_completion", "gen_ai_provider_name": "baton", "gen_ai_request_model": "m"}
TIMINGS = types_pb2.PhaseTimings(prefill_wait_ms=10, prefill_compute_ms=100, decode_run_ms=500)


class Bench:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.all_models = RequestMetrics(self.registry, slo_ttft_s=0.5, slo_e2e_s=5.0)
        self.metrics = self.all_models.of("m")

    def begin(self, now: float = 0.0, **prompt: Any) -> RequestRecord:
        return self.metrics.begin(inference_pb2.GenerateRequest(**prompt or {"text": "x"}), now)

    def value(self, name: str, **labels: str) -> float | None:
        ours = {"model": "m"} if name.startswith("baton_") else {}
        return self.registry.get_sample_value(name, {**ours, **labels})

    def slo(self, slo: str) -> dict[str, float | None]:
        return {
            result: value
            for result in ("met", "near", "missed")
            if (value := self.value("baton_slo_requests_total", slo=slo, result=result))
        }


def test_a_request_that_succeeds() -> None:
    bench = Bench()
    record = bench.begin(10.0)
    record.accepted(7)
    record.tokens(1, 10.3)
    record.tokens(1, 10.5)
    record.tokens(2, 10.6)
    record.finished(FinishReason.LENGTH, TIMINGS, 10.7)
    assert bench.value("baton_requests_total", outcome="length") == 1
    assert bench.value("vllm:request_success_total", model_name="m", finished_reason="length") == 1
    assert bench.value("gen_ai_server_request_duration_seconds_sum", **MODEL, error_type="") == pytest.approx(0.7)
    assert bench.value("gen_ai_server_time_to_first_token_seconds_sum", **MODEL) == pytest.approx(0.3)
    assert bench.value("gen_ai_server_time_per_output_token_seconds_sum", **MODEL) == pytest.approx(0.1)
    assert bench.value("baton_inter_token_seconds_count") == 3
    assert bench.value("baton_inter_token_seconds_sum") == pytest.approx(0.3)
    assert bench.value("baton_inter_token_seconds_bucket", le="0.001") == 1, "two came together"
    assert (bench.value("baton_prompt_tokens_total"), bench.value("baton_output_tokens_total")) == (7, 4)
    assert bench.value("baton_phase_seconds_sum", phase="prefill_compute") == pytest.approx(0.1)
    assert bench.value("baton_phase_seconds_count", phase="decode_wait") == 0
    assert (bench.slo("ttft"), bench.slo("e2e")) == ({"met": 1}, {"met": 1})


def test_a_request_that_fails_on_the_way() -> None:
    bench = Bench()
    said = [inference_pb2.ChatMessage(role="user", content="x")]
    record = bench.begin(messages=inference_pb2.ChatMessages(messages=said))
    record.accepted(3)
    record.tokens(1, 0.45)
    record.failed(WorkerFailed("x"), 1.0)
    chat = {**MODEL, "gen_ai_operation_name": "chat"}
    assert bench.value("baton_requests_total", outcome="worker_failed") == 1
    assert bench.value("gen_ai_server_request_duration_seconds_count", **chat, error_type="worker_failed") == 1
    assert bench.value("gen_ai_server_time_to_first_token_seconds_count", **chat) == 0, "of successes only"
    assert bench.value("baton_output_tokens_total") == 1
    assert (bench.slo("ttft"), bench.slo("e2e")) == ({"near": 1}, {"missed": 1})


def test_a_request_that_was_never_fit() -> None:
    bench = Bench()
    bench.begin().failed(InvalidRequest("text", "is empty"), 0.0)
    assert bench.value("baton_requests_total", outcome="invalid_parameter") == 1
    assert (bench.slo("ttft"), bench.slo("e2e")) == ({}, {})


def test_a_request_whose_client_left() -> None:
    bench = Bench()
    bench.begin().failed(asyncio.CancelledError(), 0.4)
    bench.begin().failed(asyncio.CancelledError(), 0.6)
    assert bench.value("baton_requests_total", outcome="cancelled") == 2
    assert (bench.slo("ttft"), bench.slo("e2e")) == ({"missed": 1}, {})


def test_every_wait_counts_and_another_placement_is_a_retry() -> None:
    bench = Bench()
    for attempt in (1, 2):
        bench.metrics.queued(StageEnded("r", Stage.QUEUE, 0, "", attempt, 1.0, 1.5, "prefilling"))
    assert bench.value("baton_queue_seconds_sum") == 1.0
    assert bench.value("baton_retries_total") == 1


def test_series_are_there_before_their_first_event() -> None:
    """Else `rate` would not see it."""
    bench = Bench()
    for outcome in ("stop", "length", "cancelled", "overloaded", "internal", "no_worker"):
        assert bench.value("baton_requests_total", outcome=outcome) == 0
    page = generate_latest(bench.registry).decode()
    bench.begin().failed(WorkerFailed("x"), 0.0)
    known = {line.partition(" ")[0] for line in page.splitlines()}
    new = {line.partition(" ")[0] for line in generate_latest(bench.registry).decode().splitlines()} - known
    assert {line.partition("{")[0] for line in new} <= {
        f"gen_ai_server_request_duration_seconds_{suffix}" for suffix in ("bucket", "count", "sum", "created")
    }, "labels stay few"


def test_each_model_has_its_own_series_and_one_that_is_gone_has_none() -> None:
    bench = Bench()
    other = bench.all_models.of("other")
    other.begin(inference_pb2.GenerateRequest(text="x"), 0.0).failed(WorkerFailed("x"), 1.0)
    bench.all_models.failed(InvalidRequest("text", "cannot be read"))
    assert bench.value("baton_requests_total", model="other", outcome="worker_failed") == 1
    assert bench.value("baton_requests_total", outcome="worker_failed") == 0
    assert bench.value("baton_requests_total", model="", outcome="invalid_parameter") == 1
    assert bench.all_models.num_ended == 2, "the activity line counts them all"
    before = generate_latest(bench.registry).decode()
    bench.all_models.forget("other")
    after = generate_latest(bench.registry).decode()
    assert '"other"' in before
    assert '"other"' not in after
    assert [line for line in before.splitlines() if '"other"' not in line] == after.splitlines()


def test_buckets_are_those_of_the_genai_conventions() -> None:
    """The conventions are https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-metrics/, generative AI model
    server metrics."""
    assert tuple(0.01 * 2**power for power in range(14)) == DURATION_BUCKETS
    assert TTFT_BUCKETS == (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
    assert PER_TOKEN_BUCKETS == (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
