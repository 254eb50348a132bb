"""Tests what a running router does with calls without a valid key: those of a peer that sends many are answered late
and told to come later, and whoever has a key is served at once. What they cost: benchmarks/wrong_keys.py."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.rpc import error_details_pb2

from baton.v1 import inference_pb2
from services.core.clock import ManualClock
from services.router.tenants import gate
from services.router.tenants.keys import new_key
from services.router.tenants.wrong_keys import BURST
from services.rpc.status import status_of_call
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


async def test_a_peer_that_sends_many_is_told_to_wait_over_both_fronts(
    cluster: Cluster, pair: Any, http: httpx2.AsyncClient, file: TenantsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both fronts count for the same peer; who has a key is let in from the same address all the while."""
    monkeypatch.setattr(gate, "HOLD_S", 0.01)
    monkeypatch.setattr(cluster.router.gate, "_clock", ManualClock())
    for _ in range(BURST // 2):
        assert (await wrong(http)).status_code == 401
        assert (await wrong_by_grpc(cluster)).code() is grpc.StatusCode.UNAUTHENTICATED
    reply = await wrong(http)
    assert reply.status_code == 429
    assert reply.headers["retry-after"] == "5"
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert "not valid" in reply.json()["error"]["message"]
    error = await wrong_by_grpc(cluster)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    details = {type(each): each for each in (_unpacked(any_) for any_ in status_of_call(error).details)}
    assert details[error_details_pb2.ErrorInfo].reason == "TOO_MANY_WRONG_KEYS"
    assert details[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds() > 0
    assert (await http.post(COMPLETIONS, json=BODY, headers=file.headers("acme"))).status_code == 200
    assert (await http.get("/health/live")).status_code == 200


def _unpacked(packed: Any) -> Any:
    kind = getattr(error_details_pb2, packed.TypeName().rpartition(".")[2])()
    packed.Unpack(kind)
    return kind


async def test_refusals_that_are_held_back_are_few_and_hold_nobody_else(
    cluster: Cluster, pair: Any, http: httpx2.AsyncClient, file: TenantsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "HOLD_S", 3600.0)
    monkeypatch.setattr(gate, "MOST_HELD", 3)
    for _ in range(BURST):
        await wrong(http)
    held = [asyncio.create_task(wrong(http)) for _ in range(3)]
    await cluster.until(lambda: asyncio.sleep(0, cluster.router.gate._num_held == 3))
    assert (await wrong(http)).status_code == 429, "there is no room to hold it back"
    assert (await http.post(COMPLETIONS, json=BODY, headers=file.headers("acme"))).status_code == 200
    by_grpc = cluster.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=file.metadata("acme"))
    assert (await by_grpc).models
    for task in held:
        task.cancel()
