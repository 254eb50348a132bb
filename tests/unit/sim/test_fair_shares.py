"""Tests that a tenant far beyond its share does not make another's first tokens late, in a simulated cluster."""

from __future__ import annotations

import dataclasses
import math

import pytest

from services.router.coordinator.config import CoordinatorConfig
from services.sim.cluster import SimPlan, simulate
from services.sim.profile import WorkerProfile
from services.sim.trace import TracedRequest, trace_of_tenants

PREFILL = WorkerProfile(
    "prompts", ms_per_prefill_token=0.1, ms_per_decode_step=15.0, ms_per_decode_sequence=0.2, num_blocks=20000
)
BATCH = WorkerProfile(
    "batch",
    ms_per_prefill_token=0.03,
    ms_per_decode_step=25.0,
    ms_per_decode_sequence=0.2,
    num_blocks=20000,
    max_num_seqs=32,
)
MEMORY = dataclasses.replace(BATCH, name="memory", num_blocks=2048, max_num_seqs=256)
CAPACITY = {"prompts": 8.0, "batch": 5.8, "memory": 4.7}
"""Requests a second of one prefill and one decode worker, by what is scarce there."""


def p99_ms(profile: WorkerProfile, trace: list[TracedRequest], light: list[TracedRequest]) -> float:
    """Returns the TTFT p99 of the light tenant's requests after the first 20 s, by the times of their arrival."""
    plan = SimPlan(profile=profile, router=CoordinatorConfig(model_context_tokens=1 << 20, max_queue=32))
    arrivals = {each.at_s for each in light if each.at_s > 20.0}
    served = [each for each in simulate(plan, trace).requests if each.at_s in arrivals]
    assert len(served) == len(arrivals)
    times = sorted(math.inf if each.ttft_s is None else each.ttft_s for each in served)
    return 1e3 * times[math.ceil(0.99 * len(times)) - 1]


@pytest.mark.long
@pytest.mark.parametrize("profile", [PREFILL, BATCH, MEMORY], ids=lambda profile: profile.name)
def test_a_tenant_at_ten_times_its_share_moves_anothers_ttft_p99_by_less_than_a_tenth(profile: WorkerProfile) -> None:
    """The light one has half of its share. Where both are one tenant, the flood delays it or has it refused."""
    capacity, seconds = CAPACITY[profile.name], 400
    rates = {"light": capacity / 4, "fair": capacity / 2, "flood": 10 * capacity / 2}
    of = {name: trace_of_tenants({name: rate}, seconds) for name, rate in rates.items()}

    def both(other: str) -> list[TracedRequest]:
        return sorted([*of["light"], *of[other]], key=lambda each: each.at_s)

    fair_ms = p99_ms(profile, both("fair"), of["light"])
    flood_ms = p99_ms(profile, both("flood"), of["light"])
    print(f"{profile.name}: {fair_ms:.0f} ms beside one at its share, {flood_ms:.0f} ms beside one at ten times that")
    assert flood_ms < 1.1 * fair_ms
    as_one = [dataclasses.replace(each, caller="") for each in both("flood") if each.at_s < 100]
    early = [each for each in of["light"] if each.at_s < 100]
    assert p99_ms(profile, as_one, early) > 3 * fair_ms
