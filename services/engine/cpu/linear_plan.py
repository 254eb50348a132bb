"""Chooses how each linear layer of a model is computed on this CPU: by torch, by oneDNN or by linear.c.

Owns: the choice, a rule by the type of the weights and by the instructions of the processor, and its check on random
input. Never: how the ways compute (`packed_linear`). The rule follows from timings of layers of 576 to 8192 features on
one thread, limited to each instruction set in turn (benchmarks/results/2026-11-28-linear-ways.json): what it chooses
takes at most 1.02 times what the best way for each layer takes, on average over the layers.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import nn

from services.engine.cpu.packed_linear import NativeLinear, OneDnnLinear, agrees, narrowest_dtype
from services.engine.cpu.replacement import replace_modules
from services.engine.native.bindings import DTYPES, Kernels, kernels
from services.engine.native.instruction_sets import has_amx

logger = logging.getLogger(__name__)

_TORCH = "torch"
"""The name of the way of a layer that stays as it is."""


@torch.inference_mode()
def pack_linears(model: nn.Module) -> dict[str, int]:
    """Replaces every linear layer of the model by the fastest way that computes the same; returns how many layers are
    computed in each."""
    native, tiles = kernels(), has_amx()
    counts: Counter[str] = Counter()

    def replacement(module: nn.Module) -> nn.Module | None:
        if type(module) is not nn.Linear or module.weight.device.type != "cpu" or module.weight.dtype not in DTYPES:
            return None
        name = way(module, native, tiles=tiles)
        packed = _packed(module, name, native)
        counts[name if packed is not None else _TORCH] += 1
        return packed

    replace_modules(model, replacement)
    return dict(counts)


def way(layer: nn.Linear, native: Kernels | None, *, tiles: bool) -> str:
    """Returns the name of the fastest way for the layer. `tiles`: whether oneDNN multiplies bfloat16 by AMX.

    Without tiles, linear.c is the fastest over weights that 16 bits hold, also where activations are in float32: a
    decode reads half the memory. Over weights in 32 bits it is no faster than torch.
    """
    if layer.weight.dtype == torch.bfloat16 and (tiles or native is None):
        return "oneDNN"
    if native is not None and layer.in_features % 2 == 0 and narrowest_dtype(layer.weight) != torch.float32:
        return "linear.c"
    return _TORCH


def _packed(layer: nn.Linear, name: str, native: Kernels | None) -> nn.Module | None:
    """Returns the layer in this way, or None if it must stay as it is."""
    if name == _TORCH:
        return None
    try:
        packed = NativeLinear(layer, native) if name == "linear.c" and native is not None else OneDnnLinear(layer)
        if agrees(packed, layer):
            return packed
        logger.warning("a linear layer by %s differs and stays plain", name)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("linear layers are not computed by %s here: %s", name, error)
    return None
