"""Tests that a running router takes its part of tenants' limits: by how many routers its workers say there are, or as
it is told; and that routers share a limit in a store."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from services.router.tenants.gate import MOST_ROUTERS
from tests.support.cluster import Cluster
from tests.support.redis_server import SERVER, WITHOUT, RedisServer
from tests.support.tenants import TenantsFile, http_client, serving

pytestmark = pytest.mark.process

COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 2}
WITHIN_S = 1.0
"""As docs/tenants.md says, beside the time that this machine takes."""


@pytest.fixture
def file(tmp_path: Path) -> TenantsFile:
    file = TenantsFile(tmp_path)
    file.write(acme={"limits": {"requests_per_s": 0.01, "burst_requests": 8}})
    return file


async def num_let_in(cluster: Cluster, file: TenantsFile) -> int:
    """Returns how many requests are let in before one is refused."""
    async with http_client(cluster) as http:
        for number in range(100):
            reply = await http.post(COMPLETIONS, json=BODY, headers=file.headers("acme"))
            if reply.status_code == 429:
                return number
            assert reply.status_code == 200, reply.text
    raise AssertionError("nothing is limited")


async def until_divided(cluster: Cluster, number: int) -> float:
    """Returns how long it took."""
    began_s = time.monotonic()
    await cluster.until(lambda: asyncio.sleep(0, cluster.router.gate._num_routers == number))
    return time.monotonic() - began_s


async def test_workers_say_by_how_many_limits_are_divided(model: str, file: TenantsFile) -> None:
    """What a worker says that must be wrong divides by no more than there may be."""
    async with serving(model, file) as cluster:
        first, second = await cluster.add("prefill"), await cluster.add("decode")
        first.num_routers, second.num_routers = 2, 4
        assert await until_divided(cluster, 4) < WITHIN_S + 2.0
        assert await num_let_in(cluster, file) == 2
        second.num_routers = 1_000_000
        await until_divided(cluster, MOST_ROUTERS)
        second.num_routers = first.num_routers = 0
        await until_divided(cluster, 1)
        assert await num_let_in(cluster, file) == 0, "a larger part fills, and is not there at once"


async def test_a_worker_that_is_gone_counts_no_more(model: str, file: TenantsFile) -> None:
    async with serving(model, file) as cluster:
        await cluster.add("prefill")
        decode = await cluster.add("decode")
        decode.num_routers = 3
        await until_divided(cluster, 3)
        await decode.leave()
        await until_divided(cluster, 1)


async def test_an_operator_who_says_the_number_is_believed(model: str, file: TenantsFile) -> None:
    async with serving(model, file, routers=2) as cluster:
        first = await cluster.add("prefill")
        await cluster.add("decode")
        first.num_routers = 5
        assert await num_let_in(cluster, file) == 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    server = RedisServer(tmp_path)
    yield server
    server.kill()


@pytest.mark.skipif(SERVER is None, reason=WITHOUT)
async def test_two_routers_share_a_limit_in_a_store(model: str, file: TenantsFile, server: RedisServer) -> None:
    """One that is asked alone gives all of it, and the other then hardly anything."""
    flags = {"routers": 2, "tenants_store": server.url, "metrics_port": 0}
    async with serving(model, file, **flags) as one, serving(model, file, **flags) as other:
        num_let_in = []
        for cluster in (one, other):
            await cluster.add("prefill")
            await cluster.add("decode")
            async with http_client(cluster) as http:
                codes = []
                for _ in range(40):
                    reply = await http.post(COMPLETIONS, json=BODY, headers=file.headers("acme"))
                    codes.append(reply.status_code)
                    await asyncio.sleep(0.05)
                num_let_in.append(codes.count(200))
        async with httpx2.AsyncClient(trust_env=False) as http:
            metrics = (await http.get(f"http://127.0.0.1:{one.router.metrics_port}/metrics")).text
    assert "baton_tenants_store_up 1.0" in metrics
    assert 6 <= num_let_in[0] <= 8, "all of it but what cannot be divided, though its part is 4"
    assert num_let_in[1] <= 2, "it asks the store as soon as it is asked"
