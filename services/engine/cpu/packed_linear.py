"""Computes linear layers with their weights in a layout that a kernel reads fast, on CPUs.

A layer that computes in float32 keeps its weights in 16 bits if that loses nothing, as it is with every model that was
saved in 16 bits: its results are those of float32 weights, and a decode reads half the memory.
Owns: the layouts, and the comparison of a packed layer with the plain one. Never: which of them a layer gets
(`linear_plan`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from services.engine.cpu.replacement import ROUNDINGS, relative_difference, worst_column
from services.engine.native.bindings import PANEL, Kernels
from services.engine.native.layer_arguments import Product

_NUMS_ROWS = (1, 2, 3, 4, 13)
"""Rows of random input for which a packed layer is compared with the plain one: those that linear.c computes in ways of
their own, and more than a tile of it has on any processor."""
_OF_A_COLUMN = 4
"""How many times as much a single column may differ."""


class _PackedLinear(nn.Module):
    """Has what model code may read of an `nn.Linear`, whose weight can then be freed."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.bias = layer.bias
        # Model code may read the weight's dtype or device, so there is an empty weight.
        self.weight = nn.Parameter(layer.weight.new_empty(0), requires_grad=False)


class OneDnnLinear(_PackedLinear):
    """Computes a linear layer by oneDNN, with weights in its own layout."""

    def __init__(self, layer: nn.Linear) -> None:
        """Raises RuntimeError, AttributeError or NotImplementedError if torch lacks the operators here."""
        super().__init__(layer)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the output, [..., out_features], for inputs [..., in_features]."""
        if inputs.numel() == 0:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return outputs


class NativeLinear(_PackedLinear):
    """Computes a linear layer by linear.c."""

    def __init__(self, layer: nn.Linear, native: Kernels) -> None:
        super().__init__(layer)
        self._native = native
        self._float_bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
        weight = layer.weight.detach()
        self._panels = pack(weight.to(narrowest_dtype(weight)))

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the output, [..., out_features], for inputs [..., in_features]."""
        return self._native.linear(inputs, self._panels, self._float_bias, self.out_features)

    def product(self, dtype: torch.dtype) -> Product:
        """Returns the same for inputs of this dtype as a call for layers.c."""
        return self._native.linear_product(dtype, self.in_features, self.out_features, self._panels, self._float_bias)


def narrowest_dtype(weight: Tensor) -> torch.dtype:
    """Returns the dtype of fewest bits that has all numbers of the weight."""
    if weight.dtype == torch.float32:
        for dtype in (torch.bfloat16, torch.float16):
            if all(torch.equal(rows.to(dtype).float(), rows) for rows in weight.split(1024)):
                return dtype
    return weight.dtype


def pack(weight: Tensor) -> Tensor:
    """Returns weights [out_features, in_features], of which in_features is even, in the panels of linear.c."""
    panels: Tensor = pad(weight, (0, 0, 0, -weight.shape[0] % PANEL)).unflatten(0, (-1, PANEL))
    if weight.dtype == torch.bfloat16:
        panels = panels.unflatten(2, (-1, 2))
    return panels.transpose(1, 2).contiguous()


@torch.inference_mode()
def agrees(packed: nn.Module, layer: nn.Linear) -> bool:
    """Returns whether the packed layer computes what the plain one does, except for roundings."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_NUMS_ROWS[-1], layer.in_features, generator=generator).to(layer.weight.dtype)
    plain, most = linear(inputs, layer.weight, layer.bias), 2 * ROUNDINGS[inputs.dtype]
    pairs = ((packed(inputs[:rows]), plain[:rows]) for rows in _NUMS_ROWS)
    return all(
        relative_difference(found, expected) <= most and worst_column(found, expected) <= _OF_A_COLUMN * most
        for found, expected in pairs
    )
