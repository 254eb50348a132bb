"""Tests that the simulator and real processes agree on a tiny model: a calibrated cluster is sent a trace, and the same
is simulated. The bounds are loose, since a step of a tiny model takes about as long as what is around it;
`python -m benchmarks --only sim` compares more closely, with the default model.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.answers import percentile
from benchmarks.replay import Level, replay
from benchmarks.simulated import CLUSTERS, Pair, simulated
from services.cli import calibrate
from services.sim.profile import read_profile
from services.sim.trace import TracedRequest, scaled, synthetic_trace
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.processes import CLUSTER_TOKEN, Up

MOST_TIMES = {50: 2.0, 95: 4.0}
"""By which factor percentiles may differ, either way: the largest times are those in which the machine did other work,
which no profile has."""
SECONDS = 15.0
MOST_ROUNDS = 8


def requests() -> list[TracedRequest]:
    """Returns prompts of 130 tokens in the median and outputs of 16, four a second."""
    return scaled(synthetic_trace(400), length=0.125, rate=4.0, seconds=SECONDS, most_tokens=480)


def one_round(up: Up, counts: tuple[int, int, int], path: Path, number: int) -> list[str]:
    """Calibrates the cluster, sends it the trace, simulates the same, and returns what is too far apart."""
    calibrate.main(["--target", up.control(), "--measure", up.target(), "--out", str(path)], "baton calibrate")
    level: Level = asyncio.run(replay(up.target(), requests(), number, SECONDS, VOCAB_SIZE))
    assert level.num_failed == 0
    pair = Pair(level, simulated(counts, read_profile(path), requests()))
    apart = []
    for metric in ("TTFT", "TPOT"):
        for percent, most in MOST_TIMES.items():
            real_ms, ours_ms = (percentile(of, percent) for of in (pair.real_ms(metric), pair.simulated_ms(metric)))
            if not 1 / most < ours_ms / real_ms < most:
                apart.append(f"{metric} p{percent}: {ours_ms:.1f} of {real_ms:.1f} ms")
    return apart


@pytest.mark.long
@pytest.mark.alone
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["split", "mixed"])
def test_simulated_times_are_near_the_measured_ones(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Measures again where they differ: a machine that does other work during one half of a round but not during the
    other shows nothing, while a simulator that is wrong is so in each round."""
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    counts = CLUSTERS[name]
    prefill, decode, mixed = counts
    model = tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    flags = [f"--prefill={prefill}", f"--decode={decode}", f"--mixed={mixed}", "--kv-blocks=1024", "--http-port=-1"]
    rounds: list[list[str]] = []
    with Up(model, tmp_path, *flags) as up:
        up.read_until("^ready$")
        while not rounds or (rounds[-1] and len(rounds) < MOST_ROUNDS):
            rounds.append(one_round(up, counts, tmp_path / "profile.json", len(rounds)))
    assert rounds[-1] == [], rounds
