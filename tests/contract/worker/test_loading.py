"""Tests what a worker says and serves while it loads."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2
from benchmarks.ports import free_ports
from services.core.clock import ManualClock
from services.core.lifecycle import Lifecycle
from services.core.start_progress import StartProgress
from services.rpc.serving import GrpcServer
from services.worker import main
from services.worker.loading import Announcement, expected_load_s
from tests.support.models import tiny_model
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN, dial
from tests.support.workers import DECODE, MIXED, until, worker_config


class Registry(control_pb2_grpc.RegistryServiceServicer):
    """Keeps what workers register with."""

    def __init__(self) -> None:
        self.requests: list[control_pb2.RegisterRequest] = []
        self.server = GrpcServer(token=CLUSTER_TOKEN)
        self.server.add("baton.v1.RegistryService", control_pb2_grpc.add_RegistryServiceServicer_to_server, self)

    async def Register(self, request: control_pb2.RegisterRequest, context: Any) -> control_pb2.RegisterResponse:
        self.requests.append(request)
        return control_pb2.RegisterResponse(router_incarnation=7, interval_ms=20)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model("llama", tmp_path)


async def test_it_registers_and_shows_metrics_before_it_has_loaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, may_load = main.make_engine, threading.Event()

    def make_when_told(config: Any, roles: Any, tell: Any) -> Any:
        tell(StartProgress("load", "weights", 0, 5))
        assert may_load.wait(HANG_S)
        return make(config, roles, tell)

    monkeypatch.setattr(main, "make_engine", make_when_told)
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    registry, lifecycle = Registry(), Lifecycle()
    await registry.server.start()
    [metrics_port] = free_ports(1)
    config = worker_config(
        model,
        router=(registry.server.address,),
        worker_id="w",
        served_model_name="m",
        metrics_port=metrics_port,
    )
    serving = asyncio.create_task(main.serve(config, lifecycle, MIXED))
    await until(lambda: any(each.loading.progress == "load: weights" for each in registry.requests), "it says so")
    [said] = {(each.loading.worker_id, each.loading.model_id, *each.loading.roles) for each in registry.requests}
    assert said == ("w", "m", types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE)
    assert not any(each.HasField("worker") for each in registry.requests)
    assert 'baton_info{instance="w"' in await scrape(metrics_port)
    may_load.set()
    await until(lambda: registry.requests[-1].HasField("worker"), "it describes itself")
    number = len(registry.requests)
    await until(lambda: len(registry.requests) > number + 3, "it goes on")
    assert all(each.HasField("worker") for each in registry.requests[number:]), "no announcement comes late"
    assert "\nbaton_blocks{" in await scrape(metrics_port)
    lifecycle.stop("the test ends")
    await serving
    await registry.server.stop()


async def scrape(port: int) -> str:
    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=HANG_S) as answer:
            return str(answer.read().decode())

    return await asyncio.to_thread(get)


def test_it_counts_down_to_nothing(model: Path) -> None:
    clock = ManualClock()
    announced = Announcement(worker_config(model, worker_id="w"), DECODE, "m", dial, clock)
    first = announced.request().loading.ready_within_ms
    clock.advance(40.0)
    assert first - announced.request().loading.ready_within_ms == 40_000
    clock.advance(400.0)
    assert announced.request().loading.ready_within_ms == 0
    assert not announced.request().loading.progress


def test_large_weights_are_expected_to_take_longer(tmp_path: Path) -> None:
    assert expected_load_s("torch", tmp_path) == 60.0
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(20_000_000_000)
    assert expected_load_s("torch", tmp_path) == 260.0
    assert expected_load_s("vllm", tmp_path) == 500.0
