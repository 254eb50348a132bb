"""Tests in virtual time that unsplit sequences do not keep handoffs waiting for room, where pools are small."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.split_choice import CPU
from services.router.coordinator import book
from services.router.coordinator.events import StageEnded
from services.router.coordinator.request import Request, place_stage
from services.router.policy import Split
from services.sim.cluster import ROUTER, SimPlan, simulate
from services.sim.trace import TracedRequest

POOL_BLOCKS = 260
"""Of 16 tokens each: a long prompt needs more than a half of a decode worker's pool."""
LONG = 2400
TRACE = [
    *(TracedRequest(float(second), 64, 100) for second in range(6)),  # how long outputs are is learnt
    *(TracedRequest(12.0 + 0.1 * number, 64, 100) for number in range(12)),  # streams that a prompt would disturb
    *(TracedRequest(13.5 + 0.001 * number, LONG, 100) for number in range(2)),
    *(TracedRequest(13.55 + 0.01 * number, 60, 100) for number in range(24)),
]
"""Short prompts come while one long one is computed and another waits for its turn."""


def parked_s(split: Split, monkeypatch: pytest.MonkeyPatch) -> float:
    """Returns how long the handoffs of the long prompts waited for a decode worker."""
    waits: dict[str, float] = {}

    def noted(request: Request, started_s: float, now: float, outcome: str) -> StageEnded:
        waits[request.request_id] = now - started_s if len(request.spec.token_ids) == LONG else 0.0
        return place_stage(request, started_s, now, outcome)

    monkeypatch.setattr(book, "place_stage", noted)
    small, router = dataclasses.replace(CPU, num_blocks=POOL_BLOCKS), dataclasses.replace(ROUTER, split=split)
    outcome = simulate(SimPlan(1, 2, profile=CPU, decode_profile=small, router=router), TRACE)
    assert all(each.total_s is not None for each in outcome.requests)
    assert (len(waits) < len(TRACE)) == (split is Split.AUTO), "some ran unsplit"
    return sum(waits.values())


def test_a_handoff_on_its_way_does_not_wait_for_unsplit_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    always, auto = (parked_s(split, monkeypatch) for split in (Split.ALWAYS, Split.AUTO))
    assert auto <= always + 0.01
