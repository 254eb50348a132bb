"""Checks whether the engine that flags ask for is here and can do what they say, and decides its types.

Owns: what vLLM cannot do behind a worker, each refused by its flag's name before anything is downloaded or loaded.
Never: how torch's types are chosen (`dtype_choice`), or where vLLM is found (`services.vllm.environment`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

from services.cli.dtype_choice import Choice, choose_dtype, saved_dtype
from services.cli.worker_packages import demand_numpy, demand_torch
from services.core.config import DTYPES, demand_kv_dtype
from services.core.errors import ConfigError
from services.core.printable import printable
from services.engine.config import EngineConfig
from services.vllm.arguments import engine_arguments, num_ranks_of
from services.vllm.environment import vllm_python
from services.worker.engine_choice import VLLM


class EngineFlags(Protocol):
    """Has the flags that matter here; those of a worker and those of `baton up` do."""

    @property
    def engine(self) -> str: ...
    @property
    def vllm_python(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def kv_dtype(self) -> str: ...
    @property
    def quantization(self) -> str: ...

    def engine_arguments(self) -> dict[str, str]: ...


def demand_engine(flags: EngineFlags) -> str:
    """Returns the Python that has vLLM, or an empty string for another engine. Raises ConfigError if a flag asks for
    what the engine does not do, and BatonError if it is not installed; both say what to do."""
    flags.engine_arguments()
    if flags.engine != VLLM:
        demand_torch("a worker")
        demand_kv_dtype(flags.kv_dtype, flags.device)
        return ""
    if flags.quantization not in ("auto", "none"):
        raise ConfigError(
            f"--quantization: {flags.quantization} is for --engine torch; vLLM takes weights as the checkpoint has "
            "them: give auto or none"
        )
    _demand_kv_dtype(flags.kv_dtype, DTYPES if flags.dtype == "auto" else ("auto", flags.dtype))
    if Path(flags.model).expanduser().is_file():
        raise ConfigError(
            f"--model: {printable(flags.model)} is a GGUF file, which is for --engine torch; give vLLM a directory or "
            "a hub id"
        )
    _arguments(flags)
    demand_numpy("a worker with --engine vllm")
    return str(vllm_python(flags.vllm_python))


def demand_one_gpu_each(flags: EngineFlags) -> None:
    """Raises ConfigError if the engines of a local cluster want several GPUs each: it gives each worker one."""
    num_gpus = num_ranks_of(_arguments(flags))
    if num_gpus > 1 and flags.device != "cpu":
        raise ConfigError(
            f"--engine-arg: vLLM takes {num_gpus} GPUs, and baton up gives each worker one; start the workers by "
            "baton prefill and baton decode, each with its GPUs in CUDA_VISIBLE_DEVICES"
        )


def _arguments(flags: EngineFlags) -> dict[str, Any]:
    return engine_arguments(EngineConfig(flags.model, "", device=flags.device), flags.engine_arguments())


def choose_types(flags: EngineFlags, model: Path) -> Choice:
    """Returns what `--dtype` and `--quantization` mean for the model in this directory. vLLM gets the type the model
    was saved in: the rule of `choose_dtype` is for the torch engine. Raises ConfigError."""
    if flags.engine != VLLM:
        return choose_dtype(flags.dtype, flags.device, model, flags.quantization)
    dtype, reason = flags.dtype, ""
    if dtype == "auto" and (saved := saved_dtype(model)) in DTYPES:
        dtype, reason = saved, "as saved"
    _demand_kv_dtype(flags.kv_dtype, ("auto", dtype))
    return Choice(dtype, reason)


def _demand_kv_dtype(kv_dtype: str, possible: tuple[str, ...]) -> None:
    if kv_dtype not in possible:
        raise ConfigError(
            f"--kv-dtype: {kv_dtype} is for --engine torch; vLLM keeps KV in the type of --dtype here: give auto"
        )
