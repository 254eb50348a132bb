"""Tests `--dtype auto` in real processes: one choice for all workers, told in the log, right for the CPU at hand."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.cli.dtype_choice import MIN_SPEEDUP, TimingFailed, Timings, choose_dtype, measure_in_child
from services.cli.model_names import resolve_model
from tests.support.models import tiny_model
from tests.support.processes import BATON, Up, environment

pytestmark = [pytest.mark.process, pytest.mark.long]

FASTER_IN_FLOAT32 = Timings({"bfloat16": (9.0, 9.0), "float32": (1.0, 1.0)}, "TEST")
AVX2_ALONE = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns a model saved in bfloat16, with a home folder beside it that says float32 is faster."""
    model = tiny_model("llama", tmp_path, torch.bfloat16)
    choose_dtype("auto", "cpu", model, measure=lambda *_: FASTER_IN_FLOAT32, folder=tmp_path / "home" / "dtype")
    return model


def test_workers_of_a_cluster_have_the_type_that_was_chosen(model: Path, tmp_path: Path) -> None:
    with Up(model, tmp_path, "--dtype", "auto", BATON_HOME=str(tmp_path / "home")) as up:
        up.read_until("^ready$")
        status = json.loads(up.baton("status", "--json").stdout)
        assert [worker["worker"]["layout"]["dtype"] for worker in status["workers"]] == ["float32", "float32"]
        assert len(up.generate()["token_ids"]) == 4
        (line,) = (line for line in up.lines if line.startswith("dtype "))
        assert re.search(r"float32 .*faster here than bfloat16 as saved.*TEST CPU", line)
        up.stop(signal.SIGINT)


def test_a_worker_on_its_own_has_it_too_and_says_why(model: Path, tmp_path: Path) -> None:
    command = [*BATON, "mixed", "--model", str(model), "--kv-blocks", "16"]
    environ = environment(tmp_path) | {"BATON_HOME": str(tmp_path / "home")}
    with subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True) as worker:
        assert worker.stderr is not None
        lines = []
        for line in worker.stderr:
            lines.append(line)
            if "ready: port" in line:
                worker.send_signal(signal.SIGTERM)
    assert worker.returncode == 0
    (why,) = (line for line in lines if "--dtype auto means" in line)
    assert re.search(r"INFO .*--dtype auto means float32: faster here than bfloat16 as saved", why)
    assert any("dtype='float32'" in line for line in lines if "loaded tiny-llama" in line)


@pytest.mark.clock
@pytest.mark.skipif("avx2" not in Path("/proc/cpuinfo").read_text(), reason="torch cannot act as an AVX2 CPU here")
def test_with_avx2_alone_the_default_model_runs_in_the_faster_type(tmp_path: Path) -> None:
    """It is timed for real, by the command that compose runs; and a second time it is only read. Which type is faster
    depends on the kernels that were built: torch emulates bfloat16 on such a CPU, and takes twenty times as long."""
    model = resolve_model("smollm2-135m-instruct").path
    home = tmp_path / "home"
    environ = environment(tmp_path) | {"BATON_HOME": str(home), **AVX2_ALONE}
    command = [*BATON, "models", "pull", "--time-dtypes", str(model)]
    first, second = (
        subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    said = re.search(r"--dtype auto means (\w+): .*AVX2 CPU", first)
    assert said, first
    figures = re.findall(r"(\w+(?:\+gguf)?) [\d.e+]+ ms a prompt token, [\d.e+]+ ms a decode, ([\d.]+) s", first)
    seconds = {way: float(whole_s) for way, whole_s in figures}
    best = min(seconds, key=seconds.__getitem__)
    assert set(seconds) >= {"bfloat16", "float32"}
    (entry,) = (home / "dtype").glob("*.json")
    kept = json.loads(entry.read_text())
    assert kept["dtype"] == said[1]
    chosen = said[1] if kept["quantization"] == "none" else f"{said[1]}+{kept['quantization']}"
    assert seconds[chosen] <= seconds[best] * MIN_SPEEDUP**2, "each choice may cost a factor"
    assert second.strip() == f"{first.strip()} (kept in {entry})"


@pytest.mark.parametrize(
    ("weights", "kv_dtype"), [("", "auto"), ("", "bfloat16"), ("+int8", "int8"), ("+int4", "auto")]
)
def test_a_child_times_and_is_read(weights: str, kv_dtype: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path, torch.float16)
    ways = (f"float16{weights}", f"float32{weights}")
    timings = measure_in_child(model, "float16", ways, kv_dtype)
    assert tuple(timings.of) == ways
    assert timings.capability


def test_a_child_is_told_the_type_of_the_kv_cache(tmp_path: Path) -> None:
    with pytest.raises(TimingFailed, match="--kv-dtype: invalid choice: 'int9'"):
        measure_in_child(tmp_path, "bfloat16", ("bfloat16", "float32"), "int9")


def test_a_child_that_cannot_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such"}')
    with pytest.raises(TimingFailed, match="no-such"):
        measure_in_child(tmp_path, "bfloat16", ("bfloat16", "float32"))


def test_a_child_does_not_outlive_whoever_asked(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path, torch.bfloat16)
    read_fd, write_fd = os.pipe()
    os.close(write_fd)
    command = [sys.executable, "-m", "services.engine.cpu.dtype_timing", str(model), "bfloat16", "bfloat16"]
    child = subprocess.run([*command, "--lifeline-fd", str(read_fd)], pass_fds=(read_fd,), capture_output=True)
    os.close(read_fd)
    assert child.returncode == 1
    assert child.stdout == b""
