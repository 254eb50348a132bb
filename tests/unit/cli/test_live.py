"""Tests what `baton plan --live` makes of a router's last hour, against a router that serves the two calls."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2, control_pb2_grpc
from services.cli import calibrate, plan_cluster
from services.cli.main import EXIT_NO_ANSWER, main
from services.core.errors import ConfigError, NoWorker
from services.sim.last_hour import workload_of
from services.sim.profile import WorkerProfile, write_profile
from services.sim.trace import TracedRequest
from tests.unit.cli.test_simulate import status


def recent(age_s: float, **fields: Any) -> control_pb2.RecentRequest:
    figures = {"prompt_tokens": 100, "output_tokens": 20, "ttft_us": 50_000, "total_us": 600_000}
    return control_pb2.RecentRequest(age_us=round(age_s * 1e6), **(figures | fields))


def test_arrivals_and_lengths_become_a_trace() -> None:
    trace = workload_of(
        [
            recent(100.0, priority=2),
            recent(97.5, output_tokens=40),
            recent(96.0, output_tokens=3, failed=True),
            recent(95.0, output_tokens=0, failed=True, max_tokens=10),
        ]
    )
    assert trace == [
        TracedRequest(0.0, 100, 20, priority=2),
        TracedRequest(2.5, 100, 40),
        TracedRequest(4.0, 100, 30),
        TracedRequest(5.0, 100, 10),
    ]


class Servicer(control_pb2_grpc.ControlServiceServicer):
    measured = True
    """Whether the worker has measured what its steps cost."""

    def __init__(self, requests: list[control_pb2.RecentRequest]) -> None:
        self._requests = requests

    async def ListRecentRequests(self, request: Any, context: Any) -> control_pb2.ListRecentRequestsResponse:
        return control_pb2.ListRecentRequestsResponse(requests=self._requests)

    async def GetStatus(self, request: Any, context: Any) -> control_pb2.GetStatusResponse:
        workers = [
            control_pb2.WorkerStatus(worker=each.worker, load=each.load, has_session=True)
            for each in status((0.2, 10.0, 0.2) if self.measured else (0.0, 0.0, 0.0))
        ]
        return control_pb2.GetStatusResponse(workers=workers, models=[control_pb2.ModelStatus(model_id="m")])


class Silent(control_pb2_grpc.ControlServiceServicer):
    async def ListRecentRequests(self, request: Any, context: Any) -> Any:
        await asyncio.Event().wait()

    GetStatus = ListRecentRequests


@contextlib.asynccontextmanager
async def router(requests: list[control_pb2.RecentRequest]) -> AsyncIterator[str]:
    server = grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(Servicer(requests), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def plan(requests: list[control_pb2.RecentRequest], monkeypatch: pytest.MonkeyPatch, *more: str) -> int:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", "x" * 32)
    monkeypatch.setenv("BATON_HOME", "nowhere")
    slo = ["--slo", "ttft_p95=800ms,tpot_p95=40ms"]
    async with router(requests) as target:
        arguments = ["--live", "--target", target, *slo, *more]
        return await asyncio.to_thread(plan_cluster.main, arguments, "baton plan")


async def test_a_plan_is_made_for_what_a_router_has_served(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = [recent(60.0 - number / 2) for number in range(100)]
    requests += [recent(5.0, ttft_us=900_000), recent(5.0, failed=True), recent(5.0, total_us=9_000_000)]
    assert await plan(requests, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "served: 103 requests in the last hour, 97.1% within the bounds" in printed
    assert "cheapest   1 mixed: 1 an hour" in printed
    assert await plan(requests, monkeypatch, "--json") == 0
    assert json.loads(capsys.readouterr().out)["served"] == {"good": 100, "all": 103}


async def test_what_workers_have_measured_can_be_changed_and_replaced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Serves prompts that no worker of the plan computes in time by the figures that are given."""
    requests = [recent(60.0 - number / 2) for number in range(100)]
    assert await plan(requests, monkeypatch, "--set", "ms_per_decode_step=41") == 1
    assert "tpot_p95 <= 40 ms is out of reach" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"--profile: no file none.json; `baton calibrate` writes one"):
        await plan(requests, monkeypatch, "--profile", "none.json")
    monkeypatch.setattr(Servicer, "measured", False)
    with pytest.raises(NoWorker, match="no worker has measured what its steps cost"):
        await plan(requests, monkeypatch)
    slow = tmp_path / "slow.json"
    write_profile(
        slow, WorkerProfile("slow", ms_per_prefill_token=99.0, ms_per_decode_step=1.0, ms_per_decode_sequence=0.0)
    )
    assert await plan(requests, monkeypatch, "--profile", str(slow)) == 1
    assert "ttft_p95 <= 800 ms is out of reach" in capsys.readouterr().out


async def test_a_router_that_has_served_nothing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"--live: 127.0.0.1:\d+ has had 1 requests in the last hour, too few"):
        await plan([recent(1.0)], monkeypatch)
    with pytest.raises(ConfigError, match="--live: takes the place of --trace"):
        await plan([], monkeypatch, "--trace", "a.csv")


@pytest.mark.parametrize("command", [["plan", "--live", "--slo", "ttft_p95=800ms"], ["calibrate"]])
async def test_a_router_that_says_nothing_is_not_waited_for_for_ever(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, command: list[str]
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", "x" * 32)
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    for module in (plan_cluster, calibrate):
        monkeypatch.setattr(module, "CONTROL_TIMEOUT_S", 0.3)
    silent = grpc.aio.server()
    control_pb2_grpc.add_ControlServiceServicer_to_server(Silent(), silent)
    port = silent.add_insecure_port("127.0.0.1:0")
    await silent.start()
    try:
        assert await asyncio.to_thread(main, [*command, "--target", f"127.0.0.1:{port}"]) != 0
    finally:
        await silent.stop(None)
    assert "no answer within 0.3 s" in capsys.readouterr().err


def test_a_router_that_cannot_be_asked_is_told_apart_from_a_plan_that_nothing_meets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", "x" * 32)
    with socket.socket() as nobody:  # bound, but nothing listens
        nobody.bind(("127.0.0.1", 0))
        target = f"127.0.0.1:{nobody.getsockname()[1]}"
        arguments = ["plan", "--live", "--target", target, "--timeout", "5", "--slo", "ttft_p95=800ms"]
        assert main(arguments) == EXIT_NO_ANSWER
    assert f"baton plan: error: {target}: no Baton answers there" in capsys.readouterr().err
