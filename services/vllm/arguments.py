"""Says with which arguments and environment vLLM runs for a worker's configuration. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from services.core.errors import ConfigError
from services.core.printable import printable
from services.engine.config import EngineConfig

OURS = {
    "model": "--model",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "num_gpu_blocks_override": "--kv-blocks",
    "kv_cache_memory_bytes": "--kv-blocks",
    "gpu_memory_utilization": "--memory-utilization",
}
"""Arguments of vLLM that have a flag of the worker's, and the flag."""

REFUSED = {
    "kv_transfer_config": "Baton hands KV over",
    "logits_processors": "Baton samples",
    "watermark_config": "Baton samples",
    "async_scheduling": "a step needs the tokens of the one before, by which it samples",
    "speculative_config": "a replay would not go on identically",
    "spec_*": "a replay would not go on identically",
    "kv_offloading_size": "Baton keeps KV in tiers, and vLLM would replace its connector",
    "decode_context_parallel_size": "a rank has all tokens of its part of a block",
    "prefill_context_parallel_size": "a rank has all tokens of its part of a block",
    "max_num_queued_reqs": "Baton admits",
    "max_num_queued_tokens": "Baton admits",
    "nnodes": "ranks share memory with the worker",
    "disable_log_stats": "the worker reports vLLM's figures",
    "skip_tokenizer_init": "the worker sets it",
    "tokenizer": "the router has it",
    "model_class_overrides": "a fingerprint does not say what code computes",
    "enable_lora": "a block's hash says nothing of it",
    "data_parallel_*": "start a worker for each replica",
    "enable_sleep_mode": "a worker serves until it is ended",
}
"""Arguments of vLLM that a worker does not take, and why. A star stands for any ending."""

_SIZES = "tensor_parallel_size", "pipeline_parallel_size"
"""Those by which vLLM divides the model among ranks."""
_BACKENDS = "mp", "uni"
"""Those of `distributed_executor_backend` whose ranks are processes below the worker, which their keeper ends."""

_HOST_SHARE = 0.2
"""The share of a CPU's host that vLLM takes unless told otherwise, as the torch engine does."""
_ANY_BYTES = 1 << 30
"""Stands for the bytes of the KV cache where the number of blocks decides: vLLM does not measure then."""

_LONG_SPINS = "300000"
"""What libgomp itself takes for GOMP_SPINCOUNT where nobody has said anything."""
_GPUS = "CUDA_VISIBLE_DEVICES"
_WARM_LENGTHS = (16, 64, 256)


