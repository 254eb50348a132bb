"""Tests what a running router does with calls without a valid key: those of a peer that sends many are answered late
and told to come later, whoever has a key is served at once, and neither processor nor memory goes there."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from google.rpc import error_details_pb2

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.router.tenants import gate
from services.router.tenants.keys import new_key
from services.router.tenants.wrong_keys import BURST
from services.rpc.status import status_of_call
from tests.support.real_cluster import Service, lone_router
from tests.support.router_harness import Cluster
from tests.support.tenants import TenantsFile

pytestmark = [pytest.mark.clock, pytest.mark.process]

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 2}
MOST_CPU_MS, MOST_MIB = 1.5, 16.0
"""Of a wrong key, and of thousands: several times what is measured (benchmarks/wrong_keys.py), for busy machines."""


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
    for _ in range(BURST // 2):
        assert (await wrong(http)).status_code == 401
        assert (await wrong_by_grpc(cluster)).code() is grpc.StatusCode.UNAUTHENTICATED
    reply = await wrong(http)
    assert reply.status_code == 429
    assert 0 < int(reply.headers["retry-after"]) <= 5
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


def cpu_s(router: Service) -> float:
    used = Path(f"/proc/{router.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(used[11]) + int(used[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("size", [0, 60_000, 1 << 20])
async def test_wrong_keys_cost_little_processor_time_and_no_memory(
    tmp_path: Path, file: TenantsFile, size: int
) -> None:
    """Keys of 60 KB are let through to be looked at, and those of a megabyte are not."""
    number = 3000 if not size else 300
    key = "x" * size or new_key()
    async with lone_router(tmp_path, f"--tenants={file.path}") as router:
        limits = httpx2.Limits(max_connections=250, max_keepalive_connections=250)
        base = f"http://127.0.0.1:{router.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=60.0, trust_env=False, limits=limits) as http:
            codes: set[int] = set()

            async def send(times: int) -> None:
                for _ in range(times):
                    try:
                        codes.add((await wrong(http, key)).status_code)
                    except httpx2.TransportError:
                        codes.add(0)  # the router closed while the client still wrote

            await asyncio.gather(*(send(1) for _ in range(250)))
            before_s, before_mib = cpu_s(router), router.resident_mib()
            await asyncio.gather(*(send(number // 250) for _ in range(250)))
            used_s, grown_mib = cpu_s(router) - before_s, router.resident_mib() - before_mib
            assert codes <= ({0, 431} if size > 64 << 10 else {401, 429})
            assert used_s / number * 1000 <= MOST_CPU_MS + size * 3e-6
            at_once_mib = 250 * min(size, 1 << 18) / (1 << 20)  # so much is read of a connection at a time
            assert grown_mib <= MOST_MIB + at_once_mib
            async with grpc.aio.insecure_channel(f"127.0.0.1:{router.port}") as channel:
                stub = inference_pb2_grpc.InferenceServiceStub(channel)
                asked = stub.ListModels(inference_pb2.ListModelsRequest(), metadata=file.metadata("acme"))
                began_s = time.monotonic()
                assert len((await asked).models) == 1
                assert time.monotonic() - began_s < 5.0
