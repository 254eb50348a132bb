"""Tests simulated prefix caches in a cluster: what they save, that nothing is lost with them, and policy's weights."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from services.cli import simulate as command
from services.core.errors import ConfigError
from services.router.coordinator import Coordinator
from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import PRESETS
from services.router.policy.terms import TERMS
from services.sim.cluster import MESSAGE_S, Death, SimPlan, simulate
from services.sim.pool import SimPool
from services.sim.profile import WorkerProfile, write_profile
from services.sim.report import Objective, summary, text
from services.sim.scheduler import WorkerRules
from services.sim.trace import TracedRequest

PROFILE = WorkerProfile(
    "test",
    ms_per_prefill_token=0.1,
    ms_per_decode_step=10.0,
    ms_per_decode_sequence=1.0,
    kv_bytes_per_token=1000,
    transfer_bytes_per_s=1e8,
)


def conversations(count: int, seed: int = 0, num_documents: int = 4) -> list[TracedRequest]:
    """Returns requests of a few documents, each of which begins many prompts, eight a second."""
    rng = random.Random(seed)
    requests = []
    for number in range(count):
        document = rng.randrange(num_documents)
        num_parts = rng.randint(1, 6)
        ids = (*(100 * document + part for part in range(num_parts)), 1000 + number)
        length = rng.randint(num_parts * 64, (num_parts + 1) * 64 + 40)
        requests.append(TracedRequest(number / 8, length, rng.randint(1, 60), ids, 64, session=f"{document}"))
    return requests


def test_a_prompt_that_was_computed_before_costs_its_last_block() -> None:
    again = [TracedRequest(at_s, 1024, 2, (1, 2), 512) for at_s in (0.0, 10.0)]
    plan = SimPlan(1, 1, 0, profile=PROFILE)
    first, second = simulate(plan, again).requests
    assert first.ttft_s == pytest.approx(0.1024 + 2 * MESSAGE_S)
    assert (first.cached_tokens, second.cached_tokens) == (0, 1008), "the last token's block is computed"
    assert second.ttft_s == pytest.approx(0.0016 + 2 * MESSAGE_S)
    off = simulate(dataclasses.replace(plan, rules=WorkerRules(prefix_caching=False)), again)
    assert [served.cached_tokens for served in off.requests] == [0, 0]
    assert off.requests[1].ttft_s == pytest.approx(first.ttft_s)


def test_blocks_that_the_decode_worker_has_are_not_moved() -> None:
    again = [TracedRequest(at_s, 1030, 2, (1, 2), 512) for at_s in (0.0, 10.0)]
    outcome = simulate(SimPlan(1, 1, 0, profile=PROFILE), again)
    assert outcome.bytes_moved == (1030 + 6) * 1000


@pytest.mark.parametrize(
    "plan",
    [
        SimPlan(2, 2, 0, profile=PROFILE),
        SimPlan(0, 0, 3, profile=PROFILE),
        SimPlan(1, 1, 1, profile=dataclasses.replace(PROFILE, num_blocks=90)),
        SimPlan(0, 0, 2, profile=dataclasses.replace(PROFILE, num_blocks=60)),
        SimPlan(1, 2, 0, profile=dataclasses.replace(PROFILE, num_blocks=70)),
    ],
    ids=["split", "mixed", "all kinds, tight", "mixed, tight", "split, tight"],
)
@pytest.mark.parametrize("seed", range(3))
def test_every_request_ends_once_with_caches_and_deaths(plan: SimPlan, seed: int) -> None:
    """Simulates requests that share much; `simulate` itself checks their tokens, and that no block is left in use."""
    rng = random.Random(seed)
    deaths = tuple(Death(rng.choice(plan.worker_ids), rng.uniform(1, 30)) for _ in range(seed))
    plan = dataclasses.replace(plan, deaths=deaths, cold_start_s=1.0)
    outcome = simulate(plan, conversations(300, seed))
    assert len(outcome.requests) == 300
    assert sum(served.total_s is not None for served in outcome.requests) > 280
    assert sum(served.cached_tokens for served in outcome.requests) > 1000
    assert simulate(plan, conversations(300, seed)) == outcome


def test_the_hit_rate_is_reported() -> None:
    plan = SimPlan(0, 0, 1, profile=PROFILE)
    figures = summary(plan, simulate(plan, conversations(200)), Objective(1.0, 1.0))
    # Parts of a document are in about half of the tokens, and all but the first occurrences of them are found.
    assert 0.3 < figures["hit_rate"] < 0.9
    assert "of prompt tokens were in a prefix cache" in text(figures)


def test_prompts_go_where_policy_has_placed_their_beginnings(tmp_path: Path) -> None:
    path = str(tmp_path / "profile.json")
    write_profile(Path(path), PROFILE)
    plain = SimPlan(0, 0, 4, profile=PROFILE)
    policy = plain.router.policy
    looking = dataclasses.replace(
        policy, hash_prompts=True, prefill_terms=(*policy.prefill_terms, (8.0, TERMS["prefix_cached"]))
    )
    router = dataclasses.replace(plain.router, policy=looking)
    trace = [dataclasses.replace(each, at_s=each.at_s * 4) for each in conversations(120)]
    rates = [
        summary(plan, simulate(plan, trace), Objective(1.0, 1.0))["hit_rate"]
        for plan in (plain, dataclasses.replace(plain, router=router))
    ]
    assert rates[1] > rates[0]


def test_the_router_knows_nearly_as_much_as_one_that_sees_into_the_caches() -> None:
    """Compares hit rates where caches are small, so that blocks that were there are gone when the next prompt comes."""
    router = CoordinatorConfig(model_context_tokens=1 << 20, policy=PRESETS["prefix_aware"])
    told = SimPlan(4, 2, profile=dataclasses.replace(PROFILE, num_blocks=120), router=router)
    arrivals = conversations(400, num_documents=24)
    trace = [dataclasses.replace(each, at_s=each.at_s / 10, output_tokens=4) for each in arrivals]
    by_luck = dataclasses.replace(told, router=CoordinatorConfig(1 << 20, policy=PRESETS["least_loaded"]))
    plans = (told, dataclasses.replace(told, knows_caches_at_once=True), by_luck)
    rates = [summary(plan, simulate(plan, trace), Objective(1.0, 1.0))["hit_rate"] for plan in plans]
    assert rates[0] >= rates[1] - 0.03
    assert rates[1] >= rates[2] + 0.1


@pytest.mark.parametrize("at_once", [True, False])
def test_what_is_seen_at_once_is_what_stands_in_the_caches(at_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compares, at each choice, what the router knows of a worker with the worker's cache; by messages it is late."""
    router = CoordinatorConfig(model_context_tokens=1 << 20, policy=PRESETS["prefix_aware"])
    small = dataclasses.replace(PROFILE, num_blocks=90)
    plan = SimPlan(2, 2, profile=small, router=router, knows_caches_at_once=at_once)
    pools: list[SimPool] = []
    monkeypatch.setattr(SimPool, "__init__", _noting(SimPool.__init__, pools))
    was_right: list[bool] = []
    place = Coordinator.place

    def look(coordinator: Coordinator, now: float) -> None:
        for view, pool in zip(coordinator.workers.views(), pools, strict=True):
            assert view.cache is not None
            was_right.append(len(view.cache) == sum(part.num_blocks for part in pool._parts.values()))
        place(coordinator, now)

    monkeypatch.setattr(Coordinator, "place", look)
    simulate(plan, conversations(60))
    assert len(was_right) > 240
    assert all(was_right) == at_once


def _noting(init: Callable[..., None], made: list[SimPool]) -> Callable[..., None]:
    def noted(pool: SimPool, *arguments: Any, **flags: Any) -> None:
        init(pool, *arguments, **flags)
        made.append(pool)

    return noted


@pytest.mark.parametrize("weight", ["prefill.fast=1", "prefix_cached=4", "decode.near=-1", "decode.near=x", "x.near=1"])
def test_a_weight_that_makes_no_sense_is_named(tmp_path: Path, weight: str) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    with pytest.raises(
        ConfigError, match=f"--policy-weight: '{weight}' is not like prefill.short_queue=4; there are s"
    ):
        command.main(["--profile", str(path), "--policy-weight", weight], "baton simulate")


def test_priorities_are_served_first_and_reported() -> None:
    crowd = [TracedRequest(0.0, 2000, 2, priority=number % 2) for number in range(20)]
    plan = SimPlan(0, 0, 1, profile=dataclasses.replace(PROFILE, num_blocks=260))
    figures = summary(plan, simulate(plan, crowd), Objective(2.5, 1.0))
    assert figures["by_priority"]["1"]["attainment"] > figures["by_priority"]["0"]["attainment"]
    assert "priority 1: " in text(figures)
