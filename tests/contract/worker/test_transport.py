"""Tests `--transport`: a worker says at its start how KV moves, and `shm` is a demand, not a wish."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from services.cli.up import UpConfig
from services.core import sealed_memory
from services.core.errors import ConfigError
from services.engine.loading import torch_engine
from services.rpc.logging import JsonFormatter
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer
from services.worker.config import WorkerConfig
from services.worker.host import WorkerHost
from services.worker.machine import Machine
from services.worker.main import engine_config
from services.worker.transfer import TRANSPORTS
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import (
    DECODE,
    PREFILL,
    ScriptedRouter,
    decode_command,
    pools_that_cannot_be_mapped,
    prefill_command,
    running_worker,
    worker_config,
)


@pytest.fixture
def unmappable_pools() -> Iterator[None]:
    with pools_that_cannot_be_mapped():
        yield


def _tcp_address(host: WorkerHost) -> str:
    """Returns where the worker offers KV over sockets; an empty string if it does not."""
    return "".join(offer.tcp_address for offer in host.transfer.offers)


@pytest.mark.parametrize("config", [WorkerConfig, UpConfig])
def test_the_flag_names_every_transport(config: type) -> None:
    (choices,) = [field.metadata["choices"] for field in dataclasses.fields(config) if field.name == "transport"]
    assert choices == ("auto", *TRANSPORTS)


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        ("auto", "pulls by shm, else tcp, else grpc, offers shm ({socket}) and tcp ({tcp}) and grpc"),
        ("shm", "pulls by shm only, offers shm ({socket}) and grpc"),
        ("grpc", "pulls by grpc only, offers grpc"),
    ],
)
async def test_the_start_up_line_names_the_transport(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, transport: str, says: str
) -> None:
    config = worker_config(model, transport=transport, shm_dir=str(tmp_path), worker_id="decode-7")
    with caplog.at_level(logging.INFO, "services.worker"):
        async with running_worker(config, DECODE) as host:
            assert (tmp_path / "decode-7.sock").is_socket() == (transport != "grpc")
            address, tcp = host.address, _tcp_address(host)
    line = next(record.message for record in caplog.records if "KV transport" in record.message)
    assert line.endswith(
        f"reached at {address}; KV transport: {says.format(socket=tmp_path / 'decode-7.sock', tcp=tcp)}"
    )
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("transport", "says"),
    [
        (
            "auto",
            "pulls by shm, else tcp, else grpc, offers shm ({socket}, staged: 1 MiB) and tcp ({tcp}) and grpc",
        ),
        ("shm", "pulls by shm only, offers shm ({socket}, staged: 1 MiB) and grpc"),
        ("grpc", "pulls by grpc only, offers grpc"),
    ],
)
async def test_a_pool_that_cannot_be_mapped_is_staged(
    model: Path, tmp_path: Path, unmappable_pools: None, transport: str, says: str
) -> None:
    config = worker_config(model, transport=transport, shm_dir=str(tmp_path), worker_id="decode-7", staging_mb=1)
    async with running_worker(config, DECODE) as host:
        assert host.transfer.summary == says.format(socket=tmp_path / "decode-7.sock", tcp=_tcp_address(host))
    maps = await asyncio.to_thread(Path("/proc/self/maps").read_text)
    assert "memfd:baton-staging" not in maps


@pytest.fixture
def a_kernel_that_cannot_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sealed_memory, "SEALS", 1 << 30)  # refused as Linux 5.0 refuses F_SEAL_FUTURE_WRITE


@pytest.mark.parametrize("mappable", [True, False])
async def test_what_cannot_be_sealed_is_offered_to_nobody(
    model: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    a_kernel_that_cannot_seal: None,
    mappable: bool,
) -> None:
    config = worker_config(model, shm_dir=str(tmp_path), staging_mb=1)
    with contextlib.nullcontext() if mappable else pools_that_cannot_be_mapped():
        async with running_worker(config, PREFILL) as source, running_worker(config, DECODE) as target:
            tcp = _tcp_address(source)
            assert source.transfer.summary == f"pulls by shm, else tcp, else grpc, offers tcp ({tcp}) and grpc"
            assert os.listdir(tmp_path) == []
            router = ScriptedRouter()
            async with router.session(source) as prefill, router.session(target) as decode:
                await _handoff(router, prefill, decode, "ready")
        assert "this kernel cannot seal it" in caplog.text
        demanding = worker_config(model, transport="shm", shm_dir=str(tmp_path), worker_id="demanding")
        engine = torch_engine(engine_config(demanding, DECODE))
        tracer, machine = Tracer(TracerProvider(shutdown_on_exit=False)), Machine(CLUSTER_TOKEN)
        with pytest.raises(ConfigError, match=r"--transport: shm needs memory that can be sealed"):
            WorkerHost(demanding, DECODE, engine, GrpcServer(), tracer, machine)
        engine.cache.close()


async def test_demanded_shared_memory_that_cannot_be_offered_fails_the_start(model: Path, tmp_path: Path) -> None:
    config = worker_config(model, transport="shm", shm_dir=str(tmp_path / "nowhere"), worker_id="decode-7")
    engine = torch_engine(engine_config(config, DECODE))
    tracer = Tracer(TracerProvider(shutdown_on_exit=False))
    with pytest.raises(ConfigError, match="cannot listen on"):
        WorkerHost(config, DECODE, engine, GrpcServer(), tracer, Machine(CLUSTER_TOKEN))
    engine.cache.close()


async def test_a_peer_out_of_reach_of_shared_memory_fails_the_import_by_name(model: Path, tmp_path: Path) -> None:
    """Two containers that do not share the folder are out of each other's reach. The lease lives: a worker that can may
    fetch it."""
    router = ScriptedRouter()
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    async with (
        running_worker(worker_config(model, shm_dir=str(there)), PREFILL) as source,
        running_worker(worker_config(model, transport="shm", shm_dir=str(here)), DECODE) as target,
    ):
        (name,) = os.listdir(there)
        moved = there / name
        moved.rename(tmp_path / "elsewhere.sock")  # what the other container sees of this folder: nothing
        async with router.session(source) as prefill, router.session(target) as decode:
            failed = await _handoff(router, prefill, decode)
        (tmp_path / "elsewhere.sock").rename(moved)
    assert failed.lease_alive
    assert f"shared memory at {moved}" in failed.status.message


async def test_a_transfers_log_line_says_whose_it_is(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    router = ScriptedRouter()
    caplog.handler.setFormatter(JsonFormatter("baton-decode", "decode-0"))
    async with (
        running_worker(worker_config(model, shm_dir=str(tmp_path)), PREFILL) as source,
        running_worker(worker_config(model), DECODE) as target,
    ):
        (name,) = os.listdir(tmp_path)
        moved = tmp_path / name
        moved.rename(tmp_path / "elsewhere.sock")
        with caplog.at_level(logging.INFO, "services.kvtransfer"):
            async with router.session(source) as prefill, router.session(target) as decode:
                await _handoff(router, prefill, decode, "ready")
        (tmp_path / "elsewhere.sock").rename(moved)
    (line,) = [line for line in caplog.text.splitlines() if "takes another transport" in line]
    assert json.loads(line)["request_id"] == "r"


async def _handoff(router: ScriptedRouter, prefill: Any, decode: Any, until: str = "import_failed") -> Any:
    leg, decode_leg = router.new_leg(), router.new_leg()
    await prefill.send(prefill=prefill_command(leg))
    started = await prefill.next("started", leg)
    await decode.send(decode=decode_command(decode_leg, started))
    return await decode.next(until, decode_leg)
