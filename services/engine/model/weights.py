"""Loads a model's weights from a directory in the layout that transformers' `save_pretrained` writes.

Owns: which files are trusted (safetensors only, and no code of the model's own). Never: where directories come from
(the command line resolves names), or whether the model can be served (`servable`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from services.core.errors import UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Types in which a model can be served, by the names that flags and layouts use."""
KV_DTYPES = {**DTYPES, "int8": torch.int8}
"""Types in which keys and values can be kept, by the same names."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
KV_DTYPE_NAMES = {dtype: name for name, dtype in KV_DTYPES.items()}


def load_model(directory: Path, dtype: str, device: torch.device, attention: str) -> PreTrainedModel:
    """Returns the model on the device, in evaluation mode and without gradients.

    dtype: a name in `DTYPES`, or "auto" for the type the model was saved in. attention: a name that is registered with
    transformers' AttentionInterface. Raises UnsupportedModel if transformers cannot load the model, if its weights are
    not safetensors, or if they are of no type in `DTYPES`.
    """
    disable_progress_bar()  # progress bars would break up the log
    if not any(directory.glob("*.safetensors")) and (pickles := sorted(directory.glob("*.bin"))):
        raise UnsupportedModel(
            f"{directory} has its weights only as {pickles[0].name}: a pickle may run code when it is read; "
            "only safetensors are loaded"
        )
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES.get(dtype, "auto"),
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
        )
    except SafetensorError as error:
        raise UnsupportedModel(f"{directory} has damaged weights, fetch them again: {error}") from error
    except (ValueError, KeyError, TypeError, ImportError, OSError) as error:
        if error.args == (attention,):
            raise UnsupportedModel(f"{directory} does not support transformers' attention interface") from error
        raise UnsupportedModel(f"{directory} cannot be loaded: {error}") from error
    if model.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(f"{directory} has weights of {model.dtype}; give --dtype")
    return model.to(device).eval().requires_grad_(False)
