"""Where a model's files are, and loading them.

A model is a directory as `save_pretrained` writes it: config.json, safetensors, tokenizer.json. GGUF files are
converted into one, once; hub ids are downloaded into the hub's own cache. Never: whether the model can be served
(`servable`).
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoModelForCausalLM, PreTrainedModel

from services.core.errors import ConfigError, UnsupportedModel
from services.engine.gguf_conversion import convert_gguf

logger = logging.getLogger(__name__)

_HUB_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


def resolve_model(model: str, cache: Path) -> Path:
    """The directory of a model given as directory, GGUF file or hub id. Raises ConfigError, UnsupportedModel.

    A GGUF file is converted into a directory under `cache`, named after its name, size and time of change.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model: {path} has no config.json")
        return path
    if path.is_file():
        if path.suffix != ".gguf":
            raise ConfigError(f"--model: {path} is neither a model directory nor a GGUF file")
        stat = path.stat()
        directory = cache / f"{path.stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}"
        convert_gguf(path, directory)
        return directory
    if path.is_absolute() or model.startswith((".", "~")):
        raise ConfigError(f"--model: {path} does not exist")
    try:
        return Path(snapshot_download(model, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--model: {model!r} is not a file here and cannot be had from the hub: {reason}") from error


def load_model(directory: Path, dtype: str, device: torch.device, attention: str) -> PreTrainedModel:
    """The weights on the device, ready to run. Raises UnsupportedModel.

    dtype: "auto" takes the one the model was saved in. attention: a name registered with the AttentionInterface.
    """
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=DTYPES.get(dtype, "auto"),
            attn_implementation=attention,
            local_files_only=True,
            trust_remote_code=False,
        )
    except (ValueError, KeyError, TypeError, ImportError, OSError) as error:
        raise UnsupportedModel(f"{directory} cannot be loaded: {error}") from error
    if model.dtype not in DTYPE_NAMES:
        raise UnsupportedModel(f"{directory} has weights of {model.dtype}; give --dtype")
    return model.to(device).eval().requires_grad_(False)
