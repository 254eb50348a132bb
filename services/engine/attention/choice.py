"""Chooses the attention backend of a worker: the fastest that agrees with the reference on its device.

`dense` (any device) gathers blocks and multiplies; `varlen` (CUDA) calls flash attention;
`native` (CPU) reads blocks in place.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch

from services.engine.attention import dense, varlen
from services.engine.attention.decode import DecodeAttention, GatheredDecode
from services.engine.attention.native import NativeAttention
from services.engine.attention.paged import PagedAttention, reference, verify
from services.engine.native.bindings import DTYPES, kernels

logger = logging.getLogger(__name__)


def select(
    device: torch.device,
    dtype: torch.dtype,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    *,
    over_int8: bool = False,
) -> tuple[str, PagedAttention]:
    """Returns the first backend, fastest first, that agrees with the reference on this device, else the reference; and
    its name. For `over_int8` see `paged.verify`."""
    for name, backend in _candidates(device, dtype):
        try:
            verify(backend, device, dtype, num_heads, num_kv_heads, head_dim, block_size, over_int8=over_int8)
        except (RuntimeError, ValueError, AssertionError) as error:
            logger.info("attention backend %s is not used: %s", name, error)
            continue
        logger.info("attention backend %s", name)
        return name, backend
    return "reference", reference


def for_graphs(backend: PagedAttention) -> DecodeAttention:
    """Returns the attention of decodes that a CUDA graph can capture where `backend` was chosen."""
    over_tables = isinstance(backend, varlen.VarlenAttention) and backend.over_tables
    return varlen.VarlenDecode() if over_tables else GatheredDecode()


def _candidates(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, PagedAttention]]:
    """Yields the backends for this device and type with their names, fastest first."""
    if device.type == "cuda":
        varlen.activate()
        yield "varlen over block tables", varlen.VarlenAttention(over_tables=True)
        yield "varlen over gathered keys", varlen.VarlenAttention(over_tables=False)
    native = kernels() if device.type == "cpu" and dtype in DTYPES else None
    if native is not None:
        yield "native", NativeAttention(native)
    yield "dense", dense.paged_attention
