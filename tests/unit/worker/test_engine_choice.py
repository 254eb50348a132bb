"""Tests the flags that choose a worker's engine, and that a worker loads the chosen one and no other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

from services.cli.arguments import Parser
from services.cli.up import UpConfig
from services.core import config as configuration
from services.core.errors import ConfigError
from services.core.start_progress import tell_nobody
from services.worker.config import WorkerConfig
from services.worker.engine_choice import EngineChoice
from services.worker.main import engine_config, make_engine
from tests.support import ROOT
from tests.support.workers import DECODE, MIXED


def loaded(kind: type[Any], *argv: str, environ: dict[str, str] | None = None) -> Any:
    parser = Parser()
    configuration.add_arguments(parser, kind)
    return configuration.load(kind, parser.parse_args(argv), environ or {})


@pytest.mark.parametrize("kind", [WorkerConfig, UpConfig])
def test_arguments_come_from_flags_or_the_variable(kind: type[Any]) -> None:
    config = loaded(kind, "--engine=vllm", "--engine-arg=tensor_parallel_size=2", "--engine-arg", "a=b=c,d")
    assert config.engine_arguments() == {"tensor_parallel_size": "2", "a": "b=c,d"}
    environ = {"BATON_ENGINE": "vllm", "BATON_ENGINE_ARG": "seed=1,swap_space=0", "BATON_VLLM_PYTHON": "/py"}
    config = loaded(kind, environ=environ)
    assert (config.engine_arguments(), config.vllm_python) == ({"seed": "1", "swap_space": "0"}, "/py")
    assert loaded(kind).engine == "torch"


@pytest.mark.parametrize("kind", [WorkerConfig, UpConfig])
@pytest.mark.parametrize("text", ["", "seed", "=1", "--seed=1", "Seed=1", "tensor-parallel-size=2", " seed=1", "1a=2"])
def test_what_is_no_argument_is_refused_by_name(kind: type[Any], text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--engine-arg: .* is not NAME=VALUE"):
        loaded(kind, "--engine=vllm", f"--engine-arg={text}")


def test_another_engine_has_no_arguments() -> None:
    with pytest.raises(ConfigError, match=r"^--engine-arg: 'seed=1' is for --engine vllm, and this is torch"):
        EngineChoice(engine_arg=("seed=1",)).engine_arguments()
    with pytest.raises(ConfigError, match=r"^--engine: 'jax' is not one of torch, vllm"):
        loaded(WorkerConfig, "--engine=jax")


def test_an_argument_given_twice_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^--engine-arg: seed is given twice"):
        EngineChoice("vllm", ("seed=1", "dtype=x", "seed=2")).engine_arguments()


def test_the_size_of_a_block_is_the_engines_own_unless_it_is_given() -> None:
    """It is the same for all torch engines, so that workers can hand over to each other."""
    assert engine_config(WorkerConfig(), DECODE).block_size == 16
    assert engine_config(WorkerConfig(block_size=32), DECODE).block_size == 32
    assert engine_config(WorkerConfig(engine="vllm"), DECODE).block_size == 0
    assert engine_config(WorkerConfig(engine="vllm", block_size=32), DECODE).block_size == 32


def test_vllm_is_asked_for_with_all_that_the_flags_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    fake: Any = types.ModuleType("services.vllm.engine")
    fake.vllm_engine = lambda *args, **options: asked.append((args, options)) or "the engine"
    monkeypatch.setitem(sys.modules, "services.vllm.engine", fake)
    config = WorkerConfig(engine="vllm", engine_arg=("seed=1",), vllm_python="/venv/bin/python", model="/models/m")
    assert make_engine(config, MIXED, tell_nobody) == "the engine"
    options = {"python": Path("/venv/bin/python"), "engine_args": {"seed": "1"}, "tell": tell_nobody}
    assert asked == [((engine_config(config, MIXED),), options)]


@pytest.mark.process
def test_a_worker_with_vllm_needs_neither_torch_nor_transformers() -> None:
    """It starts where only the packages of its own extra are."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    has, lacks = ({re.split("[<>=]", each)[0] for each in extras[extra]} for extra in ("worker-vllm", "worker"))
    assert lacks - has >= {"torch", "transformers", "safetensors", "llguidance"}
    source = f"""
import importlib.abc, sys, types

class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in {sorted(lacks - has)}:
            raise ModuleNotFoundError(f"there is no {{name}}")

sys.meta_path.insert(0, Missing())
fake = types.ModuleType("services.vllm.engine")
fake.vllm_engine = lambda *args, **options: "the engine"
sys.modules["services.vllm.engine"] = fake
import services.cli.mixed, services.cli.service, services.cli.engine_setup
from services.worker.config import WorkerConfig
from services.worker.machine import Machine
from services.worker.main import make_engine
make_engine(WorkerConfig(engine="vllm", vllm_python="python"), (), print)
print(sorted(set(("torch", "transformers", "vllm")) & sys.modules.keys()))
"""
    command = [sys.executable, "-c", source]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert (process.returncode, process.stdout) == (0, "[]\n"), process.stderr[-2000:]
