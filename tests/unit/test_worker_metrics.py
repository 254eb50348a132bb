"""A worker's metrics: read when scraped, and under the names that endpoint pickers know."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import generate_latest

from services.engine.block_pool import Holder
from services.worker.metrics import WorkerMetrics
from tests.models import tiny_model
from tests.workers import PREFILL, running_worker, worker_config


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path)


async def test_figures_and_their_aliases(model: Path) -> None:
    async with running_worker(worker_config(model, served_model_name="m"), PREFILL) as host:
        metrics = WorkerMetrics(host)
        with host.engine.lock:
            blocks = host.engine.pool.allocate(32, Holder.SEQUENCE)
        text = generate_latest(metrics.registry).decode()
        with host.engine.lock:
            host.engine.pool.release(blocks, Holder.SEQUENCE)
        metrics.close()
    assert 'baton_blocks{class="active"} 32.0' in text
    assert 'baton_blocks{class="free"} 96.0' in text
    assert "baton_kv_usage_ratio 0.25" in text
    assert 'vllm:kv_cache_usage_perc{model_name="m"} 0.25' in text
    assert 'vllm:num_requests_waiting{model_name="m"} 0.0' in text
    assert "baton_steps_failed_total 0.0" in text
