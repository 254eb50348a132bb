"""Represents a matrix of weights in few bits: whole numbers, with a scale and perhaps a minimum for each group.

Owns: this form, and how weights of any model are rounded to it. Never: the layout that kernels read
(`cpu.quantised_linear`), or the blocks of GGUF files (`gguf_blocks`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

GROUP = 32
"""Inputs of a group, and the unit to which `GroupedWeights` are padded with zeros."""
_AT_ONCE = 1 << 21
"""Weights that are rounded at a time, so that copies of them stay small."""
_SHRINKS = (1.0, 0.93, 0.86)
"""Parts of a group's range that rounding to 4 bits tries: a narrower one rounds what is inside it more finely, and cuts
off what is outside."""

_LEAST = 2.0**-120
"""Groups of smaller inputs count as zeros: 127 divided by one of them would be infinite in float32, or nearly."""


@dataclass(frozen=True, slots=True)
class GroupedWeights:
    """Holds weights [out_features, in_features]. A weight is scale * value + minimum; inputs beyond the last have the
    value 0."""

    values: Tensor
    """[out_features, padded], int8: from 0 to 15 if `bits` is 4."""
    scales: Tensor
    """[out_features, padded / group], float32."""
    minimums: Tensor | None
    """[out_features, padded / 32], float32. Always there if `bits` is 4."""
    bits: int
    """4 or 8."""
    group: int
    """Inputs that share a scale: 32, or 16 with 8 bits and no minimums."""
    in_features: int
    order: Tensor | None = None
    """The input that belongs to each column, [in_features], int64; None if each column is of the input at its place."""

    @property
    def out_features(self) -> int:
        """Returns the number of rows."""
        return self.values.shape[0]

    def dequantised(self) -> Tensor:
        """Returns the weights in float32, [out_features, in_features]."""
        grouped = self.values.float().unflatten(1, (-1, self.group)) * self.scales[:, :, None]
        if self.minimums is not None:
            grouped += self.minimums[:, :, None]
        weights: Tensor = grouped.flatten(1)[:, : self.in_features]
        return weights if self.order is None else weights[:, self.order.argsort()]


def joined(parts: list[GroupedWeights]) -> GroupedWeights | None:
    """Returns one matrix with the rows of all parts, or None if they differ in form."""
    first = parts[0]
    forms = {(part.bits, part.group, part.in_features, part.minimums is None) for part in parts}
    if len(forms) > 1 or not all(_same_order(part.order, first.order) for part in parts):
        return None
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return GroupedWeights(
        torch.cat([part.values for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
        first.bits,
        first.group,
        first.in_features,
        first.order,
    )


def _same_order(one: Tensor | None, other: Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def round_weights(weight: Tensor, bits: int) -> GroupedWeights:
    """Rounds a matrix [out_features, in_features] of any float type to 8 bits, symmetric, or to 4 with a minimum."""
    rows = max(1, _AT_ONCE // max(1, weight.shape[1]))
    round_rows = _round_to_8 if bits == 8 else _round_to_4
    parts = joined([round_rows(part.float()) for part in weight.detach().split(rows)])
    assert parts is not None, "all parts are rounded to the same form"
    return parts


def round_inputs(inputs: Tensor) -> Tensor:
    """Returns inputs [..., in_features] as products see them, in float32: each group of 32 is rounded to 8 bits by its
    largest, as quantised.c does it. Groups with numbers that are not finite become NaN."""
    grouped = _groups(inputs.float())
    largest = grouped.abs().amax(-1, keepdim=True)
    finite = largest < torch.inf  # False for NaN too
    scale = torch.where(finite, largest / 127, torch.nan)
    # Divided, since 127 / largest would be 127 times a rounded reciprocal.
    inverse = torch.where(largest >= _LEAST, torch.full_like(largest, 127).div(largest), 0)
    return ((grouped * inverse).round().nan_to_num_() * scale).flatten(-2)[..., : inputs.shape[-1]]


def _groups(weight: Tensor) -> Tensor:
    """Returns [..., groups, 32], padded with zeros."""
    grouped: Tensor = pad(weight, (0, -weight.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP))
    return grouped


def _round_to_8(weight: Tensor) -> GroupedWeights:
    grouped = _groups(weight)
    scales = grouped.abs().amax(2) / 127
    values = (grouped / scales.clamp_min(1e-30)[:, :, None]).round_().to(torch.int8)
    return GroupedWeights(values.flatten(1), scales, None, 8, GROUP, weight.shape[1])


def _round_to_4(weight: Tensor) -> GroupedWeights:
    """Rounds to the scale and minimum, of those tried, with the least squared error. They are numbers of 16 bits, as
    in GGUF's Q4_1."""
    more = -weight.shape[1] % GROUP  # the last weight again, which neither widens a range nor moves it
    grouped = torch.cat((weight, weight[:, -1:].expand(-1, more)), dim=1).unflatten(1, (-1, GROUP))
    lowest, highest = grouped.amin(2), grouped.amax(2)
    best = torch.full_like(lowest, torch.inf)
    scales, minimums, values = torch.zeros_like(lowest), lowest.clone(), torch.zeros_like(grouped)
    for shrink in _SHRINKS:
        cut = (highest - lowest) * ((1 - shrink) / 2)
        scale, minimum = _line_through(grouped, _nearest(grouped, (highest - lowest) * (shrink / 15), lowest + cut))
        tried = _nearest(grouped, scale, minimum)
        error = (tried * scale[:, :, None]).add_(minimum[:, :, None]).sub_(grouped).square_().sum(2)
        better = error < best
        best = torch.where(better, error, best)
        scales, minimums = torch.where(better, scale, scales), torch.where(better, minimum, minimums)
        values = torch.where(better[:, :, None], tried, values)
    inside = torch.arange(values[0].numel()) < weight.shape[1]
    return GroupedWeights((values.flatten(1) * inside).to(torch.int8), scales, minimums, 4, GROUP, weight.shape[1])


def _nearest(grouped: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
    """Returns the values from 0 to 15 nearest to the weights [rows, groups, 32], under scales and minimums [rows,
    groups]."""
    return (grouped - minimum[:, :, None]).div_(scale.clamp_min(1e-30)[:, :, None]).round_().clamp_(0, 15)


def _line_through(grouped: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the scales and minimums with which these values give the least squared error: linear regression."""
    mean_value, mean_weight = values.mean(2), grouped.mean(2)
    apart = values - mean_value[:, :, None]
    scale = (apart * grouped).sum(2) / apart.square().sum(2).clamp_min(1e-30)
    scale = _in_16_bits(scale)
    return scale, _in_16_bits(mean_weight - scale * mean_value)


def _in_16_bits(numbers: Tensor) -> Tensor:
    """Returns the numbers rounded to float16, if all fit."""
    rounded = numbers.half().float()
    return rounded if bool(rounded.isfinite().all()) else numbers
