"""Tests that a tenant that asks for another's prompts, and looks at times and `cached_tokens`, does not learn that they
were asked before; and that the same probe does find it where two tenants share a namespace."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.models import tiny_model
from tests.support.tenants import TenantsFile, as_a_client
from tests.support.workers import DECODE, PREFILL

NUM_ROUNDS = 20
FOUND = 18
"""Rounds in which a prompt must be faster than a fresh one, for the probe to say that somebody has asked for it. By
chance that happens in one of 5,000 tests."""
NUM_TOKENS = 480


class Probe:
    """Asks as one tenant, and compares."""

    def __init__(self, cluster: Cluster, file: TenantsFile, tenant: str, seed: int) -> None:
        self._cluster = cluster
        self._metadata = file.metadata(tenant)
        self._chance = random.Random(seed)
        self.num_cached = 0
        self.num_faster = 0

    async def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Returns the time to the first token, seconds, and how many tokens were cached."""
        began_s, first_s, cached = time.perf_counter(), 0.0, 0
        async for event in self._cluster.inference.GenerateStream(greedy_request(prompt, 2), metadata=self._metadata):
            if event.HasField("prompt_info"):
                cached = event.prompt_info.cached_tokens
            elif event.HasField("chunk") and not first_s:
                first_s = time.perf_counter() - began_s
        return first_s, cached

    async def compare(self, asked_before: list[int]) -> None:
        """Asks for that prompt and for a fresh one of the same length, in any order."""
        fresh = self.fresh()
        prompts = [asked_before, fresh]
        self._chance.shuffle(prompts)
        answers = [await self.ask(prompt) for prompt in prompts]
        before, after = answers[prompts.index(asked_before)], answers[prompts.index(fresh)]
        self.num_cached += before[1]
        self.num_faster += before[0] < after[0]

    def fresh(self) -> list[int]:
        return [self._chance.randrange(5, 250) for _ in range(NUM_TOKENS)]


@pytest.mark.parametrize(("prober", "finds"), [("other", False), ("acme", True), ("colleague", True)])
async def test_times_and_cached_tokens_tell_nothing_of_another_tenant(tmp_path: Path, prober: str, finds: bool) -> None:
    """The tenant itself, and one of its namespace, do find it: so the probe could."""
    file = TenantsFile(tmp_path)
    file.write(acme={"cache_namespace": "firm"}, colleague={"cache_namespace": "firm"}, other={})
    # So large that to compute a prompt takes several times what a cached one does.
    model = tiny_model("llama", tmp_path / "model", num_hidden_layers=6, max_position_embeddings=1024)
    running = running_cluster(model, [PREFILL, DECODE], router={"tenants": str(file.path)})
    async with running as cluster, as_a_client(cluster):
        victim, probe = Probe(cluster, file, "acme", 1), Probe(cluster, file, prober, 2)
        for warm_up in (victim, probe):
            await warm_up.ask(warm_up.fresh())
        for _ in range(NUM_ROUNDS):
            secret = victim.fresh()
            await victim.ask(secret)
            await probe.compare(secret)
    assert (probe.num_cached > 0) is finds
    assert (probe.num_faster >= FOUND) is finds, f"faster in {probe.num_faster} of {NUM_ROUNDS} rounds"
