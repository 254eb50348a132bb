"""Tests a worker's metrics: read when scraped, and under the names that endpoint pickers know."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics

from services.core.clock import ManualClock
from services.core.errors import StepFailed
from services.engine.schedule.sequence import (
    SampledToken,
    SampleRow,
    SamplingParams,
    ScheduledSequence,
    StepPlan,
    StepResult,
)
from services.engine.step_tally import StepTally
from services.kv.pool import Holder
from services.rpc.prometheus import Rendering
from tests.support.blocks import set_aside
from tests.support.models import tiny_model
from tests.support.workers import PREFILL, running_worker, worker_config, worker_metrics


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path)


async def test_figures_and_their_aliases(model: Path) -> None:
    async with running_worker(worker_config(model, served_model_name="m"), PREFILL) as host:
        metrics = worker_metrics(host)
        blocks = set_aside(host.engine, 32)
        text = generate_latest(metrics.registry).decode()
        strict = (await Rendering(metrics.registry).render("application/openmetrics-text"))[0].decode()
        host.engine.release(blocks, Holder.IMPORT)
        metrics.close()
    assert {"vllm:num_requests_waiting", "baton_steps"} <= {family.name for family in parse_openmetrics(strict)}
    assert 'baton_blocks{class="importing"} 32.0' in text
    assert 'baton_blocks{class="free"} 96.0' in text
    assert "baton_kv_usage_ratio 0.25" in text
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.25' in text
    assert 'vllm:num_requests_waiting{model_name="m"} 0.0' in text
    assert 'vllm:gpu_cache_usage_perc{model_name="m"} 0.25' in text
    assert 'vllm:cache_config_info{block_size="16",num_gpu_blocks="128"} 1.0' in text
    assert "baton_steps_failed_total 0.0" in text
    assert 'baton_transfer_bytes_total{transport="shm"} 0.0' in text
    assert "baton_cost_total 0.0" in text
    assert "baton_device_memory_bytes{" not in text, "the CPU has none of its own"


def scripted_plan(*num_tokens: int) -> StepPlan:
    parts = [
        ScheduledSequence(number, 0, tuple(range(size)), (), (SampleRow(0, SamplingParams()),), is_decode=size == 1)
        for number, size in enumerate(num_tokens)
    ]
    return StepPlan(1, tuple(parts))


async def test_steps(model: Path) -> None:
    async with running_worker(worker_config(model), PREFILL) as host:
        tally = host.engine.tally = StepTally()
        metrics = worker_metrics(host)
        sampled = {0: (SampledToken(1),), 1: (SampledToken(1),)}
        tally.step(scripted_plan(1, 1), StepResult(sampled, inputs_s=0.001, model_s=0.002, sample_s=0.001), 1.0, 1.005)
        tally.step(scripted_plan(1, 1, 40), StepFailed("x"), 2.0, 2.5)
        tally.scheduled(0.25)
        text = generate_latest(metrics.registry).decode()
        metrics.close()
    for line in (
        "baton_steps_total 2.0",
        "baton_steps_failed_total 1.0",
        'baton_step_tokens_total{kind="decode"} 4.0',
        'baton_step_tokens_total{kind="prefill"} 40.0',
        "baton_sampled_tokens_total 2.0",
        'baton_step_part_seconds_total{part="model"} 0.002',
        'baton_step_part_seconds_total{part="schedule"} 0.25',
        'baton_batch_size_bucket{le="1"} 0.0',
        'baton_batch_size_bucket{le="2"} 1.0',
        'baton_batch_size_bucket{le="4"} 2.0',
        "baton_batch_size_sum 5.0",
        'baton_step_duration_seconds_bucket{le="0.01"} 1.0',
        'baton_step_duration_seconds_bucket{le="+Inf"} 2.0',
    ):
        assert f"\n{line}\n" in text, line


async def test_an_hour_costs_what_the_flag_says(model: Path) -> None:
    async with running_worker(worker_config(model, cost_per_hour=36.0), PREFILL) as host:
        clock = ManualClock()
        metrics = worker_metrics(host, clock)
        clock.advance(100.0)
        value = metrics.registry.get_sample_value("baton_cost_total")
        metrics.close()
    assert value == pytest.approx(1.0)
