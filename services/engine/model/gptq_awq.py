"""Reads linear layers as GPTQ and AWQ checkpoints keep them: whole numbers of 4 or 8 bits in words of 32.

A weight is scale * (value - zero point); scales and zero points belong to a group of inputs and an output. GPTQ (arXiv
2210.17323, in AutoGPTQ's layout) fills a word with consecutive inputs, and names the group of each input in `g_idx`,
which is out of order where columns were rounded in the order of their importance (`desc_act`). AWQ (arXiv 2306.00978,
AutoAWQ's layout "gemm") fills a word with 8 outputs in an order of its own.
Owns: what the numbers mean, which variants are read, and the shapes of their tensors. Never: files
(`gptq_awq_loading`), or what becomes of a layer (`cpu.quantisation`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from services.core.errors import UnsupportedModel
from services.engine.model.grouped_weights import GROUP, GroupedWeights

METHODS = {"gptq": "GPTQ", "awq": "AWQ"}
"""The methods that are read, by their names in config.json, with those for people."""
_BITS = {"gptq": (4, 8), "awq": (4,)}
_LAYOUTS = {"gptq": ("gptq", "gptq_v2"), "awq": ("gemm",)}
_MOST_OF_A_GROUP = 1 << 31
"""More inputs than a layer has; torch takes no number beyond 64 bits."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The place in a word, counted from its lowest bits, of each of 8 consecutive outputs in AWQ's order."""


