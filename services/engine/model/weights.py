"""Loads a model's weights from its directory, as `save_pretrained` writes one.

Never: where directories come from (the command line resolves names), or whether the model can be served (`servable`).
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from services.core.errors import UnsupportedModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def load_model(directory: Path, dtype: str, device: torch.device, attention: str) -> PreTrainedModel:
    """Returns the model on the device, ready to run. Raises UnsupportedModel, also if the weights are not safetensors.

    dtype: "auto" is the type the model was saved in. attention: a name registered with the AttentionInterface.
    """
    disable_progress_bar()  # a service writes log lines, not progress bars
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
    except (ValueError, KeyError, TypeError, ImportError, OSError) as error:
        if error.args == (attention,):
            raise UnsupportedModel(f"{directory} does not support transformers' attention interface") from error
        raise UnsupportedModel(f"{directory} cannot be loaded: {error}") from error
    if model.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(f"{directory} has weights of {model.dtype}; give --dtype")
    return model.to(device).eval().requires_grad_(False)
