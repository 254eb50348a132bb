"""Describes in a few digests what a loaded model computes, so that workers of different models never share KV.

The reasons are in ADR 0007. Owns: which parts of a model count. Never: how this worker computes it (kernels, threads,
replaced modules); the digests are taken of the model as it was loaded, with BLAKE2b (RFC 7693).
"""

from __future__ import annotations

import hashlib
import itertools
import json
import struct
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

_WHOLE_BYTES = 1 << 20
"""Bytes up to which a tensor is read whole: norms, biases, tables of frequencies. Of a larger one only `_SAMPLES`
elements are read, because a checkpoint of 100 GB would take minutes. Checkpoints of different training differ in nearly
all elements of a matrix, so the samples show it."""
_SAMPLES = 4096
"""Evenly spaced elements that are read of a large tensor."""
_LARGEST_FLOAT32 = 3.4e38
"""Magnitude below which a number is rounded to float32 in the digest; larger ones do not fit that type."""
_PACKING_VERSION = 1
"""The version of the ways in which weights are rounded to fewer bits. Increase it when one gives other values."""

IRRELEVANT = frozenset(
    {
        # The model's origin, and the release that wrote the file.
        "_name_or_path",
        "_commit_hash",
        "transformers_version",
        "architectures",
        "auto_map",
        "tokenizer_class",
        # The type the model was saved in. The type it runs in is part of the layout.
        "dtype",
        "torch_dtype",
        # The implementation of attention and of experts.
        "attn_implementation",
        "_attn_implementation",
        "_experts_implementation",
        # What a call of the model returns.
        "return_dict",
        "output_hidden_states",
        "output_attentions",
        "use_cache",
        # Training.
        "initializer_range",
        "attention_dropout",
        "hidden_dropout",
        "resid_pdrop",
        "embd_pdrop",
        "attn_pdrop",
        # Classifiers.
        "id2label",
        "label2id",
        "num_labels",
        "problem_type",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        # Prompts come as token ids, and the ids that end a sequence enter the digest on their own.
        "bos_token_id",
        "pad_token_id",
        "eos_token_id",
    }
)
"""Fields of a configuration that are known to change nothing that a worker computes. All others count, unknown ones
too: two workers that could pair and do not cost a prefill, but two that pair and should not give wrong answers."""


def weights_digest(model: nn.Module) -> str:
    """Returns the digest, 32 hex digits, of names, shapes, dtypes and values of all parameters and buffers, persistent
    or not. Of large tensors only some values count."""
    digest = hashlib.blake2b(digest_size=16)
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    for name, tensor in sorted(named, key=lambda pair: pair[0]):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(_sampled_bytes(tensor.detach()))
    return digest.hexdigest()


def config_digest(config: PreTrainedConfig, eos_token_ids: Collection[int]) -> str:
    """Returns the digest, 32 hex digits, of the configuration in force (defaults filled in, without the `IRRELEVANT`
    fields) and of the ids that end a sequence, whichever file those are from."""
    described = {"config": _described(config), "eos_token_ids": sorted(set(eos_token_ids))}
    return hashlib.blake2b(json.dumps(described, sort_keys=True, default=str).encode(), digest_size=16).hexdigest()


def numerics(model: PreTrainedModel, scheme: str = "") -> str:
    """Returns the types of weights and activations in words, such as "bfloat16 weights, bfloat16 activations".

    scheme: the way in which weights were packed into fewer bits. Without one they are used in the type they were loaded
    in.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    if scheme:
        return f"{scheme} weights, {dtype} activations rounded to 8 bits"
    return f"{dtype} weights, {dtype} activations"


def quantised_digest(loaded: str, scheme: str) -> str:
    """Returns the digest of weights that were packed by a scheme from those with the digest `loaded`; the same one if
    there is no scheme. A packed weight follows from the scheme and from the weight as it was loaded."""
    if not scheme:
        return loaded
    return hashlib.blake2b(f"{loaded} {_PACKING_VERSION} {scheme}".encode(), digest_size=16).hexdigest()


def _described(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns the fields that count, with those of configurations inside this one."""
    fields = config.to_dict()
    for name in config.sub_configs:
        if isinstance(sub_config := getattr(config, name, None), PreTrainedConfig):
            fields[name] = _described(sub_config)
    return {name: _canonical(value) for name, value in fields.items() if name not in IRRELEVANT}


def _canonical(value: Any) -> Any:
    """Returns the value in a form that is the same for values that mean the same.

    One file has 10000 where another has 10000.0, and GGUF keeps numbers as float32, which is as exact as a model
    computes.
    """
    match value:
        case float() if value.is_integer():
            return int(value)
        case float() if abs(value) < _LARGEST_FLOAT32:
            return struct.unpack("f", struct.pack("f", value))[0]
        case dict():
            return {str(name): _canonical(part) for name, part in value.items()}
        case list() | tuple():
            return [_canonical(part) for part in value]
        case _:
            return value


def _sampled_bytes(tensor: Tensor) -> bytes:
    """Returns the bytes of all elements, or of evenly spaced ones if the tensor is large."""
    flat = tensor.flatten()
    if tensor.nbytes > _WHOLE_BYTES:
        index = torch.linspace(0, len(flat) - 1, _SAMPLES, dtype=torch.float64).long()
        flat = flat[index.to(flat.device)]
    data: bytes = flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()
    return data
