"""Offers the compiled kernels as functions of tensors.

Owns: loading the library, and turning tensors into pointers. Never: when to use a kernel. Callers must see to dtypes
(one of `DTYPES`, the same for all tensors of a call), contiguity and limits: a kernel checks nothing.
"""

from __future__ import annotations

import ctypes
import logging
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from services.engine.native.instruction_sets import SOURCES_SYMBOL, sources_digest, usable, without_kernels
from services.engine.native.layer_arguments import Layers, Product, Seconds, product
from services.kv.layout import SCALE_BYTES

logger = logging.getLogger(__name__)

_MAX_HEADS, _MAX_HEAD_DIM = 128, 256
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PANEL = 32
"""Output columns of a panel of linear.c."""
COLUMNS = 16
"""Output columns of a panel of quantised.c."""
FOUR, EIGHT, EIGHT_BY_16 = range(3)
"""Kinds of weights, as quantised.c names them."""

_Functions = dict[torch.dtype, Any]
"""One function of the library, as compiled for each dtype."""


class AttentionArguments(ctypes.Structure):
    """Mirrors the struct `Attention` of attention.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("query", "keys", "values", "output")),
        *((name, c_void_p) for name in ("rows", "query_lens", "context_lens", "table_starts", "tables")),
        *((name, c_long) for name in ("sequences", "heads", "kv_heads", "head_dim", "block_size", "window")),
        *((name, c_long) for name in ("query_row", "query_head", "block", "token", "head")),
        ("scale", c_float),
        ("softcap", c_float),
        ("threads", c_int),
    )


@dataclass(frozen=True, slots=True)
class QuantisedPanels:
    """Keeps weights of 4 or 8 bits in panels, as quantised.c describes them."""

    panels: Tensor
    """[panels, groups, bytes of a block], uint8."""
    kind: int
    """FOUR, EIGHT or EIGHT_BY_16."""
    has_minimums: bool
    half_scales: bool
    in_features: int
    out_features: int


class _Linear(ctypes.Structure):
    """Mirrors the struct `Linear` of linear.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "panels", "bias")),
        *((name, c_long) for name in ("rows", "in_features", "out_features")),
        ("in_float", c_int),
        ("threads", c_int),
    )


