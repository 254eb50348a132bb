"""Tests what is refused of an engine by its flag's name, before anything is downloaded, and which types vLLM gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.cli import engine_setup, service, up, worker_packages
from services.cli.arguments import Parser
from services.cli.child import Lifeline
from services.cli.cluster import LocalCluster
from services.cli.cluster_output import PlainOutput
from services.cli.dtype_choice import Choice
from services.cli.engine_setup import choose_types, demand_engine, demand_one_gpu_each
from services.cli.model_cache import ResolvedModel
from services.cli.up import UpConfig, make_plan
from services.core import config as configuration
from services.core.errors import BatonError, ConfigError
from services.worker.config import WorkerConfig

PYTHON = "/vllm/bin/python"
REFUSED = [
    ("--quantization", {"quantization": "int8"}),
    ("--quantization", {"quantization": "gguf"}),
    ("--quantization", {"quantization": "awq"}),
    ("--kv-dtype", {"kv_dtype": "int8"}),
    ("--kv-dtype", {"kv_dtype": "float32", "dtype": "bfloat16"}),
    ("--engine-arg", {"engine_arg": ("seed=1", "seed=2")}),
    ("--engine-arg", {"engine_arg": ("block_size=16",)}),
    ("--engine-arg", {"engine_arg": ("kv_transfer_config={}",)}),
]
WAYS = [(WorkerConfig, "baton decode"), (UpConfig, "baton up")]


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_setup, "vllm_python", lambda given: Path(given or PYTHON))


def vllm(**fields: Any) -> WorkerConfig:
    return WorkerConfig(engine="vllm", **fields)


def saved_as(folder: Path, dtype: str) -> Path:
    (folder / "config.json").write_text(json.dumps({"dtype": dtype}))
    return folder


def test_the_python_is_the_given_one_or_that_which_is_found() -> None:
    assert demand_engine(vllm()) == PYTHON
    assert demand_engine(vllm(vllm_python="/my/python")) == "/my/python"
    assert demand_engine(WorkerConfig(vllm_python="/my/python")) == "", "torch is in this one"


def test_what_is_not_installed_is_told_by_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_packages.util, "find_spec", lambda name: None)
    for config, extra in ((vllm(), "worker-vllm"), (WorkerConfig(), "worker")):
        with pytest.raises(BatonError, match=rf"pip install 'baton-serving\[{extra}\]'"):
            demand_engine(config)


@pytest.mark.parametrize(("flag", "fields"), REFUSED)
def test_what_vllm_does_not_do_is_refused_by_name(flag: str, fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{flag}: "):
        demand_engine(vllm(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"quantization": "none"},
        {"kv_dtype": "bfloat16"},
        {"kv_dtype": "bfloat16", "dtype": "bfloat16"},
        {"dtype": "float32"},
    ],
)
def test_what_vllm_does_is_not_refused(fields: dict[str, Any]) -> None:
    assert demand_engine(vllm(**fields)) == PYTHON


def test_a_gguf_file_is_for_torch(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError, match=r"^--model: .*m\.gguf is a GGUF file"):
        demand_engine(vllm(model=str(tmp_path / "m.gguf")))


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
def test_vllm_gets_the_type_that_the_model_was_saved_in(tmp_path: Path, saved: str) -> None:
    """Left to itself, vLLM halves float32; and what torch is fast in is no matter."""
    model = saved_as(tmp_path, saved)
    assert choose_types(vllm(), model) == Choice(saved, "as saved", "none")
    assert choose_types(vllm(kv_dtype=saved), model).dtype == saved
    other = "float16" if saved != "float16" else "float32"
    assert choose_types(vllm(dtype=other, kv_dtype=other), model) == Choice(other, "", "none")
    with pytest.raises(ConfigError, match=f"^--kv-dtype: {other} is for --engine torch"):
        choose_types(vllm(kv_dtype=other), model)


def test_a_type_that_is_not_known_is_left_to_vllm(tmp_path: Path) -> None:
    model = saved_as(tmp_path, "float8_e4m3fn")
    assert choose_types(vllm(), model) == Choice("auto", "", "none")
    with pytest.raises(ConfigError, match=r"^--kv-dtype: "):
        choose_types(vllm(kv_dtype="bfloat16"), model)


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_a_local_cluster_gives_each_worker_one_gpu(name: str) -> None:
    demand_one_gpu_each(UpConfig(engine="vllm", engine_arg=(f"{name}=2",)))
    demand_one_gpu_each(UpConfig(engine="vllm", engine_arg=(f"{name}=1",), device="cuda"))
    with pytest.raises(ConfigError, match=r"^--engine-arg: vLLM takes 2 GPUs, and"):
        demand_one_gpu_each(UpConfig(engine="vllm", engine_arg=(f"{name}=2",), device="cuda:1"))


@pytest.mark.parametrize(("kind", "prog"), WAYS)
@pytest.mark.parametrize(
    ("flag", "argv"),
    [
        ("--quantization", ["--engine=vllm", "--quantization=int4"]),
        ("--kv-dtype", ["--engine=vllm", "--kv-dtype=int8"]),
        ("--engine-arg", ["--engine-arg=seed=1"]),
    ],
)
def test_commands_refuse_before_they_look_for_a_model(kind: type[Any], prog: str, flag: str, argv: list[str]) -> None:
    main = up.main if kind is UpConfig else service.main
    with pytest.raises(ConfigError, match=f"^{flag}: "):
        main([*argv, "--port=0", "--metrics-port=-1", "--model=/no/such/model"], prog)


def test_gpus_are_counted_by_the_torch_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(up.machine, "num_gpus", lambda python: asked.append(python) or 0)
    for kind, prog in WAYS:
        main = up.main if kind is UpConfig else service.main
        with pytest.raises(ConfigError, match=r"^--device: "):
            main(["--engine=vllm", "--device=cuda", "--port=0", "--metrics-port=-1", "--model=/none"], prog)
    assert asked == [PYTHON, PYTHON]


def test_workers_of_a_local_cluster_get_the_engine_with_its_arguments() -> None:
    arguments = ("max_num_seqs=4", 'compilation_config={"level": 0, "a": 1}', "empty=")
    config = UpConfig(port=0, control_port=7009, engine="vllm", engine_arg=arguments, vllm_python=PYTHON, threads=1)
    plan = make_plan(config, ["prefill", "decode"], ResolvedModel("m", Path("/m")))
    lifeline = Lifeline()
    cluster = LocalCluster(plan, lifeline, PlainOutput())
    for worker in plan.workers:
        command = cluster._worker_command(worker)
        parser = Parser(prog="baton worker")
        configuration.add_arguments(parser, WorkerConfig)
        flags, _ = parser.parse_known_args(command[command.index(worker.role) + 1 :])
        # Flags come before the variables, of which `baton up` itself has made its own.
        got = configuration.load(WorkerConfig, flags, {"BATON_ENGINE": "torch", "BATON_ENGINE_ARG": "seed=1"})
        assert (got.engine, got.engine_arg, got.vllm_python, got.threads) == ("vllm", arguments, PYTHON, 1)
        assert "--cores" in command
    lifeline.close()
