"""Has transformers load GPTQ and AWQ checkpoints without the packages that it demands for them.

transformers makes the model and loads what is not quantised, through its interface for quantisers; which linear layers
are quantised is what the files say, and their tensors are read here, as they are.
Owns: which tensors a layer must have, and of which shapes. Never: what the numbers mean (`gptq_awq`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from services.core.errors import UnsupportedModel
from services.engine.model.gptq_awq import METHODS, Packing, SavedLinear, packing_of

_METHOD = "baton-saved-layers"
"""The name under which transformers finds the quantiser below."""
_TENSORS = ("qweight", "qzeros", "scales", "g_idx")
_WORDS, _SCALES = ("I32",), ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Locates a tensor in the checkpoint's files, with its type and shape from the header."""

    file: Path
    dtype: str
    """The type's name in safetensors: "I32", "F16"."""
    shape: tuple[int, ...]


class SavedLayers:
    """Describes the quantised layers of a checkpoint, and puts them into the model."""

    def __init__(self, packing: Packing, tensors: Mapping[str, TensorHeader]) -> None:
        self._packing = packing
        self._tensors = tensors
        names = (name.rpartition(".") for name in self._tensors)
        self.names = frozenset(layer for layer, _, tensor in names if tensor == "qweight")
        """Names of the layers."""
        if not self.names:
            raise UnsupportedModel(f"{METHODS[packing.method]} is named by config.json, but no layer is quantised")

    def announce(self, config: PreTrainedConfig) -> None:
        """Has transformers replace the layers of the model that it makes of this configuration."""
        config.quantization_config = {"quant_method": _METHOD, "layers": self}

    def replace(self, model: nn.Module) -> None:
        """Replaces the layers by `SavedLinear`s that are still empty. The model is on the meta device."""
        for name in sorted(self.names):
            layer = self._empty(name, _linear(model, name))
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)

    def fill(self, model: nn.Module) -> None:
        """Reads the tensors of all layers that were replaced. Raises UnsupportedModel if they do not belong
        together."""
        for name in sorted(self.names):
            layer = model.get_submodule(name)
            assert isinstance(layer, SavedLinear), "the loader has replaced it"
            self._fill(name, layer)

    def read(self, name: str, like: nn.Linear | Conv1D) -> SavedLinear:
        """Returns one of the layers for the place of a plain one, without its bias. Raises as `fill` does."""
        found = self._empty(name, like)
        found.bias = None
        self._fill(name, found)
        return found

    def _empty(self, name: str, old: nn.Linear | Conv1D) -> SavedLinear:
        in_features, out_features = _features(old)
        self._check(name, in_features, out_features)
        bias = old.bias if isinstance(old.bias, Tensor) else None
        if bias is None and f"{name}.bias" in self._tensors:  # of GPTQ, whose layers may have one of their own
            bias = torch.empty(out_features, device="meta", dtype=old.weight.dtype)
        return SavedLinear(self._packing, in_features, out_features, bias)

    def _fill(self, name: str, layer: SavedLinear) -> None:
        try:
            layer.fill(dict(self._read(name)))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{name}: {error}") from error

    def _check(self, name: str, in_features: int, out_features: int) -> None:
        """Raises UnsupportedModel if one of the layer's tensors is missing, or is of another type or shape."""
        in_word = 32 // self._packing.bits
        divided = out_features if self._packing.method == "awq" else in_features
        if divided % in_word or out_features % in_word:
            raise UnsupportedModel(f"{name} is {in_features} to {out_features}, which words of {in_word} do not hold")
        for tensor, shape in self._packing.shapes(in_features, out_features).items():
            found = self._tensors.get(f"{name}.{tensor}")
            if found is None:
                if tensor == "g_idx" and not self._packing.needs_order:
                    continue
                raise UnsupportedModel(f"{name}.{tensor} is missing: the files are incomplete, fetch them again")
            allowed = _SCALES if tensor == "scales" else _WORDS
            if found.shape != shape or found.dtype not in allowed:
                raise UnsupportedModel(
                    f"{name}.{tensor} is {found.dtype} {list(found.shape)}, and for {self._packing.scheme} and a layer "
                    f"of {in_features} to {out_features} it has to be {' or '.join(allowed)} {list(shape)}"
                )

    def _read(self, name: str) -> Iterator[tuple[str, Tensor]]:
        for tensor in _TENSORS:
            if (found := self._tensors.get(f"{name}.{tensor}")) is not None:
                with safe_open(found.file, framework="pt") as file:
                    yield tensor, file.get_tensor(f"{name}.{tensor}")


def saved_layers(config: PreTrainedConfig, directory: Path) -> SavedLayers | None:
    """Returns the quantised layers of the checkpoint, or None if it is not one of GPTQ or AWQ. Raises UnsupportedModel
    if it is one that is not read, SafetensorError if a file is damaged, and OSError if one is missing."""
    fields = getattr(config, "quantization_config", None)
    if not isinstance(fields, dict) or fields.get("quant_method") not in tuple(METHODS):  # it may be unhashable
        return None
    return SavedLayers(packing_of(fields), _tensor_headers(directory))


def _tensor_headers(directory: Path) -> dict[str, TensorHeader]:
    """Returns the headers of all tensors by their names, from the files that transformers reads."""
    names, index = ["model.safetensors"], directory / "model.safetensors.index.json"
    if not (directory / names[0]).is_file() and index.is_file():
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    found: dict[str, TensorHeader] = {}
    for path in (directory / name for name in names):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                part = file.get_slice(name)
                found[name] = TensorHeader(path, part.get_dtype(), tuple(part.get_shape()))
    return found


def _linear(model: nn.Module, name: str) -> nn.Linear | Conv1D:
    try:
        found = model.get_submodule(name)
    except AttributeError:
        found = None
    if type(found) is nn.Linear or type(found) is Conv1D:
        return found
    raise UnsupportedModel(f"{name} is quantised in the files, and the model has no linear layer of that name")


def _features(layer: nn.Linear | Conv1D) -> tuple[int, int]:
    """Returns the numbers of inputs and outputs; GPT-2's layers have their weights the other way round."""
    first, second = layer.weight.shape
    return (first, second) if isinstance(layer, Conv1D) else (second, first)


@register_quantization_config(_METHOD)
class _Description(QuantizationConfigMixin):  # type: ignore[misc]
    """Carries the layers to the quantiser."""

    def __init__(self, quant_method: str, layers: SavedLayers) -> None:
        self.quant_method: Any = quant_method
        self.layers = layers
        self.dequantize = True  # the loaded model is not one of transformers' quantised ones


@register_quantizer(_METHOD)
class _Quantiser(HfQuantizer):  # type: ignore[misc]
    """Replaces the layers in the model that transformers makes."""

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> None:
        layers: SavedLayers = self.quantization_config.layers
        layers.replace(model)
        ignored = set(model._keys_to_ignore_on_load_unexpected or ())
        model._keys_to_ignore_on_load_unexpected = ignored | {rf"\.({'|'.join(_TENSORS)})$"}

    def is_serializable(self) -> bool:
        """Returns False, since models are only read."""
        return False

    @property
    def is_trainable(self) -> bool:
        """Returns False, since models are only read."""
        return False
