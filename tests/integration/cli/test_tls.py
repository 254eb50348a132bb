"""Tests what client commands say and do through TLS, and where one end speaks it and the other does not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from baton_client import AsyncClient
from services.cli import calibrate
from services.cli.main import main
from services.sim.profile import WorkerProfile
from tests.support.certificates import written
from tests.support.cluster import Cluster, running_cluster
from tests.support.http_client import HTTP
from tests.support.models import tiny_model
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import MIXED

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("certificates") / "tls")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, folder: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, [MIXED], tls=folder, router=HTTP) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in (
        "TLS_CA",
        "TLS_CERT",
        "TLS_KEY",
        "TLS_SERVER_NAME",
        "ALLOW_PLAIN_TOKEN",
        "CLUSTER_TOKEN",
        "CLUSTER_TOKEN_FILE",
    ):
        monkeypatch.delenv(f"BATON_{name}", raising=False)
    monkeypatch.setenv("BATON_HOME", str(tmp_path))


async def baton(*arguments: str) -> int:
    return await asyncio.to_thread(main, arguments)


def shown(folder: Path, role: str) -> list[str]:
    return [f"--tls-{name}={folder / file}" for name, file in files(role).items()]


def files(role: str) -> dict[str, str]:
    return {"ca": "ca.pem", "cert": f"{role}.pem", "key": f"{role}.key"}


async def test_an_operators_certificate_needs_no_token(
    cluster: Cluster, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"--target={cluster.router.control_address}"
    assert await baton("status", target, *shown(folder, "operator")) == 0
    out = capsys.readouterr().out
    assert "w0" in out
    assert f"https://127.0.0.1:{cluster.router.http_port}/v1" in out
    for name, file in files("operator").items():
        monkeypatch.setenv(f"BATON_TLS_{name.upper()}", str(folder / file))
    assert await baton("slo", target) == 0


async def test_a_calibration_sends_its_requests_through_tls(
    cluster: Cluster, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def measured(known: WorkerProfile, workers: Any, dial: Callable[[], AsyncClient], *_: Any) -> WorkerProfile:
        async def ask() -> None:
            async with dial() as client:
                asked.extend(model.id for model in await client.list_models(timeout_s=HANG_S))

        asyncio.run(ask())
        return known

    monkeypatch.setattr(calibrate, "measured", measured)
    flags = [f"--target={cluster.router.control_address}", f"--measure={cluster.router.address}"]
    assert await baton("calibrate", *flags, *shown(folder, "operator"), f"--out={tmp_path / 'profile.json'}") == 0
    assert asked == ["tiny-llama"]


async def test_a_prompt_goes_through_tls(
    cluster: Cluster, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = f"--target={cluster.router.address}"
    asked = ["--prompt", "The sea is", "--max-tokens", "3"]
    assert await baton("generate", target, *asked, f"--tls-ca={folder / 'ca.pem'}") == 0
    monkeypatch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))  # OpenSSL's own variable
    assert await baton("generate", target, *asked, "--tls-ca=system") == 0
    monkeypatch.setenv("BATON_TLS_CA", str(folder / "ca.pem"))
    async with asyncio.timeout(20):  # the router says so a moment after its worker is ready
        while await baton("health", target, "--service", "baton.v1.InferenceService") != 0:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert "SERVING" in capsys.readouterr().out
    assert await baton("health", target, "--tls-server-name", "elsewhere.test") == 1
    assert "its certificate is another's" in capsys.readouterr().err


async def test_who_may_not_is_told_why(
    cluster: Cluster, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other, target = written(tmp_path / "other"), f"--target={cluster.router.control_address}"
    mixed = [*shown(folder, "operator")[:1], *shown(other, "operator")[1:]]
    token = tmp_path / "cluster-token"
    token.touch(mode=0o600)
    token.write_text(CLUSTER_TOKEN)
    for flags, told in (
        (shown(folder, "client"), "is for operator"),
        (shown(other, "operator"), "not of the CAs in --tls-ca"),
        (mixed, "asks for a certificate of its CA"),
        ([*shown(folder, "operator")[:1], f"--cluster-token-file={token}"], "asks for a certificate of its CA"),
        (shown(folder, "operator")[:2], "--tls-key is missing"),
        (shown(folder, "operator")[1:], "--tls-ca is missing"),
    ):
        assert await baton("status", target, "--timeout=10", *flags) != 0
        err = capsys.readouterr().err
        assert told in err
        assert "cluster-token" not in err, "no token would help"


async def test_tls_at_one_end_alone_is_told(
    cluster: Cluster, model: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_cluster(model, [MIXED]) as plain:
        target = f"--target={plain.router.control_address}"
        assert await baton("status", target, "--timeout=10", *shown(folder, "operator")) == 1
        assert "no TLS is spoken there" in capsys.readouterr().err
    for address in (cluster.router.address, cluster.router.control_address):
        assert await baton("health", f"--target={address}") == 1
        assert "give --tls-ca" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["status", "top", "slo", "explain", "drain", "calibrate", "generate"])
async def test_no_secret_crosses_a_network_in_the_clear_unasked(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_API_KEY", "bk_a_b")
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", "a-token-of-the-tests")
    more = {"explain": ["--request", "r"], "drain": ["w"], "generate": ["--prompt", "x"], "calibrate": []}
    assert await baton(command, "--target", "router.test:1", *more.get(command, [])) == 2
    assert "in the clear on its way to router.test:1" in capsys.readouterr().err
