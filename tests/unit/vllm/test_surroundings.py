"""Tests what vLLM's processes find around them: Baton's code and no other package of the worker's, and which GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from services.core.errors import ConfigError
from services.engine.config import EngineConfig
from services.engine.cpu import openmp
from services.vllm.arguments import core_environment, engine_environment
from services.vllm.process import path_to_baton

pytestmark = pytest.mark.process

VISIBLE = "CUDA_VISIBLE_DEVICES"


def config(device: str) -> EngineConfig:
    return EngineConfig("/models/m", "m", device=device)


def test_vllms_python_finds_batons_code_and_nothing_that_lies_beside_it(tmp_path: Path) -> None:
    """Where Baton is installed, transformers of another version lies beside it."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site/services").symlink_to(Path(sys.modules["services"].__path__[0]))
    (tmp_path / "site/transformers.py").touch()
    made = path_to_baton(str(tmp_path))
    assert [each.name for each in Path(made).iterdir()] == ["services"]
    source = """
import importlib.util, services.vllm.messages
print([name for name in ("transformers", "tests", "baton", "grpc") if importlib.util.find_spec(name)])
"""
    base = getattr(sys, "_base_executable", sys.executable)
    command = [base, "-c", source]
    environment = {"PYTHONPATH": made, "PYTHONSAFEPATH": "1"}
    process = subprocess.run(command, env=environment, cwd=tmp_path / "site", capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (0, "[]\n"), process.stderr[-1000:]


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [
        ("cuda:1", None, "1"),
        ("cuda:1", "4,7", "7"),
        ("cuda:0", " GPU-ab , GPU-cd", "GPU-ab"),
        ("cuda", "4,7", "4,7"),
        ("cuda", None, None),
        ("cpu", "", ""),
    ],
)
def test_vllm_sees_the_gpu_of_the_flag(device: str, visible: str | None, expected: str | None) -> None:
    """It has no such flag: it takes the first that it sees."""
    around = {} if visible is None else {VISIBLE: visible}
    assert engine_environment(around, config(device), [0, 1]).get(VISIBLE) == expected


@pytest.mark.parametrize("visible", ["", "4", "4,7"])
def test_a_gpu_that_is_hidden_is_refused(visible: str) -> None:
    with pytest.raises(ConfigError, match=r"^--device: cuda:2 is none of the \d GPUs of CUDA_VISIBLE_DEVICES="):
        engine_environment({VISIBLE: visible}, config("cuda:2"), [0, 1])


@pytest.mark.parametrize(
    ("threads", "cores", "num_ranks", "bound"),
    [
        (2, [4, 5, 8, 9], 2, "4,5|8,9"),
        (None, [0, 1, 2, 3], 2, "0,1|2,3"),
        (1, [0, 1], 1, "nobind"),  # another worker may have the other core
        (None, [0, 1, 2], 2, "nobind"),
        (None, [0], 2, "nobind"),
    ],
)
def test_threads_of_ranks_have_cores_of_their_own_where_there_are_just_so_many(
    threads: int | None, cores: list[int], num_ranks: int, bound: str
) -> None:
    asked = EngineConfig("/models/m", "m", threads=threads)
    found = engine_environment({}, asked, cores, num_ranks)
    assert found["VLLM_CPU_OMP_THREADS_BIND"] == bound
    each = threads or max(1, len(cores) // num_ranks)
    assert found.get("OMP_NUM_THREADS") == (str(each) if bound == "nobind" else None)  # vLLM counts the bound ones
    assert core_environment(asked, cores, num_ranks, own_cores=True) == {}


@pytest.mark.parametrize("threads", [None, 3])
def test_threads_of_one_rank_have_cores_of_their_own_and_no_process(threads: int | None) -> None:
    asked, cores = EngineConfig("/models/m", "m", threads=threads), [1, 4, 5]
    found = engine_environment({"OMP_NUM_THREADS": "1"}, asked, cores)
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0", "else the scheduler takes a core to wait for another process"
    assert found["OMP_NUM_THREADS"] == "3"
    assert "OMP_PLACES" not in found, "the process that does not compute goes where there is room"
    bound = {"OMP_PLACES": "{1},{4},{5}", "OMP_PROC_BIND": "true"}
    assert core_environment(asked, cores, own_cores=False) == bound


def test_threads_spin_long_on_cores_that_are_said_to_be_the_workers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside another worker on the same cores they would take each other's time."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert not openmp.cores_are_own(os.environ)
    openmp.expect_shared_cores()
    assert not openmp.cores_are_own(os.environ)
    monkeypatch.delenv("GOMP_SPINCOUNT")
    openmp.expect_own_cores()
    assert openmp.cores_are_own(os.environ)
    spins = core_environment(EngineConfig("/models/m", "m"), [0, 1], own_cores=True)["GOMP_SPINCOUNT"]
    assert int(spins) > int(os.environ["GOMP_SPINCOUNT"])
    assert not openmp.cores_are_own({"GOMP_SPINCOUNT": "7"}), "a user's choice stays"


def test_a_gpu_has_no_threads_to_bind() -> None:
    assert core_environment(EngineConfig("/models/m", "m", device="cuda"), [0, 1], own_cores=True) == {}
