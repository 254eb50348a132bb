"""Tests that a tenant finds nothing in a cache of what another has computed, and its own."""

from __future__ import annotations

from pathlib import Path

from tests.support.cluster import Cluster, greedy_request, receive, running_cluster
from tests.support.models import tiny_model
from tests.support.tenants import TenantsFile, as_a_client
from tests.support.workers import DECODE, PREFILL

PROMPT = [201 + n % 50 for n in range(64)]
CACHED = 48
"""All full blocks but the last."""


async def cached(cluster: Cluster, file: TenantsFile, tenant: str, salt: str = "") -> int:
    request = greedy_request(PROMPT, 2, **({"cache_salt": salt} if salt else {}))
    call = cluster.inference.GenerateStream(request, metadata=file.metadata(tenant))
    answer = await receive(call)
    assert answer.prompt_info is not None
    return answer.prompt_info.cached_tokens


async def test_prefixes_are_shared_within_a_namespace_and_nowhere_else(tmp_path: Path) -> None:
    """Each tenant finds its own. Two that name a namespace share it, and one whose private name is that of the
    namespace does not; no salt of a client's leads into another's."""
    file = TenantsFile(tmp_path)
    team = {"cache_namespace": "team"}
    file.write(acme={}, other={}, left=team, right=team, team={})
    model = tiny_model("llama", tmp_path / "model")
    running = running_cluster(model, [PREFILL, DECODE], router={"tenants": str(file.path)})
    async with running as cluster, as_a_client(cluster):
        assert [await cached(cluster, file, "acme") for _ in range(2)] == [0, CACHED]
        for name in ("other", "left", "team"):
            assert await cached(cluster, file, name) == 0, name
        for salt in ("acme", "tenant:acme", "shared:team", "x"):
            assert await cached(cluster, file, "other", salt) == 0, salt
        assert await cached(cluster, file, "right") == CACHED
        assert await cached(cluster, file, "other") == CACHED
