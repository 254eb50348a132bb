"""Tests that the simulator and real processes agree on a tiny model: a calibrated cluster is sent a trace, and the same
is simulated. The bounds are loose, since a step of a tiny model takes about as long as what is around it;
`python -m benchmarks --only sim` compares more closely, with the default model.
"""

from __future__ import annotations

import asyncio
import statistics
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

pytestmark = pytest.mark.process

MOST_TIMES = {50: 2.0, 95: 4.0}
"""By which factor percentiles may differ, either way: the largest times are those in which the machine did other work,
which no profile has."""
SECONDS = 15.0
MOST_ROUNDS = 5
TOO_SLOW = 5.0

Ratios = dict[tuple[str, int], float]


def requests() -> list[TracedRequest]:
    """Returns prompts of 130 tokens in the median and outputs of 16, four a second."""
    return scaled(synthetic_trace(400), length=0.125, rate=4.0, seconds=SECONDS, most_tokens=480)


def one_round(up: Up, counts: tuple[int, int, int], path: Path, number: int) -> tuple[Ratios, Ratios]:
    """Calibrates the cluster, sends it the trace, and simulates the same: on workers as calibrated, and on some that
    are `TOO_SLOW`. Returns simulated over measured of both."""
    calibrate.main(
        ["--target", up.control(), "--measure", up.target(), "--repeats", "1", "--out", str(path)], "baton calibrate"
    )
    level: Level = asyncio.run(replay(up.target(), requests(), number, SECONDS, VOCAB_SIZE))
    assert level.num_failed == 0
    profile = read_profile(path)
    right, wrong = (
        ratios(Pair(level, simulated(counts, each, requests()))) for each in (profile, profile.slowed(TOO_SLOW))
    )
    return right, wrong


def ratios(pair: Pair) -> Ratios:
    return {
        (metric, percent): percentile(pair.simulated_ms(metric), percent) / percentile(pair.real_ms(metric), percent)
        for metric in ("TTFT", "TPOT")
        for percent in MOST_TIMES
    }


def apart(rounds: list[Ratios]) -> dict[tuple[str, int], float]:
    """Returns the medians over rounds that are too far from one."""
    medians = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
    return {key: ratio for key, ratio in medians.items() if not 1 / MOST_TIMES[key[1]] < ratio < MOST_TIMES[key[1]]}


@pytest.mark.long
@pytest.mark.clock
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["split", "mixed"])
def test_simulated_times_are_near_the_measured_ones(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes more rounds while their median is apart: a machine that does other work during one half of a round but not
    during the other shows nothing. That of a simulation that is wrong is apart after every round."""
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    counts = CLUSTERS[name]
    prefill, decode, mixed = counts
    model = tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=1024, num_hidden_layers=8)
    flags = [f"--prefill={prefill}", f"--decode={decode}", f"--mixed={mixed}", "--kv-blocks=1024", "--http-port=-1"]
    rounds: list[Ratios] = []
    slowed: list[Ratios] = []
    with Up(model, tmp_path, *flags) as up:
        up.read_until("^ready$")
        while not rounds or (apart(rounds) and len(rounds) < MOST_ROUNDS):
            right, wrong = one_round(up, counts, tmp_path / "profile.json", len(rounds))
            rounds.append(right)
            slowed.append(wrong)
    assert not apart(rounds), rounds
    assert apart(slowed), f"workers that are {TOO_SLOW} times too slow pass too: {slowed}"
