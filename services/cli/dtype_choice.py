"""Decides what `--dtype auto` and `--quantization auto` mean: a rule by what the model's files hold and by the
instructions of this CPU, so that like hosts choose alike.

Owns: the rule. It follows from timings of each way on CPUs limited to each instruction set
(benchmarks/results/2026-11-28-dtype.json). Never: choices for accelerators, which compute in the saved type.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import pathlib

from services.core.config import KEPT_BLOCKS_FILE, KEPT_WEIGHTS
from services.core.errors import ConfigError
from services.engine.native import instruction_sets

logger = logging.getLogger(__name__)

_SAVED_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
_MAX_HEADER_BYTES = 100_000_000
"""The longest header that the safetensors format allows."""
_CHOOSABLE = ("bfloat16", "float16")
_IN_WORDS = {"gguf": "the GGUF file's weights", "gptq": "the GPTQ weights", "awq": "the AWQ weights"}


@dataclasses.dataclass(frozen=True)
class Choice:
    dtype: str
    """The value for the flag --dtype: a type's name, or "auto", which the engine takes as "as saved"."""
    reason: str
    """The reason, for people, without a line break. Empty if there was nothing to choose."""
    quantization: str = "none"
    """The value for the flag --quantization, but never "auto"."""


def choose_dtype(dtype: str, device: str, model: pathlib.Path, quantization: str = "auto") -> Choice:
    """Returns the type and the bits of weights for `--dtype dtype --quantization quantization`.

    With an explicit type, "auto" bits are those that the model was saved in; with none, weights of few bits stay as the
    files have them where the kernels are built, without which they are slow. Raises ConfigError if weights are to be
    kept that the model does not have, or on an accelerator, or if `BATON_CPU_ISA` makes no sense.
    """
    explicit = "none" if quantization == "auto" else quantization
    _demand_quantization(explicit, device, model)
    sets = instruction_sets.usable()
    saved = saved_dtype(model)
    if dtype != "auto" or device.partition(":")[0] != "cpu" or saved not in _CHOOSABLE:
        return Choice(dtype, "", explicit)
    best, are_built = sets[0].name, any(each.shared_object.exists() for each in sets)
    kept = kept_weights(model) if quantization == "auto" and are_built else ""
    over = f"; over {_IN_WORDS[kept]}" if kept else ""
    quantization = kept or explicit
    # Products over weights of few bits are of integers, whatever the activations' type is.
    has_few_bits = are_built and quantization != "none"
    if saved == "bfloat16" and (has_few_bits or instruction_sets.multiplies_bfloat16()):
        return Choice(saved, f"as saved{over}, fast on this {best} CPU", quantization)
    return Choice("float32", f"faster on this {best} CPU than {saved} as saved{over}", quantization)


def _demand_quantization(quantization: str, device: str, model: pathlib.Path) -> None:
    if quantization == "none":
        return
    if device.partition(":")[0] != "cpu":
        raise ConfigError(
            f"--quantization: {quantization} works only on a CPU; give none or auto for --device {device}"
        )
    has = kept_weights(model)
    if quantization in KEPT_WEIGHTS and quantization != has:
        others = f"auto, none, {has}, int8 or int4" if has else "auto, none, int8 or int4"
        raise ConfigError(f"--quantization: {model} has no {quantization} weights; give {others}")


def kept_weights(model: pathlib.Path) -> str:
    """Returns which of `KEPT_WEIGHTS` the model has, or ""."""
    if (model / KEPT_BLOCKS_FILE).is_file():
        return "gguf"
    try:
        fields = json.loads((model / "config.json").read_text()).get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""  # the engine says what is wrong
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    return method if method in ("gptq", "awq") else ""


def saved_dtype(model: pathlib.Path) -> str:
    """Returns the type that config.json names, else that of the first weights; "" if neither is known."""
    try:
        config = json.loads((model / "config.json").read_text())
        for part in (config, config.get("text_config") or {}):
            if isinstance(name := part.get("dtype") or part.get("torch_dtype"), str):
                return name.removeprefix("torch.")
        for path in sorted(each for each in model.glob("*.safetensors") if each.is_file()):
            with open(path, "rb") as file:
                header = json.loads(file.read(min(int.from_bytes(file.read(8), "little"), _MAX_HEADER_BYTES)))
            for name, tensor in header.items():
                if name != "__metadata__" and tensor["dtype"] in _SAVED_NAMES:
                    return _SAVED_NAMES[tensor["dtype"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        logger.info("%s does not say in which type it was saved: %s", model, error)
    return ""
