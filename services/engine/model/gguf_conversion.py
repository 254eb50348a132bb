"""Converts a GGUF file to a model directory with transformers.

Owns: the corrections of what that conversion leaves out or gets wrong: end-of-sequence ids, chat template, digit
splitting, and weights that are missing. Never: the file format itself, which the package `gguf` of llama.cpp reads.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from tokenizers.pre_tokenizers import ByteLevel, Digits
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

from services.core.errors import UnsupportedModel
from services.engine.model import kept_blocks

_END_OF_TEXT = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")


def convert_gguf(path: Path, directory: Path) -> None:
    """Writes the dequantised model in bfloat16, with its tokenizer, to a new `directory`.

    The quantised weights of linear layers are written beside it as they are in the file. The
    directory appears complete or not at all, and an existing one is left as it is, so several processes may do this at
    once. Raises UnsupportedModel if the file cannot be read or converted.
    """
    if directory.exists():
        return
    try:
        metadata = _metadata(path)
    except (ValueError, LookupError, OSError) as error:
        raise UnsupportedModel(f"{path} is damaged or incomplete, fetch it again: {error}") from error
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=f".{directory.name}-") as scratch:
        partial = Path(scratch) / "model"
        try:
            _write(path, metadata, partial)
        except (ValueError, KeyError, NotImplementedError, OSError) as error:
            raise UnsupportedModel(f"{path} cannot be converted: {error}") from error
        try:
            partial.rename(directory)
        except OSError:
            if not directory.exists():  # if it exists, another process has written it meanwhile
                raise


def _write(path: Path, metadata: dict[str, Any], directory: Path) -> None:
    folder, name = str(path.parent), path.name
    model, found = AutoModelForCausalLM.from_pretrained(
        folder,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        output_loading_info=True,
    )
    if missing := sorted(found["missing_keys"]):  # transformers has filled in random ones
        raise ValueError(f"it lacks {len(missing)} of the model's weights, such as {missing[0]}")
    with contextlib.suppress(AttributeError):  # the saved weights are not quantised any more
        del model.config.quantization_config
    model.generation_config = GenerationConfig(
        bos_token_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_id=[metadata[key] for key in _END_OF_TEXT if key in metadata],
        pad_token_id=metadata.get("tokenizer.ggml.padding_token_id"),
    )
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    if metadata.get("tokenizer.ggml.pre") == "smollm":
        # This pre-tokenizer splits off single digits before it applies the byte-level pattern; the one that the
        # conversion makes does not.
        split = PreTokenizers([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
        tokenizer.backend_tokenizer.pre_tokenizer = split
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory, save_jinja_files=False)
    kept_blocks.write(model, path, directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors makes its files readable by their owner only


def _metadata(path: Path) -> dict[str, Any]:
    """Returns the scalar fields of the file's header. It raises errors of several kinds if the file ends too early."""
    fields = GGUFReader(path).fields.values()
    return {field.name: field.contents() for field in fields if len(field.types) == 1}
