"""Tests what a running router does with calls without a valid key: each is refused, and whoever has a key is served,
from the same address too. What they cost: benchmarks/wrong_keys.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from prometheus_client import generate_latest

from baton.v1 import inference_pb2
from services.router.tenants.keys import new_key
from tests.support.cluster import Cluster
from tests.support.tenants import TenantsFile

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
