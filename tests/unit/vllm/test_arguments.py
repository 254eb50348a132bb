"""Tests with which arguments vLLM runs for a configuration, and which of them are refused by name."""

from __future__ import annotations

import pytest

from services.core.errors import ConfigError
from services.engine.config import EngineConfig
from services.vllm.arguments import OURS, REFUSED, engine_arguments, warm_lengths

CONFIG = EngineConfig(model_path="/models/tiny", model_id="tiny", dtype="float32", max_num_seqs=8)


def config(**changes: object) -> EngineConfig:
    fields = {"model_path": "/models/tiny", "model_id": "tiny", **changes}
    return EngineConfig(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", OURS)
def test_what_a_flag_sets_is_refused_with_the_flag(name: str) -> None:
    with pytest.raises(ConfigError, match=f"^--engine-arg: {name} is set by {OURS[name]}$"):
        engine_arguments(CONFIG, {name: "1"})


@pytest.mark.parametrize("pattern", REFUSED)
def test_what_would_break_a_worker_is_refused_with_the_reason(pattern: str) -> None:
    for name in {pattern.replace("*", ending) for ending in ("size", "rpc_port")}:
        with pytest.raises(ConfigError) as refused:
            engine_arguments(CONFIG, {"tensor_parallel_size": "2", name: "true"})
        assert str(refused.value) == f"--engine-arg: {name} is not for a worker to take: {REFUSED[pattern]}"


@pytest.mark.parametrize("backend", ["ray", '"ray"', "external_launcher", "my.Executor", "", "null\n"])
def test_ranks_that_are_not_below_the_worker_are_refused(backend: str) -> None:
    """Nothing would end them with it."""
    with pytest.raises(ConfigError, match=r"^--engine-arg: distributed_executor_backend=.* as those of mp and uni do$"):
        engine_arguments(CONFIG, {"distributed_executor_backend": backend})


@pytest.mark.parametrize("backend", ["mp", "uni", '"mp"'])
def test_ranks_below_the_worker_are_taken(backend: str) -> None:
    arguments = engine_arguments(CONFIG, {"distributed_executor_backend": backend})
    assert arguments["distributed_executor_backend"] == backend.strip('"')


@pytest.mark.parametrize("name", ["tensor_parallel_size", "pipeline_parallel_size"])
@pytest.mark.parametrize("text", ["0", "-1", "two", "null", "1.5", "[2]", "true"])
def test_a_number_of_ranks_that_is_none_is_refused(name: str, text: str) -> None:
    """Cores are divided among them before vLLM has looked at it."""
    with pytest.raises(ConfigError, match=f"^--engine-arg: {name}=.* must be a positive number$"):
        engine_arguments(CONFIG, {name: text})


def test_any_other_is_passed_on_as_json_or_as_a_word() -> None:
    given = {"tensor_parallel_size": "2", "kv_cache_dtype": "fp8", "enforce_eager": "true", "hf_overrides": '{"a": 1}'}
    arguments = engine_arguments(CONFIG, given)
    wanted = {"tensor_parallel_size": 2, "kv_cache_dtype": "fp8", "enforce_eager": True, "hf_overrides": {"a": 1}}
    assert wanted.items() <= arguments.items()


def test_what_the_worker_relies_on_is_set() -> None:
    arguments = engine_arguments(CONFIG, {})
    wanted = {"model": "/models/tiny", "dtype": "float32", "max_num_seqs": 8, "block_size": 16}
    assert wanted.items() <= arguments.items()
    assert arguments["async_scheduling"] is False
    assert arguments["skip_tokenizer_init"] is True
    assert arguments["generation_config"] == "vllm", "a model's own defaults would be added to the request's"


@pytest.mark.parametrize(
    ("changes", "memory"),
    [
        ({}, {"gpu_memory_utilization": 0.2}),
        ({"memory_utilization": 0.5}, {"gpu_memory_utilization": 0.5}),
        ({"device": "cuda"}, {}),
        ({"num_blocks": 64}, {"num_gpu_blocks_override": 65, "kv_cache_memory_bytes": 1 << 30}),
    ],
)
def test_how_many_blocks_it_has(changes: dict[str, object], memory: dict[str, object]) -> None:
    names = ("gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes")
    arguments = engine_arguments(config(**changes), {})
    chosen = {name: arguments[name] for name in names if name in arguments}
    assert memory.items() <= chosen.items()
    assert chosen.keys() - memory.keys() <= {"gpu_memory_utilization"}


def test_the_block_size_may_be_left_to_vllm() -> None:
    assert "block_size" not in engine_arguments(config(block_size=0), {})
    assert "max_model_len" not in engine_arguments(config(), {})
    assert engine_arguments(config(max_model_len=512), {})["max_model_len"] == 512


@pytest.mark.parametrize(
    ("changes", "lengths"),
    [
        ({}, [16, 64, 256]),
        ({"max_num_batched_tokens": 64}, [16, 64]),
        ({"max_num_batched_tokens": 8}, [1]),
        ({"max_model_len": 40}, [16]),
        ({"max_model_len": 2}, [1]),
    ],
)
def test_the_prompts_that_are_measured_fit(changes: dict[str, object], lengths: list[int]) -> None:
    assert warm_lengths(config(**changes)) == lengths
