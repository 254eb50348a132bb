"""Tests `baton simulate` and `baton calibrate`: what they print, what they write, and what they refuse by name."""

from __future__ import annotations

import errno
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2
from services.cli import calibrate, simulate
from services.core.errors import BatonError, ConfigError, NoWorker
from services.sim import calibration
from services.sim.profile import WorkerProfile, read_profile, write_profile
from services.sim.report import figure


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
        (["--rate-scale", "0"], "--rate-scale: 0.0 must be above 0"),
        (["--length-scale", "nan"], "--length-scale: 'nan' is not a number"),
        (["--length-scale", "inf"], "--length-scale: inf must be above 0"),
        (["--seconds", "1e99"], "--seconds: 1e\\+99"),
        (["--requests", "0"], "--requests: 0 must be from 1"),
        (
            ["--requests", "10000", "--tenant", "a=1", "--tenant", "b=10000"],
            "--requests: must be from 1 to .* together",
        ),
        (["--tenant", "shop"], "--tenant: 'shop' is not like shop=2"),
        (["--tenant", "shop=nan"], "--tenant: 'shop=nan' is not like shop=2"),
        (["--tenant-weight", "=2"], "--tenant-weight: '=2' is not like shop=2"),
        (["--tenant", "a=1", "--trace", "x.csv"], "--tenant: a trace says itself who its callers are"),
        (["--trace", "nowhere.csv"], "--trace: nowhere.csv cannot be read: No such file"),
        (["--slo-ttft-ms", "-5"], "--slo-ttft-ms: -5.0 must be above 0"),
        (["--json", "/proc/none/a.json"], "--json: /proc/none/a.json cannot be written"),
        (["--plot", "."], "--plot: . cannot be written: it is a folder"),
        (["--plot", "-"], "--plot: a picture goes to a file, not to stdout"),
        (["--policy", "m=hybrid"], "--policy: 'm=hybrid' is not one of"),
        (["--policy-file", "nowhere.toml"], "--policy-file: nowhere.toml: No such file"),
        (["--set", "num_blocks=0"], "--set: profile 'cpu': num_blocks is 0"),
        (["--set", "num_blocks=1.5"], "--set: 'num_blocks=1.5': must be a whole number"),
        (["--set", "num_blocks=inf"], "--set: 'num_blocks=inf': must be a whole number"),
        (["--set", "num_blocks=many"], "--set: 'num_blocks=many': 'many' is no number"),
        (["--ablations", "--mixed", "2", "--plot", "a.svg"], "--plot: --ablations has clusters of its own"),
        (["--ablations", "--mixed", "2", "--die", "mixed-0@1"], "--die: --ablations has clusters of its own"),
        (["--ablations", "--mixed", "2", "--no-chunking"], "--no-chunking: --ablations has clusters of its own"),
        (["--ablations", "--mixed", "2", "--slow-factor", "3"], "--slow-factor: --ablations has clusters of its own"),
        (["--ablations", "--mixed", "2", "--split", "auto"], "--split: --ablations has clusters of its own"),
        (["--profile", "README.md"], "--profile: README.md is no profile, which `baton calibrate` writes"),
    ],
)
def test_what_makes_no_sense_is_refused(profile: str, arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        simulate.main(["--profile", profile, *arguments], "baton simulate")


def test_whole_numbers_may_be_written_as_others_are(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--profile", profile, "--requests", "20", "--json"]
    found = []
    for number in ("2000", "2e3", "2000.0"):
        assert simulate.main([*arguments, "--set", f"num_blocks={number}"], "baton simulate") == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize(
    ("setting", "points"),
    [("ms_per_decode_step=9", "decode_points"), ("ms_per_prefill_token=9", "prefill_points")],
)
def test_a_figure_that_points_take_the_place_of_cannot_be_set(tmp_path: Path, setting: str, points: str) -> None:
    path = tmp_path / "points.json"
    write_profile(path, WorkerProfile("cpu", 0.1, 10.0, 0.1, **{points: ((1, 10.0), (8, 20.0))}))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"--set: '{setting}': the profile has measured .*, and {points} of it say"):
        simulate.main(["--profile", str(path), "--set", setting], "baton simulate")


def test_tenants_are_made_up_by_their_rates_and_reported_each(profile: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--profile", profile, "--mixed", "1", "--requests", "20", "--tenant", "a=0.5", "--json", "-"]
    assert simulate.main(arguments, "baton simulate") == 0
    assert json.loads(capsys.readouterr().out)["by_tenant"] == {}
    assert simulate.main([*arguments, "--tenant", "b=2", "--tenant-weight", "b=4"], "baton simulate") == 0
    by_tenant = json.loads(capsys.readouterr().out)["by_tenant"]
    assert {tenant: of["num_requests"] for tenant, of in by_tenant.items()} == {"a": 10, "b": 40}
    assert all(of["tokens"] and of["ttft_ms"]["p99"] and not of["num_failed"] for of in by_tenant.values())
    assert simulate.main([*arguments[:-2], "--tenant", "b=2"], "baton simulate") == 0
    assert "tenant b: TTFT p50" in capsys.readouterr().out


def test_variables_of_processes_that_serve_are_not_read(
    profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = []
    for _ in range(2):
        assert simulate.main(["--profile", profile, "--requests", "20", "--json"], "baton simulate") == 0
        found.append(json.loads(capsys.readouterr().out))
        for name, value in {"SPLIT": "never", "POLICY": "none", "PREFILL": "7", "SLOW_FACTOR": "x"}.items():
            monkeypatch.setenv(f"BATON_{name}", value)
    assert found[0] == found[1]


def test_where_nothing_can_be_written_nothing_is_simulated(profile: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*arguments: object) -> None:
        raise AssertionError("it was simulated")

    monkeypatch.setattr(simulate, "simulate", too_late)
    with pytest.raises(ConfigError, match=r"--json: README.md/a.json cannot be written"):
        simulate.main(["--profile", profile, "--json", "README.md/a.json"], "baton simulate")


def test_there_is_no_picture_of_requests_that_all_failed(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plot = tmp_path / "a.svg"
    arguments = ["--profile", profile, "--requests", "5", "--set", "num_blocks=1", "--plot", str(plot)]
    assert simulate.main(arguments, "baton simulate") == 0
    printed = capsys.readouterr()
    assert "failed: 5 " in printed.out
    assert "--plot: no request was served, so there is nothing to draw" in printed.err
    assert not plot.exists()


def test_a_profile_is_replaced_only_by_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "profile.json"
    write_profile(path, WorkerProfile("first", 1.0, 1.0, 0.1))

    def full_disk(self: Path, to: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", full_disk)
        with pytest.raises(OSError, match=f"No space left on device: '{path}'"):
            write_profile(path, WorkerProfile("second", 1.0, 1.0, 0.1))
    assert read_profile(path).name == "first"
    assert list(tmp_path.iterdir()) == [path]
    write_profile(path, WorkerProfile("second", 1.0, 1.0, 0.1))
    assert read_profile(path).name == "second"


def test_a_phases_cost_is_that_of_the_workers_that_have_it() -> None:
    prefill, decode, mixed = (
        status((1.0, 8.0, 0.1), roles=[types_pb2.WORKER_ROLE_PREFILL]),
        status((9.0, 20.0, 0.5), roles=[types_pb2.WORKER_ROLE_DECODE]),
        status((3.0, 30.0, 0.7), roles=[types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE]),
    )
    found = calibration.profile_of([*prefill, *decode], cost_per_hour=1.0)
    assert (found.ms_per_prefill_token, found.ms_per_decode_step, found.ms_per_decode_sequence) == (1.0, 20.0, 0.5)
    found = calibration.profile_of([*prefill, *decode, *mixed], cost_per_hour=1.0)
    assert (found.ms_per_prefill_token, found.ms_per_decode_step) == (2.0, 25.0)
    found = calibration.profile_of(decode, cost_per_hour=1.0)
    assert found.ms_per_prefill_token == 9.0, "there is no other"


def status(*loads: tuple[float, float, float], roles: Sequence[int] = ()) -> list[Any]:
    layout = types_pb2.KVLayout(
        model_id="m", dtype="bfloat16", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64
    )
    worker = control_pb2.WorkerDescription(
        layout=layout, num_blocks=100, max_model_len=2048, max_num_seqs=8, device="cpu", roles=list(roles)
    )
    names = ("ms_per_prefill_token", "ms_per_decode_step", "ms_per_decode_sequence")
    return [
        SimpleNamespace(worker=worker, load=types_pb2.LoadSnapshot(**dict(zip(names, load, strict=True))))
        for load in loads
    ]


def test_a_profile_has_the_workers_own_figures() -> None:
    found = calibration.profile_of(status((1.0, 10.0, 0.5), (3.0, 30.0, 1.5), (0.0, 0.0, 0.0)), cost_per_hour=2.0)
    assert (found.ms_per_prefill_token, found.ms_per_decode_step, found.ms_per_decode_sequence) == (2.0, 20.0, 1.0)
    assert (found.num_blocks, found.max_num_seqs, found.cost_per_hour) == (100, 8, 2.0)
    assert found.kv_bytes_per_token == 2 * 30 * 3 * 64 * 2
    with pytest.raises(NoWorker):
        calibration.profile_of(status((0.0, 0.0, 0.0)), cost_per_hour=1.0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--measure", "nonsense"], "--measure: 'nonsense' is not HOST:PORT"),
        (["--cost-per-hour", "inf"], "--cost-per-hour: inf must be at least 0, and finite"),
        (["--cost-per-hour", "nan"], "--cost-per-hour: 'nan' is not a number"),
        (["--out", "."], "--out: . cannot be written: it is a folder"),
        (["--out", "/proc/none/a.json"], "--out: /proc/none/a.json cannot be written"),
    ],
)
def test_what_cannot_be_measured_or_kept_is_refused_before_anybody_is_asked(arguments: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        calibrate.main(["--target", "127.0.0.1:1", *arguments], "baton calibrate")


@pytest.mark.parametrize(
    ("load", "dtype", "reason"),
    [
        ((math.nan, 10.0, 0.5), "bfloat16", "the workers' own figures cannot be: profile 'm on cpu': ms_per_prefill"),
        ((1.0, 10.0, -1.0), "bfloat16", "the workers' own figures cannot be"),
        ((1.0, 10.0, 0.5), "float7", "m: its KV has the unknown type 'float7'"),
    ],
)
def test_figures_that_cannot_be_are_no_wrong_usage(load: tuple[float, float, float], dtype: str, reason: str) -> None:
    workers = status(load)
    workers[0].worker.layout.dtype = dtype
    with pytest.raises(BatonError, match=reason) as raised:
        calibration.profile_of(workers, cost_per_hour=1.0)
    assert not isinstance(raised.value, ConfigError)


def test_both_roles_are_waited_for_as_long_as_asked() -> None:
    prefill = status((1.0, 8.0, 0.1), roles=[types_pb2.WORKER_ROLE_PREFILL])
    decode = status((1.0, 8.0, 0.1), roles=[types_pb2.WORKER_ROLE_DECODE])
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def after(come_s: float) -> Callable[[], list[Any]]:
        """Names nobody at first, then the decode worker alone, and both at last."""

        def ask() -> list[Any]:
            if now[0] < come_s / 2:
                raise NoWorker("nobody", retry_after_s=1.0)
            return decode if now[0] < come_s else [*prefill, *decode]

        return ask

    assert calibrate.wait_for_both_roles(after(4.0), 5.0, lambda: now[0], sleep) == [*prefill, *decode]
    assert 4.0 <= now[0] < 4.5
    now[0] = 0.0
    with pytest.raises(NoWorker, match="a worker that takes prompts and one that decodes must be there"):
        calibrate.wait_for_both_roles(after(6.0), 5.0, lambda: now[0], sleep)
    assert 5.0 <= now[0] < 5.5


def test_only_workers_of_the_model_that_are_there_are_asked() -> None:
    def worker(model: str, worker_id: str, *, has_session: bool = True) -> control_pb2.WorkerStatus:
        layout = types_pb2.KVLayout(model_id=model)
        description = control_pb2.WorkerDescription(worker_id=worker_id, layout=layout)
        return control_pb2.WorkerStatus(worker=description, has_session=has_session)

    found = control_pb2.GetStatusResponse(
        models=[control_pb2.ModelStatus(model_id="own"), control_pb2.ModelStatus(model_id="other")],
        workers=[worker("other", "a"), worker("own", "b"), worker("own", "c", has_session=False), worker("own", "d")],
    )

    def ids(model: str) -> list[str]:
        return [each.worker.worker_id for each in calibration.workers_of(found, model)]

    assert ids("") == ids("own") == ["b", "d"]
    assert ids("other") == ["a"]
    with pytest.raises(NoWorker, match="no worker of third is there; models: own, other"):
        ids("third")


def test_without_a_profile_the_default_models_is_taken_and_named_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BATON_HOME", str(tmp_path))
    assert simulate.main(["--requests", "20"], "baton simulate") == 0
    out, err = capsys.readouterr()
    assert "(smollm2-135m-instruct on " in out
    assert "shipped" in out
    assert "no --profile: workers cost what was measured of smollm2-135m-instruct on " in err
    assert "`baton calibrate` measures yours" in err
    write_profile(tmp_path / "profile.json", WorkerProfile("mine", 0.1, 10.0, 0.1))
    assert simulate.main(["--requests", "20"], "baton simulate") == 0
    out, err = capsys.readouterr()
    assert "(mine)" in out
    assert "no --profile" not in err


def test_no_figure_has_an_exponent() -> None:
    assert [figure(value) for value in (0.1234, 2.0, 19.14, 2919.6, 1234567.0)] == [
        *("0.123", "2", "19.1", "2,920", "1,234,567"),
    ]
