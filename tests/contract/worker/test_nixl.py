"""Tests `--transport nixl`, and that NIXL does nothing where it was only installed."""

from __future__ import annotations

import contextlib
import logging
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from baton.v1 import types_pb2
from services.core.errors import ConfigError
from services.engine.loading import torch_engine
from services.kvtransfer.transports import nixl_agent
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer
from services.worker import transfer
from services.worker.host import WorkerHost
from services.worker.machine import Machine
from services.worker.main import engine_config
from tests.support.certificates import certificates, written
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import DECODE, pools_that_cannot_be_mapped, running_worker, worker_config

installed = pytest.mark.skipif(not nixl_agent.is_installed(), reason="NIXL is not installed")


@installed
@pytest.mark.parametrize("mappable", [True, False])
async def test_it_is_offered_where_it_is_asked_for(model: Path, mappable: bool) -> None:
    """The pool itself is registered, also where no peer could map it."""
    config = worker_config(model, transport="nixl")
    with contextlib.nullcontext() if mappable else pools_that_cannot_be_mapped():
        async with running_worker(config, DECODE) as host:
            assert host.transfer.summary == "pulls by nixl only, offers nixl and grpc"
            assert [offer.transport for offer in host.transfer.offers] == [
                types_pb2.TRANSPORT_NIXL,
                types_pb2.TRANSPORT_GRPC,
            ]


async def test_to_ask_for_what_is_not_installed_fails_the_start(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_agent, "_PACKAGES", ("nixl_of_nobody",))
    config = worker_config(model, transport="nixl", worker_id="demanding")
    engine = torch_engine(engine_config(config, DECODE))
    tracer, machine = Tracer(TracerProvider(shutdown_on_exit=False)), Machine(CLUSTER_TOKEN)
    with pytest.raises(ConfigError, match=r"--transport: nixl is not installed \(pip install"):
        WorkerHost(config, DECODE, engine, GrpcServer(), tracer, machine)
    engine.cache.close()


async def test_auto_has_no_use_for_it_without_rdma(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "services"):
        async with running_worker(worker_config(model), DECODE) as host:
            assert "nixl" not in host.transfer.summary
    assert "nixl" not in caplog.text.lower()


@pytest.mark.parametrize("transport", ["auto", "nixl"])
async def test_a_worker_with_tls_does_without_it_unless_it_is_allowed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, transport: str
) -> None:
    monkeypatch.setattr(transfer, "_nixl_helps", lambda site: True)
    machine = Machine(CLUSTER_TOKEN, certificates=certificates(written(tmp_path / "certificates"), "worker"))

    def worker(**flags: Any) -> WorkerHost:
        config = worker_config(model, transport=transport, worker_id="careful", **flags)
        engine = torch_engine(engine_config(config, DECODE))
        stack.callback(engine.cache.close)
        tracer = Tracer(TracerProvider(shutdown_on_exit=False))
        host = WorkerHost(config, DECODE, engine, GrpcServer(), tracer, machine)
        stack.push_async_callback(host.transfer.close)
        return host

    async with contextlib.AsyncExitStack() as stack:
        if transport == "nixl":
            with pytest.raises(ConfigError, match=r"--transport: nixl: it does not encrypt.*--allow-plain-kv"):
                worker()
        else:
            without = worker()
            assert "nixl" not in without.transfer.summary
            assert without.withheld.startswith("nixl: it does not encrypt")
            assert without.withheld in caplog.text
        if nixl_agent.is_installed():
            allowed = worker(allow_plain_kv=True)
            assert "nixl" in allowed.transfer.summary
            assert not allowed.withheld


@installed
async def test_auto_offers_it_where_there_is_rdma_and_never_by_tcp(
    model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """There is none here, so that UCX is left with nothing; the worker does without."""
    monkeypatch.setattr(transfer, "has_rdma_device", lambda: True)
    monkeypatch.setattr(nixl_agent, "has_rdma_device", lambda: True)
    async with running_worker(worker_config(model, host="0.0.0.0"), DECODE) as host:
        assert host.transfer.summary.startswith("pulls by shm, else nixl, ")
        assert types_pb2.TRANSPORT_NIXL not in [offer.transport for offer in host.transfer.offers]
    assert "nixl is not offered to other workers: it does not work on this machine" in caplog.text


@pytest.mark.parametrize(
    ("rdma", "on_this_host", "asked_for", "settings"),
    [
        (False, True, True, {"NET_DEVICES": "lo"}),
        (True, True, False, {"NET_DEVICES": "lo"}),
        (False, False, True, {}),
        (True, False, True, {}),
        (True, False, False, {"TLS": "^tcp"}),
        (False, False, False, {"NET_DEVICES": "lo"}),
    ],
)
def test_what_ucx_may_use(
    monkeypatch: pytest.MonkeyPatch, rdma: bool, on_this_host: bool, asked_for: bool, settings: dict[str, str]
) -> None:
    monkeypatch.setattr(nixl_agent, "has_rdma_device", lambda: rdma)
    assert nixl_agent.ucx_settings(on_this_host=on_this_host, asked_for=asked_for) == settings
