"""Tests `baton health` through TLS, by flags and by the variables that a container's service has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.cli.main import main
from services.rpc.serving import GrpcServer
from tests.support.certificates import certificates, written


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"BATON_TLS_{name}", raising=False)
    return written(tmp_path / "tls")


@pytest_asyncio.fixture
async def target(folder: Path) -> AsyncIterator[str]:
    """Yields the address of a worker's port, which asks for certificates."""
    server = GrpcServer(certificates=certificates(folder, "worker"), by_role=True)
    await server.start()
    yield server.address
    await server.stop()


async def health(target: str, *flags: str) -> int:
    return await asyncio.to_thread(main, ["health", "--target", target, "--timeout", "10", *flags])


def flags_of(folder: Path, role: str) -> list[str]:
    files = {"ca": "ca.pem", "cert": f"{role}.pem", "key": f"{role}.key"}
    return [part for name, file in files.items() for part in (f"--tls-{name}", str(folder / file))]


@pytest.mark.parametrize("role", ["worker", "client"])
async def test_anyone_with_a_certificate_may_ask(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str], role: str
) -> None:
    assert await health(target, *flags_of(folder, role)) == 0
    assert capsys.readouterr().out == "SERVING\n"


async def test_a_container_finds_its_own_in_the_environment(
    target: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, file in (("CA", "ca.pem"), ("CERT", "worker.pem"), ("KEY", "worker.key")):
        monkeypatch.setenv(f"BATON_TLS_{name}", str(folder / file))
    assert await health(target) == 0


async def test_nobody_else_is_answered(target: str, folder: Path, tmp_path: Path) -> None:
    assert await health(target) != 0, "in the clear"
    assert await health(target, "--tls-ca", str(folder / "ca.pem")) != 0, "without a certificate"
    elsewhere = written(tmp_path / "elsewhere")
    assert await health(target, *flags_of(elsewhere, "worker")) != 0, "of another CA"


async def test_a_certificate_without_a_ca_is_told(
    target: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await health(target, *flags_of(folder, "worker")[2:]) == 2
    assert "--tls-ca is missing" in capsys.readouterr().err
