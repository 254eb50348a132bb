"""Offers the products of quantised.c as functions of tensors.

Owns: turning tensors into pointers. Never: how weights are rounded (`model.grouped_weights`), how they are packed, or
when a product is used (`cpu.quantised_linear`).
"""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from services.engine.native.instruction_sets import usable

COLUMNS = 16
"""Output columns of a panel."""
FOUR, EIGHT, EIGHT_BY_16 = range(3)
"""Kinds of weights, as quantised.c names them."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights in panels, as quantised.c describes them."""

    panels: Tensor
    """[panels, groups, bytes of a block], uint8."""
    kind: int
    """FOUR, EIGHT or EIGHT_BY_16."""
    has_minimums: bool
    half_scales: bool
    in_features: int
    out_features: int


class _Product(ctypes.Structure):
    """The struct `Product` of quantised.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "panels", "bias")),
        *((name, c_long) for name in ("rows", "in_features", "out_features", "block")),
        *((name, c_int) for name in ("kind", "has_minimums", "half_scales", "bf16", "threads")),
    )


class Products:
    """The products of one library. They use as many threads as torch does."""

    def __init__(self, path: Path) -> None:
        """Loads the library at `path`. Raises OSError if that fails, AttributeError if it is of an older release."""
        self._product = ctypes.CDLL(str(path)).baton_quantised_product
        self._product.argtypes, self._product.restype = [c_void_p], c_int

    def linear(self, inputs: Tensor, weights: PackedWeights, bias: Tensor | None) -> Tensor:
        """Returns inputs [..., in_features] times the weights, [..., out_features] in the same type: float32 or
        bfloat16. bias: float32, or None. Raises MemoryError."""
        inputs = inputs.contiguous()
        outputs = inputs.new_empty(*inputs.shape[:-1], weights.out_features)
        if not outputs.numel():
            return outputs
        product = _Product(
            inputs.data_ptr(),
            outputs.data_ptr(),
            weights.panels.data_ptr(),
            None if bias is None else bias.data_ptr(),
            inputs.numel() // weights.in_features,
            weights.in_features,
            weights.out_features,
            weights.panels.shape[2],
            weights.kind,
            weights.has_minimums,
            weights.half_scales,
            inputs.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
        if self._product(ctypes.byref(product)):
            raise MemoryError(f"no memory for {inputs.numel()} rounded inputs")
        return outputs


@cache
def products() -> Products | None:
    """Returns the products for the best instruction set that this process may use, or None if they were not built.
    Raises ConfigError if the environment asks for an unknown instruction set."""
    for each in usable():
        try:
            return Products(each.shared_object)
        except (OSError, AttributeError):
            continue  # `bindings.kernels` says what was not built or cannot be loaded
    return None
