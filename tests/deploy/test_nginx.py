"""Tests deploy/nginx-baton.conf with a real nginx in front of a router: what passes, as it comes, and what does not."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from shutil import which
from types import SimpleNamespace

import grpc
import httpx2
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc
from benchmarks.ports import free_ports
from services.router.tenants.keys import new_key
from tests.support.certificates import written
from tests.support.cluster import CONFIG, Cluster, request
from tests.support.models import tiny_model
from tests.support.patience import HANG_S
from tests.support.scripted_worker import OUTPUT
from tests.support.tenants import TenantsFile

NGINX = which("nginx", path="/usr/sbin:/usr/bin:/sbin:/bin")
pytestmark = [pytest.mark.process, pytest.mark.skipif(NGINX is None, reason="needs nginx")]

CONFIGURATION = Path(__file__).parents[2] / "deploy/nginx-baton.conf"
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 4}


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[SimpleNamespace]:
    """Yields a router with a tenant, clients that reach it through nginx alone, and the tenant's headers."""
    file, folder = TenantsFile(tmp_path), written(tmp_path / "certificates")
    file.write(acme={})
    model = str(tiny_model("llama", tmp_path / "model"))
    cluster = Cluster(replace(CONFIG, model=model, tenants=str(file.path), http_port=0))
    await cluster.start()
    for role in ("prefill", "decode"):
        await cluster.add(role)
    [port] = free_ports(1)
    main = configuration(tmp_path, folder, port, cluster)
    nginx = await asyncio.create_subprocess_exec(str(NGINX), "-p", str(tmp_path), "-c", str(main))
    try:
        await accepts(port)
        trusting = ssl.create_default_context(cafile=folder / "ca.pem")
        shown = grpc.ssl_channel_credentials((folder / "ca.pem").read_bytes())
        async with (
            httpx2.AsyncClient(base_url=f"https://localhost:{port}", verify=trusting, trust_env=False) as http,
            grpc.aio.secure_channel(f"localhost:{port}", shown) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            yield SimpleNamespace(cluster=cluster, file=file, http=http, inference=stub)
    finally:
        nginx.terminate()
        await nginx.wait()
    await cluster.idle()
    await cluster.stop()


def configuration(folder: Path, certificates: Path, port: int, cluster: Cluster) -> Path:
    """Returns a file that includes ours, with this test's ports and certificates in the place of the server's."""
    text = CONFIGURATION.read_text()
    for of_server, of_test in (
        ("listen 443", f"listen 127.0.0.1:{port}"),
        ("baton.example.com", "localhost"),
        ("/etc/baton/public.pem", str(certificates / "router.pem")),
        ("/etc/baton/public.key", str(certificates / "router.key")),
        ("127.0.0.1:8000", f"127.0.0.1:{cluster.router.http_port}"),
        ("127.0.0.1:50051", cluster.router.address),
    ):
        assert text.count(of_server) >= 1, of_server
        text = text.replace(of_server, of_test)
    (folder / "baton.conf").write_text(text)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    paths = "\n".join(f"{kind}_temp_path {folder / kind};" for kind in kinds)
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off;\nmaster_process off;\npid {folder / 'pid'};\nerror_log {folder / 'error.log'};\nevents {{}}\n"
        f"http {{\naccess_log off;\n{paths}\ninclude {folder / 'baton.conf'};\n}}\n"
    )
    return main


async def accepts(port: int) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                _, writer = await asyncio.open_connection("127.0.0.1", port)
            except ConnectionError:
                await asyncio.sleep(0.05)
            else:
                writer.close()
                return


async def test_answers_pass_over_both_fronts_to_who_has_a_key(front: SimpleNamespace) -> None:
    reply = await front.http.post(COMPLETIONS, json=BODY, headers=front.file.headers("acme"))
    assert reply.status_code == 200, reply.text
    answer = await front.inference.Generate(request(), metadata=front.file.metadata("acme"))
    assert list(answer.output.token_ids)[: len(OUTPUT)] == list(OUTPUT)
    wrong = {"authorization": f"Bearer {new_key()}"}
    reply = await front.http.post(COMPLETIONS, json=BODY, headers=wrong)
    assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await front.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=tuple(wrong.items()))
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_come_before_the_answer_is_complete(front: SimpleNamespace) -> None:
    """Whoever leaves then ends the request: the cluster is idle at the end."""
    front.cluster.scripted[1].decode_gate.clear()
    body = {**BODY, "stream": True}
    async with front.http.stream("POST", COMPLETIONS, json=body, headers=front.file.headers("acme")) as reply:
        async with asyncio.timeout(HANG_S):
            assert (await anext(aiter(reply.aiter_lines()))).startswith("data: ")


@pytest.mark.parametrize("path", ["/", "/console/", "/metrics", "/tokenize", "/baton.v1.ControlService/GetStatus"])
async def test_nothing_else_is_reached(front: SimpleNamespace, path: str) -> None:
    assert (await front.http.get(path, headers=front.file.headers("acme"))).status_code == 404


async def test_health_and_what_is_too_large(front: SimpleNamespace) -> None:
    assert (await front.http.get("/health")).status_code == 200
    reply = await front.http.post(COMPLETIONS, content=b"x" * (17 << 20), headers=front.file.headers("acme"))
    assert reply.status_code == 413
