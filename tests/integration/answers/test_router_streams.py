"""Tests that the streaming benchmark measures truly: each token comes in an event of its own, and soon."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.router_streams import measure
from tests.support.processes import CLUSTER_TOKEN
from tests.support.text_model import write_model

pytestmark = [pytest.mark.process, pytest.mark.clock]

NUM_STREAMS, STEP_MS = 40, 50.0


@pytest.mark.parametrize("front", ["grpc", "http"])
def test_every_token_comes_in_an_event_of_its_own_soon_after_it_was_sent(
    front: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    path = str(write_model(tmp_path / "model", context_tokens=8192))
    settings = measure.StreamSettings(router_step_ms=STEP_MS, router_window_s=2.0, router_prompt=16)
    taken = measure.one_run("model", path, front, NUM_STREAMS, settings)  # raises if an event has several tokens
    assert 0.9 < taken.share < 1.1
    assert 0.5 < taken.tokens_per_s / (NUM_STREAMS * 1000 / STEP_MS) < 1.1
    assert 0 < taken.p50_ms < STEP_MS
    assert 0 < taken.cpu_ms < 5
