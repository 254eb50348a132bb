"""Decides in how many bits the weights of a model are kept, and replaces its linear layers accordingly.

Embeddings stay as they are; an output layer that shares its weights with them gets a quantised copy for its product.
Owns: what each value of `--quantization` does. Never: how weights are rounded (`model.grouped_weights`), or how
products are computed (`quantised_linear`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from services.core.config import KEPT_BLOCKS_FILE, KEPT_WEIGHTS
from services.core.errors import ConfigError, UnsupportedModel
from services.engine.cpu.quantised_linear import QuantisedLinear
from services.engine.model import kept_blocks
from services.engine.model.gptq_awq import METHODS, SavedLinear
from services.engine.model.grouped_weights import GroupedWeights, round_weights
from services.engine.native.bindings import kernels

logger = logging.getLogger(__name__)

_BITS = {"int8": 8, "int4": 4}
_LINEARS = (nn.Linear, Conv1D, SavedLinear)
_NAMES = {"gguf": "a GGUF file", **METHODS}


@torch.inference_mode()
def quantise(model: PreTrainedModel, quantization: str, directory: Path) -> str:
    """Replaces the linear layers of the model as `quantization` says, and returns the scheme in words for its
    fingerprint: empty if weights are used in the type that the model was loaded in.

    Raises ConfigError if the model is not on a CPU, or has no weights of the kind to be kept, and UnsupportedModel if
    the blocks kept of a GGUF file are not those of the weights.
    """
    if quantization not in _BITS and quantization not in KEPT_WEIGHTS:
        _dequantise(model)
        return ""
    if model.device.type != "cpu":
        raise ConfigError(
            f"--quantization: {quantization} works on a CPU only, and the device is {model.device}; give none"
        )
    if kernels() is None:
        logger.warning("without the CPU kernels, which were not built, %s is slower than none", quantization)
    if bits := _BITS.get(quantization):
        _replace(model, ((name, round_weights(_matrix(layer), bits)) for name, layer in _linears(model)))
        return f"{quantization} (groups of 32)"
    kinds: set[str] = set()
    if quantization == "gguf":
        _replace(model, _as_kept(model, directory, kinds))
    else:
        _replace(model, _as_saved(model, quantization, kinds))
        _dequantise(model)
    if not kinds:
        raise ConfigError(
            f"--quantization: {directory} has no weights of {_NAMES[quantization]}; give none, int8 or int4"
        )
    return f"GGUF {' '.join(sorted(kinds))}" if quantization == "gguf" else " ".join(kinds)


def num_weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights, quantised ones included."""
    quantised = sum(each.nbytes for each in model.modules() if isinstance(each, QuantisedLinear))
    return quantised + sum(parameter.nbytes for parameter in model.parameters())


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and layers; a snapshot, so that they can be replaced meanwhile."""
    yield from [(name, each) for name, each in model.named_modules() if type(each) in _LINEARS]


def _matrix(layer: nn.Module) -> Tensor:
    """Returns the weight as [out_features, in_features]; GPT-2's layers have it the other way round."""
    if isinstance(layer, SavedLinear):
        return layer.dequantised()
    weight = layer.get_parameter("weight")
    return weight.T.contiguous() if isinstance(layer, Conv1D) else weight


def _as_kept(model: nn.Module, directory: Path, kinds: set[str]) -> Iterator[tuple[str, GroupedWeights]]:
    """Yields the layers whose blocks were kept, and adds their types to `kinds`."""
    layers = dict(_linears(model))
    for name, kind, weights in kept_blocks.read(directory):
        # Converted weights are the dequantised ones in bfloat16, so this is exact.
        layer = layers.get(name)
        if layer is None or not torch.equal(weights.dequantised().bfloat16(), _matrix(layer).bfloat16()):
            raise UnsupportedModel(
                f"{directory / KEPT_BLOCKS_FILE} is not of these weights ({name}): convert the file again, or give "
                "--quantization none"
            )
        kinds.add(kind)
        yield name, weights


def _as_saved(model: nn.Module, method: str, kinds: set[str]) -> Iterator[tuple[str, GroupedWeights]]:
    """Yields the layers of a GPTQ or AWQ checkpoint whose numbers can be kept, and adds their scheme to `kinds`."""
    for name, layer in _linears(model):
        if not isinstance(layer, SavedLinear) or layer.packing.method != method:
            continue
        kinds.add(layer.packing.scheme)
        if (weights := layer.grouped()) is not None:
            yield name, weights


def _dequantise(model: PreTrainedModel) -> None:
    """Replaces the layers of a GPTQ or AWQ checkpoint that are left by plain ones of the model's type."""
    names = [name for name, layer in _linears(model) if isinstance(layer, SavedLinear)]
    for name in names:
        old = model.get_submodule(name)
        weight = _matrix(old).to(model.dtype)
        new = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        new.weight = nn.Parameter(weight, requires_grad=False)
        new.bias = old.bias
        _put(model, name, new)
    if names:
        logger.info("%d linear layers are dequantised", len(names))


def _replace(model: PreTrainedModel, layers: Iterator[tuple[str, GroupedWeights]]) -> None:
    """Replaces each layer as soon as its weights are there, so that those as they were loaded are freed one by one."""
    count, like = 0, torch.empty(0, dtype=model.dtype)
    for name, weights in layers:
        old = model.get_submodule(name)
        given = like if isinstance(old, SavedLinear) else old.get_parameter("weight")
        _put(model, name, QuantisedLinear(weights, getattr(old, "bias", None), given))
        count += 1
    logger.info("%d linear layers are quantised", count)


def _put(model: nn.Module, name: str, layer: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, layer)
