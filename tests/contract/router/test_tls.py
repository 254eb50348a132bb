"""Tests a cluster inside TLS whose processes know each other by certificates alone: there is no token.

The RPCs are those of the descriptors: a new one is tried here by itself, with the certificate of every role.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from services.cli.certs import make_certificates
from services.rpc.authentication import OPERATOR, ROUTER, STORE, WORKER, credentials
from services.rpc.certificates import Certificates
from services.rpc.channels import dial
from tests.contract.router.test_strangers import CLOSED, MALFORMED, doors
from tests.support.calls import ask_on
from tests.support.certificates import certificates, expired, tls_flags, written
from tests.support.cluster import Cluster, running_cluster
from tests.support.models import tiny_model
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import DECODE, PREFILL, PROMPT, running_worker, until, worker_config, worker_metrics

pytestmark = pytest.mark.asyncio(loop_scope="module")

Code = grpc.StatusCode
_LOOKED_S = 2.5
"""By then every process has looked at its files."""
CALLERS = {
    "RegistryService": {WORKER, STORE},
    "WorkerService": {ROUTER},
    "KVTransferService": {WORKER, STORE},
    "ControlService": {OPERATOR},
    "GetStatus": {OPERATOR, STORE},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("tls"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path, folder: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, [PREFILL, DECODE], tls=folder, transport="grpc") as cluster:
        yield cluster


async def test_a_handoff_inside_tls(cluster: Cluster) -> None:
    answer = await cluster.greedy(PROMPT, 5)
    assert answer.completion is not None
    assert (answer.completion.workers.prefill, answer.completion.workers.decode) == ("w0", "w1")
    assert len(answer.token_ids) == 5


async def _code(address: str, held: Certificates | None, method: str, token: str | None = None) -> grpc.StatusCode:
    async with dial(address, None, held) as channel:
        error = await ask_on(channel, method, () if token is None else credentials(token), MALFORMED)
    return Code.OK if error is None else error.code()


@pytest.mark.parametrize("role", ["router", "worker", "store", "operator", "client"])
async def test_each_role_opens_its_own_rpcs_and_no_others(cluster: Cluster, folder: Path, role: str) -> None:
    """The token is given too, and opens nothing beside any of them."""
    held, served = certificates(folder, role), set()
    for door, address in doors(cluster).items():
        for method in CLOSED:
            code = await _code(address, held, method, CLUSTER_TOKEN)
            service, name = method.rpartition(".")[2].split("/")
            if code is Code.UNIMPLEMENTED:
                continue  # it is at another door
            served.add(method)
            may = role in CALLERS.get(name, CALLERS[service])
            assert (code is not Code.UNAUTHENTICATED) is may, f"{role} {method} on {door}: {code}"
    assert served == set(CLOSED)


async def test_whoever_has_no_certificate_of_the_ca_gets_no_answer(
    cluster: Cluster, folder: Path, tmp_path: Path
) -> None:
    stranger = certificates(written(tmp_path / "other"), "operator")
    late = written(tmp_path / "late", {**make_certificates(), "ca.pem": (folder / "ca.pem").read_bytes()})
    for held in (None, Certificates(ca=str(folder / "ca.pem")), stranger, certificates(late, "operator")):
        for door, address in doors(cluster).items():
            if door != "public":
                assert await _code(address, held, CLOSED[0]) is Code.UNAVAILABLE, door
    assert (await cluster.status()).workers, "and others are served as before"


async def test_one_that_has_expired_is_refused(model: Path, folder: Path, tmp_path: Path) -> None:
    """Who shows it does not look at its own: it may be no Baton."""
    old = written(tmp_path / "old", expired())
    both = (folder / "ca.pem").read_bytes() + (old / "ca.pem").read_bytes()
    mixed = written(await asyncio.to_thread(shutil.copytree, folder, tmp_path / "mixed"), {"ca.pem": both})
    async with running_cluster(model, [PREFILL, DECODE], tls=mixed) as cluster:
        shown = grpc.ssl_channel_credentials(
            (folder / "ca.pem").read_bytes(), (old / "operator.key").read_bytes(), (old / "operator.pem").read_bytes()
        )
        async with grpc.aio.secure_channel(cluster.router.control_address, shown) as channel:
            error = await ask_on(channel, CLOSED[0])
            assert error is not None
            assert error.code() is Code.UNAVAILABLE


@pytest.mark.long
async def test_a_cluster_goes_on_with_certificates_of_another_ca(model: Path, tmp_path: Path) -> None:
    """The new CA is trusted first, then come its certificates, then the old one goes: nothing is restarted or lost."""
    folder = written(tmp_path / "tls")
    async with running_cluster(model, [PREFILL, DECODE], tls=folder, transport="grpc") as cluster:
        first, new = await cluster.greedy(PROMPT, 3), make_certificates()
        both = (folder / "ca.pem").read_bytes() + new["ca.pem"]
        for files in ({"ca.pem": both}, {**new, "ca.pem": both}, new):
            written(folder, files)
            await asyncio.sleep(_LOOKED_S)
            assert (await cluster.greedy(PROMPT, 3)).token_ids == first.token_ids
        changes = {**tls_flags(folder, "worker"), "router": (cluster.router.control_address,), "worker_id": "late"}
        async with running_worker(worker_config(model, silence_s=HANG_S, **changes), DECODE):
            await until(lambda: cluster.num_ready == 3, "one that has only the new ones joins", 20.0)


async def test_metrics_say_how_long_certificates_last(cluster: Cluster) -> None:
    name, days = "baton_certificate_expires_seconds", 86_400
    for registry, held in (
        (cluster.metrics(), ("cluster", "public")),
        (worker_metrics(cluster.workers[0]).registry, ("cluster",)),
    ):
        for certificate in held:
            left_s = registry.get_sample_value(name, {"certificate": certificate})
            assert left_s == pytest.approx(90 * days, abs=days)
