"""Tests what a running router does with calls without a valid key: each is refused, and whoever has a key is served,
from the same address too. What they cost: benchmarks/wrong_keys.py."""

from __future__ import annotations

import asyncio
import gc
import json
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from prometheus_client import generate_latest

from baton.v1 import inference_pb2
from services.router.tenants.keys import new_key
from tests.support.certificates import written
from tests.support.cluster import CONFIG, Cluster
from tests.support.tenants import TenantsFile
from tests.support.workers import until

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 2}


@pytest.fixture
def file(tmp_path: Path) -> TenantsFile:
    file = TenantsFile(tmp_path)
    file.write(acme={})
    return file


async def wrong(http: httpx2.AsyncClient, key: str | None = None) -> httpx2.Response:
    headers = {"authorization": f"Bearer {new_key() if key is None else key}"}
    return await http.post(COMPLETIONS, json=BODY, headers=headers)


async def wrong_by_grpc(cluster: Cluster) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.ListModels(
            inference_pb2.ListModelsRequest(), metadata=(("authorization", f"Bearer {new_key()}"),)
        )
    return refused.value


async def test_many_wrong_keys_are_refused_over_both_fronts_and_hold_nobody_up(
    cluster: Cluster, pair: Any, http: httpx2.AsyncClient, file: TenantsFile
) -> None:
    for _ in range(100):
        reply = await wrong(http)
        assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        assert (await wrong_by_grpc(cluster)).code() is grpc.StatusCode.UNAUTHENTICATED
    metrics = generate_latest(cluster.router._metrics.registry).decode()
    counted = 'baton_requests_total{model="",outcome="invalid_api_key"} 0.0'
    assert counted in metrics, "else who has no key could hide what share of requests fails"
    assert (await http.post(COMPLETIONS, json=BODY, headers=file.headers("acme"))).status_code == 200
    by_grpc = cluster.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=file.metadata("acme"))
    assert (await by_grpc).models
    assert (await http.get("/health/live")).status_code == 200


@pytest.mark.parametrize("has_tls", [False, True])
async def test_connections_leave_nothing_in_a_circle(
    model: str, file: TenantsFile, tmp_path: Path, has_tls: bool
) -> None:
    """Python looks for circles rarely (core/garbage.py): until then strangers' connections would take memory."""
    folder = written(tmp_path / "certificates")
    config = replace(CONFIG, model=model, tenants=str(file.path), http_port=0)
    if has_tls:
        shown = {"public_tls_cert": str(folder / "router.pem"), "public_tls_key": str(folder / "router.key")}
        config = replace(config, **shown)  # type: ignore[arg-type]
    trusting = ssl.create_default_context(cafile=folder / "ca.pem") if has_tls else None
    cluster = Cluster(config)
    await cluster.start()
    for role in ("prefill", "decode"):
        await cluster.add(role)
    right, stranger = file.headers("acme")["authorization"], f"Bearer {new_key()}"
    calls = [(COMPLETIONS, right, 200), (COMPLETIONS, stranger, 401), ("/nothing", right, 404)]
    try:
        for _ in range(2):  # at first things are made that stay
            gc.collect()
            gc.disable()
            for path, key, status in calls:
                await once(cluster, path, key, status, trusting)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            gc.set_debug(0)
            modules = {type(each).__module__ for each in gc.garbage}
            gc.garbage.clear()
    finally:
        gc.enable()
    await cluster.stop()
    assert not {module for module in modules if module.startswith(("services", "uvicorn"))}


async def once(cluster: Cluster, path: str, key: str, status: int, trusting: ssl.SSLContext | None) -> None:
    """Sends a request on a connection of its own, and returns when the router has let go of it."""
    assert cluster.router._http is not None
    host = "localhost" if trusting is not None else None
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", cluster.router.http_port, ssl=trusting, server_hostname=host
    )
    body = json.dumps(BODY)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\nauthorization: {key}\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(f"HTTP/1.1 {status}".encode())
    await reader.readexactly(int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
    writer.close()
    connections = cluster.router._http.connections
    await until(lambda: not len(connections), "the connection is closed")
