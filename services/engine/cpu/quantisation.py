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

from services.core.config import KEPT_BLOCKS_FILE
from services.core.errors import ConfigError, UnsupportedModel
from services.engine.cpu.quantised_linear import QuantisedLinear
from services.engine.model import kept_blocks
from services.engine.model.grouped_weights import GroupedWeights, round_weights
from services.engine.native.bindings import kernels

logger = logging.getLogger(__name__)

_BITS = {"int8": 8, "int4": 4}


@torch.inference_mode()
def quantise(model: PreTrainedModel, quantization: str, directory: Path) -> str:
    """Replaces the linear layers of the model as `quantization` says, and returns the scheme in words for its
    fingerprint: empty if weights stay as they were loaded.

    Raises ConfigError if the model is not on a CPU, and UnsupportedModel if the blocks kept of a GGUF file are not
    those of the weights.
    """
    bits, on_cpu = _BITS.get(quantization), model.device.type == "cpu"
    if bits is not None:
        if not on_cpu:
            raise ConfigError(f"--quantization: {quantization} works on a CPU only, and the device is {model.device}")
        if kernels() is None:
            logger.warning("without the CPU kernels, which were not built, %s is slower than none", quantization)
        _replace(model, ((name, round_weights(_matrix(layer), bits)) for name, layer in _linears(model)))
        return f"{quantization} (groups of 32)"
    if quantization != "gguf":
        return ""
    if not on_cpu:
        raise ConfigError(f"--quantization: gguf works on a CPU only, and the device is {model.device}")
    if kernels() is None:
        logger.warning("without the CPU kernels, which were not built, gguf is slower than none")
    kinds: set[str] = set()
    _replace(model, _as_kept(model, directory, kinds))
    if not kinds:
        raise ConfigError(f"--quantization: {directory} has no weights of a GGUF file; give none, int8 or int4")
    return f"GGUF {' '.join(sorted(kinds))}"


@torch.inference_mode()
def quantise_alike(model: PreTrainedModel, directory: Path) -> None:
    """Replaces the linear layers of a model of other weights for a timing: by the weights kept in the directory where
    names and shapes are the same, else by such of 4 bits."""
    kept = {name: weights for name, _, weights in kept_blocks.read(directory)}

    def weights_of(name: str, layer: nn.Module) -> GroupedWeights:
        matrix, found = _matrix(layer), kept.get(name)
        if found is not None and (found.out_features, found.in_features) == tuple(matrix.shape):
            return found
        return round_weights(matrix, 4)

    _replace(model, ((name, weights_of(name, layer)) for name, layer in _linears(model)))


def num_weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of all weights, quantised ones included."""
    quantised = sum(each.nbytes for each in model.modules() if isinstance(each, QuantisedLinear))
    return quantised + sum(parameter.nbytes for parameter in model.parameters())


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields names and layers; a snapshot, so that they can be replaced meanwhile."""
    yield from [(name, each) for name, each in model.named_modules() if type(each) in (nn.Linear, Conv1D)]


def _matrix(layer: nn.Module) -> Tensor:
    """Returns the weight as [out_features, in_features]; GPT-2's layers have it the other way round."""
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


def _replace(model: nn.Module, layers: Iterator[tuple[str, GroupedWeights]]) -> None:
    """Replaces each layer as soon as its weights are there, so that those as they were loaded are freed one by one."""
    count = 0
    for name, weights in layers:
        old = model.get_submodule(name)
        new = QuantisedLinear(weights, getattr(old, "bias", None), old.get_parameter("weight"))
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, new)
        count += 1
    logger.info("%d linear layers are quantised", count)
