"""Loads a model's weights from a directory in the layout that transformers' `save_pretrained` writes.

Owns: which files are trusted (safetensors only, and no code of the model's own), and that none of the model's weights
is missing. Never: where directories come from (the command line resolves names), or whether the model can be served
(`servable`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING
from transformers.utils.logging import disable_progress_bar

from services.core.errors import UnsupportedModel
from services.core.printable import printable
from services.engine.model.gptq_awq_loading import saved_layers

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types in which a model can be served, by the names that flags and layouts use."""
KV_DTYPES = {**DTYPES, "int8": torch.int8}
"""Types in which keys and values can be kept, by the same names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KV_DTYPE_NAMES = {dtype: name for name, dtype in KV_DTYPES.items()}

_MAX_REASON = 500
"""Characters of another library's message that are shown."""
_INSTEAD = "take it in 16 bits, as GPTQ or AWQ, or as a GGUF file"


def kv_dtype_of(name: str, activations: torch.dtype) -> torch.dtype:
    """Returns the type that `--kv-dtype name` means in a model with these activations: "auto" is theirs."""
    return activations if name == "auto" else KV_DTYPES[name]


def load_model(directory: Path, dtype: str, device: torch.device, attention: str) -> PreTrainedModel:
    """Returns the model on the device, in evaluation mode and without gradients. Linear layers that GPTQ or AWQ has
    quantised are `SavedLinear`s in it.

    dtype: a name in `DTYPES`, or "auto" for the type the model was saved in. attention: a name that is registered with
    transformers' AttentionInterface. Raises UnsupportedModel if transformers cannot load the model, if its weights are
    not safetensors or not complete, or if they are of no type in `DTYPES`.
    """
    disable_progress_bar()  # progress bars would break up the log
    if not any(directory.glob("*.safetensors")) and (pickles := sorted(directory.glob("*.bin"))):
        raise UnsupportedModel(
            f"{directory} has its weights only as {pickles[0].name}: a pickle may run code when it is read; "
            "only safetensors are loaded"
        )
    quantised_by = ""
    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        quantised_by = _quantised_by(config)
        if getattr(config, "transformers_weights", None):
            raise UnsupportedModel("its config.json names files of weights (transformers_weights): name them as usual")
        saved = saved_layers(config, directory)
        if saved is not None:
            saved.announce(config)
        model, found = AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=DTYPES.get(dtype, "auto"),
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # they are refused below, by name
            output_loading_info=True,
        )
        if saved is not None:
            saved.fill(model)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{directory} cannot be loaded: {error}") from error
    except SafetensorError as error:
        raise UnsupportedModel(f"{directory} has damaged weights, fetch them again: {_on_a_line(error)}") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever transformers raises over files that make no sense
        if error.args == (attention,):
            raise UnsupportedModel(f"{directory} does not support transformers' attention interface") from error
        reason = _on_a_line(error)
        if quantised_by:
            raise UnsupportedModel(
                f"{directory} is quantised by {quantised_by}, which cannot be loaded here; {_INSTEAD}: {reason}"
            ) from error
        raise UnsupportedModel(f"{directory} cannot be loaded: {reason}") from error
    _check_complete(directory, found)
    if model.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(f"{directory} has weights of {model.dtype}; give --dtype")
    return model.to(device).eval().requires_grad_(False)


def _on_a_line(error: Exception) -> str:
    return printable(" ".join(str(error).split()))[:_MAX_REASON] or type(error).__name__


def _quantised_by(config: PreTrainedConfig) -> str:
    """Returns the method in which the checkpoint is quantised, or "". Raises UnsupportedModel if transformers does not
    know it, since it would take the weights as if they were not."""
    fields = getattr(config, "quantization_config", None)
    if not fields:
        return ""
    method = fields.get("quant_method") if isinstance(fields, dict) else None
    if isinstance(fields, dict) and (fields.get("load_in_4bit") or fields.get("load_in_8bit")):
        return "bitsandbytes"
    if method not in AUTO_QUANTIZER_MAPPING:
        raise UnsupportedModel(f"it is quantised by {method!r}, which nothing here can read; {_INSTEAD}")
    return str(method)


def _check_complete(directory: Path, found: dict[str, Any]) -> None:
    """Raises UnsupportedModel if a weight is missing or of another shape: transformers has filled in random ones."""
    for name, saved, expected in sorted(found["mismatched_keys"]):
        raise UnsupportedModel(
            f"{directory} has {name} of shape {list(saved)}, and by its config.json it has to be {list(expected)}"
        )
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModel(
            f"{directory} lacks {len(missing)} of the model's weights, such as {missing[0]}: fetch it again"
        )
