"""Defines how keys and values are kept in 8 bits, and turns them into that form and back.

A row is what a token has for a kv head in a layer. It is kept as whole numbers from -127 to 127 and, behind them,
their scale as a float32, by which they are multiplied. The largest number of a row becomes 127, so each row has a scale
of its own and is never rounded again when tokens are added. Rounding is to the nearest, ties to even.
Owns: this form. Never: where rows lie (`model.kv_cache`), or attention over them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.engine.native.bindings import DTYPES, kernels
from services.kv.layout import SCALE_BYTES

_LEAST = 1e-30
"""The largest number of a row counts as no less than this: a row of zeros has a scale, too."""
_MOST = 127.0


def packed(rows: Tensor) -> Tensor:
    """Returns rows in 8 bits: [..., head_dim] -> [..., head_dim + 4] int8.

    It is the definition. A row with a NaN or an infinity has no finite scale, so that it remains as wrong as it was.
    """
    rows = rows.float()
    largest = rows.abs().amax(-1, keepdim=True).clamp_min(_LEAST)
    most = torch.full_like(largest, _MOST)  # torch would divide a plain number by way of a reciprocal, rounding twice
    numbers = (rows * (most / largest)).round().to(torch.int8)
    return torch.cat((numbers, (largest / most).view(torch.int8)), -1)


def pack(rows: Tensor) -> Tensor:
    """Returns what `packed` returns, in the fastest way that there is here."""
    native = kernels() if rows.device.type == "cpu" and rows.dtype in DTYPES else None
    return packed(rows) if native is None else native.pack_rows(rows)


def as_numbers(cache: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns keys or values as numbers: [..., head_dim] of `dtype` for rows in 8 bits, and others unchanged."""
    if cache.dtype != torch.int8:
        return cache
    scales = cache[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return cache[..., :-SCALE_BYTES].float().mul_(scales).to(dtype)
