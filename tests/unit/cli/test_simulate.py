"""Tests `baton simulate` and `baton calibrate`: what they print, what they write, and what they refuse by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2
from services.cli import calibrate, simulate
from services.core.errors import ConfigError, NoWorker
from services.sim.profile import WorkerProfile, write_profile


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    write_profile(path, WorkerProfile("cpu", 0.1, 10.0, 0.1))
    return str(path)


def test_figures_are_printed_and_written(profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures.json"
    arguments = ["--requests", "100", "--prefill", "1", "--decode", "2", "--profile", profile]
    assert simulate.main([*arguments, "--json", str(out)], "baton simulate") == 0
    printed = capsys.readouterr().out
    assert "1 prefill, 2 decode (cpu): 100 requests" in printed
    figures = json.loads(out.read_text())
    assert figures["workers"] == {"prefill": 1, "decode": 2, "mixed": 0}
    assert figures["num_requests"] == 100
    assert 0 < figures["ttft_ms"]["p50"] <= figures["ttft_ms"]["p95"] <= figures["ttft_ms"]["p99"]
    assert simulate.main([*arguments, "--json", "-"], "baton simulate") == 0
    assert json.loads(capsys.readouterr().out) == figures, "the same each time"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--profile", "nowhere.json"], "--profile: no file nowhere.json; `baton calibrate` writes one"),
        (["--prefill", "2"], "--decode: somebody must decode"),
        (["--decode", "-1", "--mixed", "1"], "--decode: -1 is not from 0 to 1024"),
        (["--rate-scale", "0"], "--rate-scale: must be above 0"),
        (["--length-scale", "nan"], "--length-scale: must be above 0"),
        (["--seconds", "1e99"], "--seconds: 1e\\+99"),
        (["--requests", "0"], "--requests: must be from 1"),
        (["--trace", "nowhere.csv"], "--trace: .*nowhere.csv"),
    ],
)
def test_what_makes_no_sense_is_refused(profile: str, arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        simulate.main(["--profile", profile, *arguments], "baton simulate")


def status(*loads: tuple[float, float, float]) -> list[Any]:
    layout = types_pb2.KVLayout(
        model_id="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64
    )
    worker = control_pb2.WorkerDescription(
        layout=layout, num_blocks=100, max_model_len=2048, max_num_seqs=8, device="cpu"
    )
    names = ("ms_per_prefill_token", "ms_per_decode_step", "ms_per_decode_sequence")
    return [
        SimpleNamespace(worker=worker, load=types_pb2.LoadSnapshot(**dict(zip(names, load, strict=True))))
        for load in loads
    ]


def test_a_profile_has_the_workers_own_figures() -> None:
    found = calibrate.profile_of(status((1.0, 10.0, 0.5), (3.0, 30.0, 1.5), (0.0, 0.0, 0.0)), cost_per_hour=2.0)
    assert (found.ms_per_prefill_token, found.ms_per_decode_step, found.ms_per_decode_sequence) == (2.0, 20.0, 1.0)
    assert (found.num_blocks, found.max_num_seqs, found.cost_per_hour) == (100, 8, 2.0)
    assert found.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    with pytest.raises(NoWorker):
        calibrate.profile_of(status((0.0, 0.0, 0.0)), cost_per_hour=1.0)