class _QuantisedProduct(ctypes.Structure):
    """Mirrors the struct `Product` of quantised.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("x", "y", "panels", "bias")),
        *((name, c_long) for name in ("rows", "in_features", "out_features", "block")),
        *((name, c_int) for name in ("kind", "has_minimums", "half_scales", "bf16", "threads")),
    )


class Kernels:
    """Calls the functions of one library. Each uses as many threads as torch does."""

    def __init__(self, name: str, path: Path) -> None:
        """Loads the library at `path`, for the instruction set `name`.

        Raises OSError if that fails, and if the library was built from other sources: it might take its arguments in
        another form, and a kernel checks nothing.
        """
        self.name = name
        library = ctypes.CDLL(str(path))
        if _sources_of(library) != sources_digest():
            raise OSError("it was built from other sources than those that are here; build it again")
        pointer, number, real = c_void_p, c_long, c_float
        self._attention = _functions(library, "attention", pointer)
        self._attention_int8 = _functions(library, "attention_int8", pointer)
        self._pack_rows = _functions(library, "pack_rows", *[pointer] * 2, *[number] * 2, c_int)
        self._rms_norm = _functions(library, "rms_norm", *[pointer] * 3, *[number] * 2, *[real] * 2, c_int)
        self._add_rms_norm = _functions(library, "add_rms_norm", *[pointer] * 4, *[number] * 2, *[real] * 2, c_int)
        self._silu_gate = _functions(library, "silu_gate", *[pointer] * 3, *[number] * 3, c_int)
        self._rotate = _functions(library, "rotate", *[pointer] * 3, *[number] * 4, c_int)
        self._linear = _functions(library, "linear", pointer, result=c_int)
        self._quantised_product = _function(library, "baton_quantised_product", (pointer,), c_int)
        self._layers = _functions(library, "layers", pointer, result=c_int)
        self.layer_seconds: Seconds | None = None
        """Where `layers` adds the seconds of each kind of kernels, if they are to be measured."""

    def attention(self, dtype: torch.dtype, arguments: AttentionArguments, *, over_int8: bool = False) -> None:
        """Computes attention over the pool, and writes it to `arguments.output`.

        Queries and output have this dtype, and so have keys and values, unless they are rows as `pack_rows` makes them:
        then `over_int8` is set.
        """
        functions = self._attention_int8 if over_int8 else self._attention
        functions[dtype](ctypes.byref(arguments))

    def pack_rows(self, rows: Tensor) -> Tensor:
        """Returns rows [..., dim] in 8 bits: [..., dim + 4] int8, the same bytes as `attention.int8_rows.packed`."""
        rows, dim = rows.contiguous(), rows.shape[-1]
        result = torch.empty(*rows.shape[:-1], dim + SCALE_BYTES, dtype=torch.int8)
        self._pack_rows[rows.dtype](
            rows.data_ptr(), result.data_ptr(), rows.numel() // dim, dim, torch.get_num_threads()
        )
        return result

    def rms_norm(self, inputs: Tensor, weight: Tensor, epsilon: float, offset: float) -> Tensor:
        """Returns the root mean square norm of inputs [..., dim], with weight [dim]; for `offset` see elementwise.c."""
        result = torch.empty_like(inputs)
        dim = inputs.shape[-1]
        self._rms_norm[inputs.dtype](
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
        """Adds `more` to `sums` in place, both [..., dim], and returns the root mean square norm of the result."""
        result = torch.empty_like(sums)
        dim = sums.shape[-1]
        self._add_rms_norm[sums.dtype](
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
        """Returns silu(gates) * inputs. Both are [..., dim], with the same stride between rows and contiguous rows."""
        dim, stride = inputs.shape[-1], inputs.stride(-2)
        result = torch.empty(inputs.shape, dtype=inputs.dtype)
        self._silu_gate[inputs.dtype](
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
        """Applies rotary positions in place to the first `num_heads` heads of rows [num_rows, width]; cosines and sines
        are [..., num_rows, head_dim]."""
        cosines, sines = cosines.to(rows.dtype).contiguous(), sines.to(rows.dtype).contiguous()
        self._rotate[rows.dtype](
            rows.data_ptr(),
            cosines.data_ptr(),
            sines.data_ptr(),
            rows.shape[0],
            num_heads,
            cosines.shape[-1],
            rows.stride(0),
            torch.get_num_threads(),
        )

    def linear(self, inputs: Tensor, panels: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
        """Returns inputs [..., in_features] times the weights, [..., out_features] in the same dtype.

        panels: as linear.c describes them, of any of `DTYPES`. Inputs are of the same or float32. bias: float32, or
        None. Raises MemoryError.
        """
        inputs = inputs.contiguous()
        outputs = inputs.new_empty(*inputs.shape[:-1], out_features)
        if not outputs.numel():
            return outputs
        arguments = _linear_arguments(inputs.dtype, inputs.shape[-1], out_features, panels, bias)
        arguments.x, arguments.y = inputs.data_ptr(), outputs.data_ptr()
        arguments.rows, arguments.threads = inputs.numel() // inputs.shape[-1], torch.get_num_threads()
        if self._linear[panels.dtype](ctypes.byref(arguments)):
            raise MemoryError(f"no memory for {inputs.numel()} inputs in float32")
        return outputs

    def quantised_linear(self, inputs: Tensor, weights: QuantisedPanels, bias: Tensor | None) -> Tensor:
        """Returns inputs [..., in_features] times the weights, [..., out_features] in the same dtype: float32 or
        bfloat16. bias: float32, or None. Raises MemoryError."""
        inputs = inputs.contiguous()
        outputs = inputs.new_empty(*inputs.shape[:-1], weights.out_features)
        if not outputs.numel():
            return outputs
        arguments = _quantised_arguments(inputs.dtype, weights, bias)
        arguments.x, arguments.y = inputs.data_ptr(), outputs.data_ptr()
        arguments.rows, arguments.threads = inputs.numel() // weights.in_features, torch.get_num_threads()
        if self._quantised_product(ctypes.byref(arguments)):
            raise MemoryError(f"no memory for {inputs.numel()} rounded inputs")
        return outputs

    def linear_product(
        self, dtype: torch.dtype, in_features: int, out_features: int, panels: Tensor, bias: Tensor | None
    ) -> Product:
        """Returns what `linear` does for inputs of this dtype as a call for layers.c. Panels and bias must be kept as
        long as it."""
        arguments = _linear_arguments(dtype, in_features, out_features, panels, bias)
        return product(self._linear[panels.dtype], arguments)

    def quantised_product(self, dtype: torch.dtype, weights: QuantisedPanels, bias: Tensor | None) -> Product:
        """Returns what `quantised_linear` does for inputs of this dtype as a call for layers.c. Weights and bias must
        be kept as long as it."""
        return product(self._quantised_product, _quantised_arguments(dtype, weights, bias))

    def layers(self, dtype: torch.dtype, arguments: Layers) -> None:
        """Computes whole decoder layers in place, as layers.c describes it. Raises MemoryError."""
        arguments.threads = torch.get_num_threads()
        arguments.seconds = None if self.layer_seconds is None else ctypes.addressof(self.layer_seconds)
        if self._layers[dtype](ctypes.byref(arguments)):
            raise MemoryError(f"no memory for the products of {arguments.rows} tokens")


def _linear_arguments(
    dtype: torch.dtype, in_features: int, out_features: int, panels: Tensor, bias: Tensor | None
) -> _Linear:
    return _Linear(
        panels=panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        in_features=in_features,
        out_features=out_features,
        in_float=dtype == torch.float32,
    )


def _quantised_arguments(dtype: torch.dtype, weights: QuantisedPanels, bias: Tensor | None) -> _QuantisedProduct:
    return _QuantisedProduct(
        panels=weights.panels.data_ptr(),
        bias=None if bias is None else bias.data_ptr(),
        in_features=weights.in_features,
        out_features=weights.out_features,
        block=weights.panels.shape[2],
        kind=weights.kind,
        has_minimums=weights.has_minimums,
        half_scales=weights.half_scales,
        bf16=dtype == torch.bfloat16,
    )


def _sources_of(library: ctypes.CDLL) -> str:
    """Returns the digest of what the library was built from; an empty text if it does not say."""
    try:
        digest = (ctypes.c_char * len(sources_digest())).in_dll(library, SOURCES_SYMBOL)
    except ValueError:
        return ""
    return digest.raw.decode(errors="replace")


def _functions(library: ctypes.CDLL, kernel: str, *types: type, result: type | None = None) -> _Functions:
    """Returns the kernel for each dtype. Raises OSError if the library is of another version and lacks one."""
    names = {dtype: f"baton_{str(dtype).removeprefix('torch.')}_{kernel}" for dtype in DTYPES}
    return {dtype: _function(library, name, types, result) for dtype, name in names.items()}


def _function(library: ctypes.CDLL, name: str, types: tuple[type, ...], result: type | None) -> Any:
    try:
        found = library[name]
    except AttributeError as error:
        raise OSError(f"it has no {name}; build it again") from error
    found.argtypes, found.restype = types, result
    return found


def attends_to(num_heads: int, head_dim: int) -> bool:
    """Returns whether the kernels compute attention with this number of query heads of this dimension."""
    return num_heads <= _MAX_HEADS and head_dim <= _MAX_HEAD_DIM and head_dim % 16 == 0


@cache
def kernels() -> Kernels | None:
    """Returns the kernels for the best instruction set that this process may use, or None if they were not built or
    cannot be loaded. Raises ConfigError if the environment asks for an unknown instruction set."""
    built = [each for each in usable() if each.shared_object.exists()]
    for each in built:
        try:
            found = Kernels(each.name, each.shared_object)
        except OSError as error:
            logger.warning("the CPU kernels for %s cannot be loaded: %s", each.name, error)
        else:
            logger.info("CPU kernels for %s", each.name)
            return found
    logger.warning("the CPU kernels %s: %s", "cannot be loaded" if built else "were not built", without_kernels())
    return None
