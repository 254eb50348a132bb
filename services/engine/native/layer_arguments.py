"""Describes decoder layers to layers.c: its structs, and how they are made of the arguments of other kernels.

Never: which layers a model has, or what is in the tensors. What a struct points to must be kept alive by its owner.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_float, c_int, c_long, c_void_p
from typing import Any

KINDS = ("linear layers", "attention", "norms, gates, positions")
"""Kinds of kernels whose seconds layers.c can tell, in its order."""


class Seconds(ctypes.Array[c_double]):
    """Takes the seconds of each of `KINDS`, and then the time of the last change."""

    _length_, _type_ = len(KINDS) + 1, c_double


class Product(ctypes.Structure):
    """Mirrors the struct `Product` of layers.c."""

    _fields_ = tuple((name, c_void_p) for name in ("multiply", "arguments", "x", "y", "rows", "threads"))
    kept: ctypes.Structure
    """The arguments, which live as long as this object."""


class Norm(ctypes.Structure):
    """Mirrors the struct `Norm` of layers.c."""

    _fields_ = (("weight", c_void_p), ("epsilon", c_float), ("offset", c_float))


class Layer(ctypes.Structure):
    """Mirrors the struct `Layer` of layers.c."""

    _fields_ = (
        *((name, Norm) for name in ("input_norm", "inner_norm")),
        *((name, Product) for name in ("qkv", "output", "gate_up", "down")),
    )


class Layers(ctypes.Structure):
    """Mirrors the struct `Layers` of layers.c."""

    _fields_ = (
        *((name, c_void_p) for name in ("layers", "attention", "keys", "values", "pool", "places")),
        *((name, c_long) for name in ("count", "key_stride", "values_at")),
        *((name, c_void_p) for name in ("x", "cosines", "sines", "normed", "more", "qkv", "mixed", "gates", "gated")),
        *((name, c_long) for name in ("rows", "dim", "heads", "kv_heads", "head_dim", "inner")),
        ("seconds", c_void_p),
        ("threads", c_int),
    )


def product(function: Any, arguments: ctypes.Structure) -> Product:
    """Returns the call of a kernel of linear layers with these arguments, of which x, y, rows and threads are set anew
    for each call."""
    address = ctypes.cast(function, c_void_p).value
    places = (place(arguments, name) for name in ("x", "y", "rows", "threads"))
    made = Product(address, ctypes.addressof(arguments), *places)
    made.kept = arguments
    return made


def place(arguments: ctypes.Structure, name: str) -> int:
    """Returns the address of a field."""
    offset: int = getattr(type(arguments), name).offset
    return ctypes.addressof(arguments) + offset
