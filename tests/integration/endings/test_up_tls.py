"""Tests `baton up` inside TLS, with no token: from prompt to answer, as its own commands and OpenAI's client ask."""

from __future__ import annotations

import re
import signal
import ssl
from pathlib import Path

import httpx2
import openai
import pytest

from tests.support.certificates import written
from tests.support.models import tiny_model
from tests.support.processes import Up, baton

pytestmark = pytest.mark.process

NO_TOKEN = ""
"""Is refused by whoever reads it."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


def test_a_cluster_inside_tls_knows_its_own_by_certificates(model: Path, tmp_path: Path) -> None:
    home, folder = tmp_path / "home", tmp_path / "tls"
    assert baton(["certs", "dev", str(folder)], tmp_path).returncode == 0
    flags = ("--tls-dir", str(folder), "--cluster-auth", "mtls", "--kvtransfer", "1", "--kvtransfer-bytes", "64MiB")
    # Settings of whoever asks the cluster are none of its processes'.
    settings = {"BATON_CLUSTER_TOKEN": NO_TOKEN, "BATON_HOME": str(home), "BATON_TLS_CERT": "/nowhere"}
    with Up(model, tmp_path, *flags, **settings) as up:
        up.read_until("^ready")
        shown = [f"--tls-{name}={folder / file}" for name, file in _files("operator").items()]
        assert up.baton("status", *shown).returncode == 0
        assert up.baton("status", *[flag.replace("operator", "client") for flag in shown]).returncode == 1
        assert up.baton("generate", "--prompt", "The sea", "--max-tokens", "3", shown[0]).returncode == 0
        http = next(match[1] for line in up.lines if (match := re.match(r"http +(https://\S+/v1)", line)))
        trusting = httpx2.Client(verify=ssl.create_default_context(cafile=folder / "ca.pem"), trust_env=False)
        with openai.OpenAI(base_url=http, api_key="none", http_client=trusting, max_retries=0) as client:
            served = client.models.list().data[0].id
            parts = list(client.completions.create(model=served, prompt="The sea", max_tokens=4, stream=True))
            assert parts[-1].choices[0].finish_reason in ("length", "stop")
        with pytest.raises(httpx2.HTTPError), httpx2.Client(trust_env=False) as plain:
            plain.get(http.replace("https", "http") + "/models")
        up.stop(signal.SIGTERM)
    assert not home.exists() or not list(home.glob("**/cluster-token")), "no token was made"


def test_public_tls_alone_needs_no_certificates_within(model: Path, tmp_path: Path) -> None:
    folder = written(tmp_path / "tls")
    cert = ("--public-tls-cert", str(folder / "router.pem"), "--public-tls-key", str(folder / "router.key"))
    with Up(model, tmp_path, "--mixed", "1", *cert) as up:
        up.read_until("^ready")
        assert up.baton("status").returncode == 0
        assert up.baton("health").returncode == 1
        assert up.baton("health", f"--tls-ca={folder / 'ca.pem'}").returncode == 0


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--cluster-auth", "mtls"], "--cluster-auth: mtls needs certificates: give --tls-dir"),
        (["--tls-dir", "nowhere"], "--tls-dir: nowhere is no folder"),
        (["--tls-dir", "."], "--tls-dir: ca.pem: No such file|--tls-dir: operator.pem: No such file"),
    ],
)
def test_what_cannot_be_is_told_at_once(model: Path, tmp_path: Path, flags: list[str], told: str) -> None:
    ended = baton(["up", "--model", str(model), "--port", "0", *flags], tmp_path)
    assert ended.returncode == 2
    assert re.search(told, ended.stderr), ended.stderr


def _files(role: str) -> dict[str, str]:
    return {"ca": "ca.pem", "cert": f"{role}.pem", "key": f"{role}.key"}
