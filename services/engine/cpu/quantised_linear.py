"""Computes linear layers with weights of 4 or 8 bits on CPUs, by the products of quantised.c or without them by torch.

Inputs are rounded to 8 bits, in groups of 32, in both ways, so that they differ only by the order of sums. A layer's
product is compared with torch's when the layer is made; where they disagree, torch's is used.
Owns: the layout of packed weights. Never: which layers are quantised, or how (`quantisation`).
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from services.engine.cpu.replacement import relative_difference
from services.engine.model.grouped_weights import GROUP, GroupedWeights, joined, round_inputs
from services.engine.native.bindings import COLUMNS, EIGHT, EIGHT_BY_16, FOUR, QuantisedPanels, kernels
from services.engine.native.layer_arguments import Product

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-4
"""Largest root mean square of the difference, relative to that of the output: sums of float32 in another order."""
_NUM_ROWS = 13
"""Rows of random input for the comparison: more than a whole tile of the kernel has on any processor."""


class QuantisedLinear(nn.Module):
    """Replaces an `nn.Linear` by a linear layer over quantised weights. It takes and returns float32, bfloat16 or
    float16."""

    def __init__(self, weights: GroupedWeights, bias: Tensor | None, like: Tensor) -> None:
        """Takes the weights, a bias [out_features] or None, and a tensor of the type of the layer that is replaced."""
        super().__init__()
        self.in_features, self.out_features = weights.in_features, weights.out_features
        # Model code may ask the weight for its dtype or device, so there is an empty one.
        self.weight = nn.Parameter(like.new_empty(0), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach(), requires_grad=False)
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._order = weights.order
        weights = dataclasses.replace(weights, order=None)  # of inputs that are in that order already
        self._weights: GroupedWeights | None = weights
        self._packed: QuantisedPanels | None = None
        self._kernels = kernels()
        if self._kernels is not None:
            self._use_kernel(weights)

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns [..., out_features] for inputs [..., in_features]."""
        return self._product(inputs if self._order is None else inputs[..., self._order])

    def _product(self, inputs: Tensor) -> Tensor:
        if self._packed is None or self._kernels is None:
            return self._plain(inputs)
        if inputs.dtype == torch.float16:
            return self._kernels.quantised_linear(inputs.float(), self._packed, self._bias).half()
        return self._kernels.quantised_linear(inputs, self._packed, self._bias)

    def product(self, dtype: torch.dtype) -> Product | None:
        """Returns the same for inputs of this dtype as a call for layers.c; None if torch computes it, or a part, or
        puts the inputs in another order."""
        if self._packed is None or self._kernels is None or self._order is not None or dtype == torch.float16:
            return None
        return self._kernels.quantised_product(dtype, self._packed, self._bias)

    @property
    def nbytes(self) -> int:
        """Returns the bytes that the weights take."""
        if self._packed is not None:
            return self._packed.panels.nbytes
        kept = self._in_order
        return sum(each.nbytes for each in (kept.values, kept.scales, kept.minimums) if each is not None)

    @property
    def grouped(self) -> GroupedWeights:
        """Returns the weights as they were given."""
        return dataclasses.replace(self._in_order, order=self._order)

    @property
    def _in_order(self) -> GroupedWeights:
        if self._weights is not None:
            return self._weights
        assert self._packed is not None, "one of the two is always there"
        return unpack(self._packed)

    def _plain(self, inputs: Tensor) -> Tensor:
        return linear(round_inputs(inputs), self._in_order.dequantised(), self._bias).to(inputs.dtype)

    def _use_kernel(self, weights: GroupedWeights) -> None:
        """Packs the weights and gives up the others, if the products agree with torch's."""
        inputs = torch.randn(_NUM_ROWS, self.in_features, generator=torch.Generator().manual_seed(0))
        expected = self._plain(inputs)
        self._packed = pack(weights)
        difference = max(relative_difference(self._product(inputs[:rows]), expected[:rows]) for rows in (1, _NUM_ROWS))
        if difference <= _TOLERANCE:
            self._weights = None
        else:
            logger.warning("a product of %d-bit weights differs by %.2g: torch computes it", weights.bits, difference)
            self._packed = None


