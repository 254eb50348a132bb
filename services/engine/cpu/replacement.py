"""Replaces modules of a model, and measures how much two outputs differ, and may differ.

Never: which modules are replaced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

ROUNDINGS = {torch.float32: 2e-5, torch.bfloat16: 0.01, torch.float16: 2e-3}
"""Largest root mean square of the difference of two outputs, relative to their own, that a few roundings make in each
dtype. Another activation or form of norm differs by far more."""
_ROUNDED_INPUTS = 2e-3
"""The same for what rounds inputs to 8 bits: the last bit of a float may decide which step one of them takes."""


def largest_difference(dtype: torch.dtype, *, rounds_inputs: bool) -> float:
    """Returns the largest difference (see `relative_difference`) of two modules that compute the same in this dtype.

    `rounds_inputs`: some of their linear layers round their inputs to 8 bits.
    """
    return max(ROUNDINGS[dtype], _ROUNDED_INPUTS) if rounds_inputs else ROUNDINGS[dtype]


def replace_modules(model: nn.Module, replacement_for: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replaces each module for which `replacement_for` returns another; returns how many it replaced."""
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = replacement_for(child)
            if replacement is not None:
                setattr(parent, name, replacement)
                count += 1
    return count


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Returns the root mean square of the difference, relative to that of `expected`; 0 if they are equal.

    Both have the same shape.
    """
    difference = (found.float() - expected.float()).norm()
    return (difference / expected.float().norm()).item() if difference else 0.0


def worst_column(found: Tensor, expected: Tensor) -> float:
    """Returns the largest difference of a column, in root mean squares, relative to that of the column plus that of all
    of `expected`; 0 if they are equal.

    A wrong column among thousands makes little of a `relative_difference`. Both are [rows, columns].
    """
    differences = (found.float() - expected.float()).square().mean(0).sqrt()
    sizes = expected.float().square()
    return (differences / (sizes.mean(0).sqrt() + sizes.mean().sqrt()).clamp_min(1e-30)).max().item()