def engine_arguments(config: EngineConfig, given: Mapping[str, str]) -> dict[str, Any]:
    """Returns the arguments of vLLM's AsyncEngineArgs. `given` are those of --engine-arg: words, or JSON.

    Raises ConfigError for one that a worker does not take.
    """
    for name in given:
        if (flag := OURS.get(name)) is not None:
            raise ConfigError(f"--engine-arg: {name} is set by {flag}")
        if why := next((why for pattern, why in REFUSED.items() if fnmatchcase(name, pattern)), ""):
            raise ConfigError(f"--engine-arg: {name} is not for a worker to take: {why}")
    if _value(backend := given.get("distributed_executor_backend", _BACKENDS[0])) not in _BACKENDS:
        raise ConfigError(
            f"--engine-arg: distributed_executor_backend={printable(backend)} is not for a worker to take: its ranks "
            f"share memory with the worker and end with it, as those of {' and '.join(_BACKENDS)} do"
        )
    for name in _SIZES:
        if type(size := _value(given.get(name, "1"))) is not int or size < 1:
            raise ConfigError(f"--engine-arg: {name}={printable(given[name])} must be a positive number")
    chosen = {
        "block_size": config.block_size or None,
        "num_gpu_blocks_override": None if config.num_blocks is None else config.num_blocks + 1,  # one is vLLM's own
        "max_model_len": config.max_model_len,
        "gpu_memory_utilization": config.memory_utilization or (_HOST_SHARE if config.device == "cpu" else None),
        "kv_cache_memory_bytes": None if config.num_blocks is None else _ANY_BYTES,
    }
    return {
        "model": config.model_path,
        "dtype": config.dtype,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": config.max_num_batched_tokens,
        "async_scheduling": False,
        "enable_prefix_caching": True,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        **{name: value for name, value in chosen.items() if value is not None},
        **{name: _value(text) for name, text in given.items()},
    }


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def warm_lengths(config: EngineConfig) -> list[int]:
    """Returns the lengths of the prompts that are measured at the start, the shortest first."""
    most = min(config.max_num_batched_tokens, (config.max_model_len or 1 << 20) // 2)
    return [length for length in _WARM_LENGTHS if length <= most] or [1]


def engine_environment(
    environment: Mapping[str, str], config: EngineConfig, cores: Sequence[int], num_ranks: int = 1
) -> dict[str, str]:
    """Returns the environment of vLLM's processes: this one's without what is Baton's, since vLLM needs no token and no
    address of it. Of several GPUs they see the one that the configuration names, or all if it names none. `cores` are
    the processor's that they may use.

    Raises ConfigError if they may not see that one.
    """
    kept = {
        name: value for name, value in environment.items() if not name.startswith(("BATON_", "OTEL_", "PYTHON", "AWS_"))
    }
    chosen = {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the runner whose logits processors `inside.sampling` is one of
        "VLLM_LOGGING_LEVEL": kept.get("VLLM_LOGGING_LEVEL", "WARNING"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
    }
    if config.device == "cpu":
        chosen |= _threads(config.threads or max(1, len(cores) // num_ranks), cores, num_ranks)
    if number := config.device.partition(":")[2]:
        chosen[_GPUS] = _gpu(number, kept.get(_GPUS))
    return {**kept, **chosen}


def _threads(each: int, cores: Sequence[int], num_ranks: int) -> dict[str, str]:
    """Returns where the threads of each rank run: each on a core of its own if there is exactly one for each, which
    halves the time of a prompt where others want the processor too; else wherever there is room."""
    unbound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(each)}
    if num_ranks == 1:  # vLLM's scheduler computes; by itself it would start a process for that, and wait for it busily
        return {**unbound, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # not bound by vLLM: see `core_environment`
    if each * num_ranks != len(cores):
        return unbound
    parts = [cores[at : at + each] for at in range(0, len(cores), each)]
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(",".join(map(str, part)) for part in parts)}


def core_environment(
    config: EngineConfig, cores: Sequence[int], num_ranks: int = 1, *, own_cores: bool
) -> dict[str, str]:
    """Returns what of the environment is for vLLM's scheduler and what it starts, not for the process above it: a
    thread on each core, where the scheduler computes with all of them. With `own_cores`, which no other worker uses,
    they spin as long as libgomp has them do by default: one that sleeps as soon as another process has held up its
    neighbour is woken for every layer."""
    if config.device != "cpu" or num_ranks > 1 or (config.threads or len(cores)) != len(cores):
        return {}
    bound = {"OMP_PLACES": ",".join(f"{{{core}}}" for core in cores), "OMP_PROC_BIND": "true"}
    return bound | ({"GOMP_SPINCOUNT": _LONG_SPINS} if own_cores else {})


def num_ranks_of(arguments: Mapping[str, Any]) -> int:
    """Returns among how many processes vLLM divides the model."""
    return math.prod(arguments.get(name, 1) for name in _SIZES)


def _gpu(number: str, visible: str | None) -> str:
    """Returns CUDA's name of the GPU of this number among those that `visible` lists; by default all are."""
    if visible is None:
        return number
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if int(number) >= len(names):
        raise ConfigError(f"--device: cuda:{number} is none of the {len(names)} GPUs of {_GPUS}={visible}")
    return names[int(number)]
