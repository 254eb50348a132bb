"""Replaces modules of a model, and measures how much two outputs differ.

Never: which modules are replaced, or by how much outputs may differ.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


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