@dataclass(frozen=True, slots=True)
class Packing:
    """Describes how all quantised layers of a checkpoint are kept."""

    method: str
    """A name in `METHODS`."""
    bits: int
    group_size: int
    """Inputs of a group, or -1 for all inputs of a layer."""
    zero_offset: int
    """What is added to zero points as they are kept, modulo 2 ** bits: 1 in the first version of GPTQ's layout."""
    needs_order: bool
    """Whether a layer without `g_idx` is incomplete: its inputs were ordered by importance."""

    @property
    def scheme(self) -> str:
        """Returns the scheme in words, for logs and fingerprints."""
        groups = "one group" if self.group_size == -1 else f"groups of {self.group_size}"
        return f"{METHODS[self.method]} {self.bits}-bit ({groups})"

    def shapes(self, in_features: int, out_features: int) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of a layer's tensors by their names. `g_idx` may be absent unless it is needed."""
        in_word = 32 // self.bits
        groups = 1 if self.group_size == -1 else -(-in_features // self.group_size)
        factors = {"qzeros": (groups, out_features // in_word), "scales": (groups, out_features)}
        if self.method == "awq":
            return {"qweight": (in_features, out_features // in_word), **factors}
        return {"qweight": (in_features // in_word, out_features), **factors, "g_idx": (in_features,)}


def packing_of(fields: Mapping[str, Any]) -> Packing:
    """Returns the packing that `quantization_config` of a config.json describes. Raises UnsupportedModel if its method
    is one of `METHODS`, but a variant that is not read."""
    method = fields["quant_method"]
    name, bits, size = METHODS[method], fields.get("bits"), fields.get("group_size", 128)
    # Each package that writes these files has another word for the layout.
    words = (fields.get(each) for each in ("checkpoint_format", "version", "format"))
    layout = next((each.lower() for each in words if isinstance(each, str)), _LAYOUTS[method][0])
    if fields.get("is_marlin_format"):
        layout = "marlin"
    if type(bits) is not int or bits not in _BITS[method]:
        readable = " and ".join(map(str, _BITS[method]))
        raise UnsupportedModel(f"{name} weights of {bits} bits are not supported, only those of {readable}")
    if layout not in _LAYOUTS[method]:
        readable = " and ".join(_LAYOUTS[method])
        raise UnsupportedModel(f"{name} weights in the layout {layout!r} are not supported, only {readable}")
    if type(size) is not int or not (size == -1 or 0 < size <= _MOST_OF_A_GROUP):
        raise UnsupportedModel(f"{name} weights have groups of {size!r} inputs, which makes no sense")
    return Packing(method, bits, size, int(layout == "gptq"), method == "gptq" and bool(fields.get("desc_act")))


class SavedLinear(nn.Module):
    """Stands for a linear layer, from when its model is loaded until it is decided how the layer computes."""

    def __init__(self, packing: Packing, in_features: int, out_features: int, bias: Tensor | None) -> None:
        """Takes a bias [out_features], perhaps on the meta device, where the loader fills it in later."""
        super().__init__()
        self.packing, self.in_features, self.out_features = packing, in_features, out_features
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes the layer's tensors, of the shapes that `Packing.shapes` says; the words are int32. Raises
        UnsupportedModel if an input is of no group."""
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)
        group_of = self._group_of()
        if not bool(((group_of >= 0) & (group_of < self.get_buffer("scales").shape[0])).all()):
            raise UnsupportedModel("g_idx has groups beyond the last")

    def dequantised(self) -> Tensor:
        """Returns the weights in float32, [out_features, in_features]."""
        group_of = self._group_of()
        weights = self._values().float()
        weights -= self._zeros().float()[:, group_of]
        weights *= self._scales()[:, group_of]
        return weights

    def grouped(self) -> GroupedWeights | None:
        """Returns the weights as they are, or None if that form cannot hold them: its groups of 32 inputs have a scale
        each, so that each must lie within a group of the checkpoint, perhaps in another order of inputs."""
        group_of = self._group_of()
        order = None
        if (sets := _of_sets(group_of)) is None:
            order = group_of.argsort(stable=True)
            if (sets := _of_sets(group_of[order])) is None:
                return None
        values, zeros, scales = self._values(), self._zeros()[:, sets], self._scales()[:, sets]
        if order is not None:
            values = values[:, order]
        middle = 0 if self.packing.bits == 4 else 128
        minimums: Tensor | None = (middle - zeros.float()) * scales
        if middle:
            values = values ^ 128  # as int8, that is 128 less
            if bool((zeros == middle).all()):
                minimums = None
        padded = torch.zeros(self.out_features, len(sets) * GROUP, dtype=torch.int8, device=values.device)
        padded[:, : self.in_features] = values.view(torch.int8)
        return GroupedWeights(padded, scales, minimums, self.packing.bits, GROUP, self.in_features, order)

    def _group_of(self) -> Tensor:
        """Returns the group of each input, [in_features]."""
        if self.packing.method == "gptq" and "g_idx" in self._buffers:
            return self.get_buffer("g_idx").long()
        size = self.in_features if self.packing.group_size == -1 else self.packing.group_size
        return torch.arange(self.in_features, device=self.get_buffer("scales").device) // size

    def _values(self) -> Tensor:
        """Returns [out_features, in_features], uint8."""
        words = self.get_buffer("qweight")
        if self.packing.method == "awq":
            return self._of_outputs(words)
        return _apart(words.T.contiguous(), self.packing.bits).flatten(1)

    def _zeros(self) -> Tensor:
        """Returns the zero points [out_features, groups], uint8."""
        zeros = self._of_outputs(self.get_buffer("qzeros"))
        zeros += self.packing.zero_offset
        return zeros.bitwise_and_(2**self.packing.bits - 1)

    def _scales(self) -> Tensor:
        """Returns [out_features, groups], float32."""
        return self.get_buffer("scales").T.float().contiguous()

    def _of_outputs(self, words: Tensor) -> Tensor:
        """Returns [out_features, rows] of words [rows, out_features / numbers of a word]."""
        numbers = _apart(words, self.packing.bits)
        if self.packing.method == "awq":
            numbers = numbers[:, :, list(_AWQ_PLACES)]
        return numbers.flatten(1).T.contiguous()


def _apart(words: Tensor, bits: int) -> Tensor:
    """Returns the numbers of words [rows, columns] from the lowest bits up, [rows, columns, 32 / bits], uint8."""
    return torch.stack([(words >> shift & (2**bits - 1)).to(torch.uint8) for shift in range(0, 32, bits)], dim=2)


def _of_sets(group_of: Tensor) -> Tensor | None:
    """Returns the group of each set of 32 consecutive inputs, or None if some set has inputs of two groups."""
    more = -len(group_of) % GROUP
    sets = torch.cat((group_of, group_of[-1:].expand(more))).unflatten(0, (-1, GROUP))
    return sets[:, 0] if bool((sets == sets[:, :1]).all()) else None
