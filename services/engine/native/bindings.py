"""Offers the compiled kernels as functions of tensors.

Owns: loading the library, and turning tensors into pointers. Never: when to use a kernel, or checks of arguments.
Callers must see to dtypes (bfloat16 unless stated otherwise), contiguity and limits: a kernel that is given a wrong
argument reads or writes memory out of bounds.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int, c_long, c_void_p
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from services.engine.native.instruction_sets import usable

logger = logging.getLogger(__name__)

MAX_HEADS, MAX_HEAD_DIM = 128, 256
"""Largest numbers that `decode_attention` takes; the head dimension must be a multiple of 16 too."""


class DecodeArguments(ctypes.Structure):
    """Mirrors the struct `Decode` of kernels.c, which describes its fields."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "output", "rows", "tables", "starts", "stops")),
        *((name, c_long) for name in ("batch", "width", "heads", "kv_heads", "head_dim", "block_size")),
        *((name, c_long) for name in ("query_row", "query_head", "block", "token")),
        ("scale", c_float),
        ("softcap", c_float),
        ("threads", c_int),
    )


class Kernels:
    """Calls the functions of one compiled library. Each uses as many threads as torch does."""

    def __init__(self, path: Path) -> None:
        """Loads the library at `path`. Raises OSError if that fails, and AttributeError if a function is missing."""
        library = ctypes.CDLL(str(path))
        self._attention = library.baton_decode_attention
        self._attention.argtypes = [c_void_p]
        self._rms_norm = library.baton_rms_norm
        self._rms_norm.argtypes = [c_void_p] * 3 + [c_long] * 2 + [c_float] * 2 + [c_int]
        self._add_rms_norm = library.baton_add_rms_norm
        self._add_rms_norm.argtypes = [c_void_p] * 4 + [c_long] * 2 + [c_float] * 2 + [c_int]
        self._silu_gate = library.baton_silu_gate
        self._silu_gate.argtypes = [c_void_p] * 3 + [c_long] * 3 + [c_int]
        self._rotate = library.baton_rotate
        self._rotate.argtypes = [c_void_p] * 3 + [c_long] * 4 + [c_int]
        self._causal_softmax = library.baton_causal_softmax
        self._causal_softmax.argtypes = [c_void_p] + [c_long] * 5 + [c_int]
        for function in (
            self._attention,
            self._rms_norm,
            self._add_rms_norm,
            self._silu_gate,
            self._rotate,
            self._causal_softmax,
        ):
            function.restype = None

    def decode_attention(self, arguments: DecodeArguments) -> None:
        """Computes the attention of decodes with an online softmax, and writes it to `arguments.output`."""
        self._attention(ctypes.byref(arguments))

    def rms_norm(self, inputs: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        """Returns the root mean square norm (arXiv 1910.07467) of inputs [..., dim], with weight [dim].

        The normalised inputs are multiplied by `weight` if `offset` is 0 (Llama), by 1 + `weight` if it is 1 (Gemma).
        """
        result = torch.empty_like(inputs)
        dim = inputs.shape[-1]
        self._rms_norm(
            inputs.data_ptr(),
            weight.data_ptr(),
            result.data_ptr(),
            inputs.numel() // dim,
            dim,
            epsilon,
            offset,
            torch.get_num_threads(),
        )
        return result

    def add_rms_norm(self, sums: Tensor, more: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        """Adds `more` to `sums` in place, both [..., dim], and returns the norm of the sums (see `rms_norm`)."""
        result = torch.empty_like(sums)
        dim = sums.shape[-1]
        self._add_rms_norm(
            sums.data_ptr(),
            more.data_ptr(),
            weight.data_ptr(),
            result.data_ptr(),
            sums.numel() // dim,
            dim,
            epsilon,
            offset,
            torch.get_num_threads(),
        )
        return result

    def silu_gate(self, gates: Tensor, inputs: Tensor) -> Tensor:
        """Returns silu(gates) * inputs, [..., dim] (SwiGLU, arXiv 2002.05202).

        Both are [..., dim]. Each row is contiguous, and both have the same stride between rows.
        """
        dim, stride = inputs.shape[-1], inputs.stride(-2)
        result = torch.empty(inputs.shape, dtype=inputs.dtype)
        self._silu_gate(
            gates.data_ptr(),
            inputs.data_ptr(),
            result.data_ptr(),
            inputs.numel() // dim,
            dim,
            stride,
            torch.get_num_threads(),
        )
        return result

    def rotate(self, rows: Tensor, num_heads: int, cosines: Tensor, sines: Tensor) -> None:
        """Applies rotary position embeddings (RoPE, arXiv 2104.09864) in place to the first `num_heads` heads of rows.

        rows: [num_rows, width]. cosines, sines: [..., num_rows, head_dim] of any float type. As in transformers, the
        halves of a head are rotated against each other.
        """
        cosines, sines = cosines.to(rows.dtype).contiguous(), sines.to(rows.dtype).contiguous()
        self._rotate(
            rows.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            rows.shape[0],
            num_heads,
            cosines.shape[-1],
            rows.stride(0),
            torch.get_num_threads(),
        )

    def causal_softmax(self, scores: Tensor, first: int, last: int) -> Tensor:
        """Computes the softmax of scores [tiles, queries, keys] in place (see `attention.dense.CausalSoftmax`)."""
        self._causal_softmax(scores.data_ptr(), *scores.shape, first, last, torch.get_num_threads())
        return scores


@cache
def kernels() -> Kernels | None:
    """Returns the kernels for the best instruction set that this process may use, or None if they were not built or
    cannot be loaded. Raises ConfigError if the environment asks for an unknown instruction set."""
    built = [each for each in usable() if each.library.exists()]
    for each in built:
        try:
            found = Kernels(each.library)
        except (OSError, AttributeError) as error:  # AttributeError: built from older sources
            logger.warning("the CPU kernels for %s cannot be loaded: %s", each.name, error)
        else:
            logger.info("CPU kernels for %s", each.name)
            return found
    if not built:
        logger.info("the CPU kernels were not built (no C compiler was there): decodes are slower")
    return None
