"""Tests the comparisons with clusters that lack something: each has the sign that theory gives it."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path

import pytest

from services.cli import simulate as command
from services.core.errors import ConfigError
from services.sim.ablations import Ablation, ablations, table
from services.sim.profile import WorkerProfile, write_profile
from services.sim.report import Objective
from services.sim.trace import synthetic_trace

pytestmark = pytest.mark.long

PROFILE = WorkerProfile("test", ms_per_prefill_token=0.05, ms_per_decode_step=10.0, ms_per_decode_sequence=0.1)


def gains(*, shared: bool) -> dict[tuple[str, str], float]:
    trace = [dataclasses.replace(each, at_s=each.at_s / 8) for each in synthetic_trace(150)]
    if shared:
        trace = [
            dataclasses.replace(each, block_ids=tuple(range(each.prompt_tokens // 256)), block_tokens=256)
            for each in trace
        ]
    found = ablations(trace, PROFILE, 3, Objective(1.0, 0.05))
    assert "continuous batching, not static (1 at a time)" in table(found)
    batching = [each.gain for each in found if each.figure == "output at saturation"]
    assert batching == sorted(batching), "the smaller the batch, the more there is to gain"
    assert batching[0] > 2
    assert batching[-1] > 8, "steps cost little more for many"
    return {(each.what.partition(" (")[0], each.figure): each.gain for each in found}


def test_each_thing_brings_what_it_is_for() -> None:
    found = gains(shared=False)
    assert found["prefix caches", "TTFT p50"] == 1, "nothing is shared"
    assert found["chunks of 512 tokens", "ITL p99"] > 1
    assert found["splitting", "ITL p99"] > 1.5


def test_caches_save_what_prompts_share() -> None:
    assert gains(shared=True)["prefix caches", "TTFT p50"] > 2


def test_a_gain_is_a_ratio_whichever_is_better() -> None:
    assert Ablation("x", "ITL", "ms", 2.0, 8.0, more_is_better=False).gain == 4.0
    assert Ablation("x", "output", "tokens/s", 8.0, 2.0, more_is_better=True).gain == 4.0
    assert Ablation("x", "TTFT", "ms", math.inf, math.inf, more_is_better=False).gain == 1.0


def test_the_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, PROFILE)
    flags = ["--profile", str(path), "--requests", "40", "--rate-scale", "5"]
    assert command.main([*flags, "--mixed", "2", "--ablations", "--json", "-"], "baton simulate") == 0
    found = json.loads(capsys.readouterr().out)
    assert {each["figure"] for each in found} >= {"output at saturation", "ITL p99", "goodput"}
    assert command.main([*flags, "--mixed", "2", "--ablations"], "baton simulate") == 0
    assert capsys.readouterr().out.startswith("what ")
    with pytest.raises(ConfigError, match="--ablations: one worker cannot be split"):
        command.main([*flags, "--mixed", "1", "--ablations"], "baton simulate")
    plot = tmp_path / "times.svg"
    assert command.main([*flags, "--mixed", "2", "--plot", str(plot)], "baton simulate") == 0
    assert all(name in plot.read_text() for name in ("TTFT", "TPOT", "ITL", "queue"))
    with pytest.raises(ConfigError, match=r"--plot: .* cannot be written"):
        command.main([*flags, "--mixed", "2", "--plot", str(path / "x.svg")], "baton simulate")