class _OneAfterTheOther(nn.Module):
    """Computes linear layers of the same inputs, whose outputs stand side by side."""

    def __init__(self, layers: Sequence[QuantisedLinear]) -> None:
        super().__init__()
        self._layers = nn.ModuleList(layers)

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.cat([layer(inputs) for layer in self._layers], dim=-1)


def side_by_side(layers: Sequence[QuantisedLinear]) -> nn.Module:
    """Returns a module whose output is the outputs of these layers one after the other: one layer, if their weights are
    of one form."""
    weights = joined([layer.grouped for layer in layers])
    if weights is None:
        return _OneAfterTheOther(layers)
    like, bias = layers[0].weight, None
    if any(layer.bias is not None for layer in layers):
        zeros = (like.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers)
        bias = torch.cat(list(zeros))
    return QuantisedLinear(weights, bias, like)


def pack(weights: GroupedWeights) -> QuantisedPanels:
    """Returns the weights in panels. Scales and minimums of 4-bit weights take 16 bits where that changes none."""
    kind = FOUR if weights.bits == 4 else EIGHT if weights.group == GROUP else EIGHT_BY_16
    factors = [weights.scales] + ([] if weights.minimums is None else [weights.minimums])
    half = kind == FOUR and all(torch.equal(each.half().float(), each) for each in factors)
    rows = -weights.out_features % COLUMNS
    values = pad(weights.values, (0, 0, 0, rows)).unflatten(1, (-1, 8, 4)).unflatten(0, (-1, COLUMNS))
    values = values.permute(0, 2, 3, 1, 4)  # [panels, groups, quads, columns, 4]
    if kind == FOUR:
        values = values[:, :, :4] | (values[:, :, 4:] << 4)
    parts = [values.flatten(2).contiguous().view(torch.uint8)]
    for factor in factors:
        sets = pad(factor, (0, 0, 0, rows)).unflatten(1, (values.shape[1], -1)).unflatten(0, (-1, COLUMNS))
        sets = sets.permute(0, 2, 3, 1).flatten(2)  # [panels, groups, sets of a group * columns]
        parts.append((sets.half() if half else sets).contiguous().view(torch.uint8))
    has_minimums = weights.minimums is not None
    panels = torch.cat(parts, dim=2)
    return QuantisedPanels(panels, kind, has_minimums, half, weights.in_features, weights.out_features)


def unpack(packed: QuantisedPanels) -> GroupedWeights:
    """Returns the weights that were packed."""
    in_panels = packed.panels
    size = 256 if packed.kind == FOUR else 512
    values = in_panels[:, :, :size]
    if packed.kind == FOUR:
        values = torch.cat((values & 15, values >> 4), dim=2)
    values = values.contiguous().view(torch.int8).unflatten(2, (8, COLUMNS, 4)).permute(0, 3, 1, 2, 4)
    factors = in_panels[:, :, size:].contiguous().view(torch.float16 if packed.half_scales else torch.float32).float()
    factors = factors.unflatten(2, (-1, COLUMNS)).permute(2, 0, 3, 1)  # [sets, panels, columns, groups]

    def rows(of_panels: Tensor) -> Tensor:
        return of_panels.flatten(0, 1).flatten(1)[: packed.out_features].contiguous()

    sets = [rows(each) for each in factors]
    scales = torch.stack(sets, dim=2).flatten(1) if packed.kind == EIGHT_BY_16 else sets[0]
    minimums = sets[1] if packed.has_minimums else None
    bits, group = (4 if packed.kind == FOUR else 8), (16 if packed.kind == EIGHT_BY_16 else GROUP)
    return GroupedWeights(rows(values), scales, minimums, bits, group, packed.in_features)
