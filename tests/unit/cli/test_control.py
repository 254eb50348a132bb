"""Tests what commands say that come to a control port without what it asks for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import control_pb2_grpc
from services.cli.main import main
from services.core.cluster_token import cluster_token
from services.rpc.serving import GrpcServer
from tests.support.certificates import certificates, written

TOKEN = "a-token-of-the-tests"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a home in which nothing of a cluster is."""
    for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "CLUSTER_TOKEN", "CLUSTER_TOKEN_FILE", "CONTROL_TARGET"):
        monkeypatch.delenv(f"BATON_{name}", raising=False)
    monkeypatch.setenv("BATON_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@contextlib.asynccontextmanager
async def control_port(**access: Any) -> AsyncIterator[str]:
    server = GrpcServer(**access)
    service = "baton.v1.ControlService"
    server.add(
        service, control_pb2_grpc.add_ControlServiceServicer_to_server, control_pb2_grpc.ControlServiceServicer()
    )
    await server.start()
    try:
        yield server.address
    finally:
        await server.stop()


async def told(capsys: pytest.CaptureFixture[str], target: str, *flags: str) -> str:
    assert await asyncio.to_thread(main, ["status", f"--target={target}", *flags]) == 1
    return capsys.readouterr().err


async def test_who_has_no_token_is_told_that_the_router_asks_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    async with control_port(token=TOKEN) as target:
        err = await told(capsys, target)
    assert "needs the cluster token; the call has no token; --cluster-token-file, or BATON_CLUSTER_TOKEN, must" in err


async def test_who_has_no_certificate_is_told_of_it_and_of_no_token(
    tmp_path: Path, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "tls")
    async with control_port(certificates=certificates(folder, "router"), by_role=True) as target:
        for has_token in (False, True):  # as that of another cluster
            if has_token:
                cluster_token()
            err = await told(capsys, target)
            assert "give --tls-ca" in err
            assert "token" not in err
            err = await told(capsys, target, f"--tls-ca={folder / 'ca.pem'}")
            assert "it asks for a certificate of its CA that has not expired: give --tls-cert and --tls-key" in err
            assert "token" not in err


async def test_where_nobody_answers_no_token_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    async with control_port(token=TOKEN) as target:
        pass
    err = await told(capsys, target)
    assert "no Baton answers there" in err
    assert "token" not in err
