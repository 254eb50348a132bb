"""Replaces modules of a model by faster ones for this machine.

This is only an optimisation: a module is replaced if its output on random input is that of its replacement.
Owns: which modules are tried, and in which order. Never: how the replacements compute.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor, nn

from services.engine.cpu.decoder_layer import layer_for
from services.engine.cpu.linear_plan import pack_linears
from services.engine.cpu.native_layers import join_layers
from services.engine.cpu.native_modules import NativeGatedMLP, NativeRMSNorm
from services.engine.cpu.quantised_linear import QuantisedLinear
from services.engine.cpu.replacement import largest_difference, relative_difference, replace_modules
from services.engine.native.bindings import DTYPES, Kernels, kernels

logger = logging.getLogger(__name__)


def use_fast_paths(module: nn.Module, kv_dtype: torch.dtype) -> str:
    """Replaces modules of the model by faster ones for this machine, where they compute the same; returns in words what
    computes what. A model on another device than the CPU is left as it is.

    kv_dtype: the type of the pool's keys and values, which layers in one call write in the type they compute in.
    """
    if not any(each.device.type == "cpu" for each in module.parameters()):
        return "as loaded"
    num_parts, num_layers = use_native_modules(module)  # first, since it looks for linear layers that are not packed
    num_quantised = sum(isinstance(each, QuantisedLinear) for each in module.modules())
    ways = {**pack_linears(module), "quantised.c": num_quantised}
    linears = ", ".join(f"{count} by {way}" for way, count in sorted(ways.items()) if count)
    native = kernels()
    named = ""
    if native is not None:
        # Last, since it calls what computes the linear layers.
        num_joined = join_layers(module, native) if kv_dtype == _dtype_of_most(module) else 0
        layers = f"{num_layers} whole layers" + (f" ({num_joined} in one call)" if num_joined else "")
        named = f"{native.name} kernels: {num_parts} norms and gates, {layers}; "
    words = f"{named}linear layers: {linears or 'none'}"
    logger.info("%s", words)
    return words


@torch.inference_mode()
def use_native_modules(model: nn.Module) -> tuple[int, int]:
    """Replaces norms, gated MLPs and decoder layers of the model by ones that call the kernels in C.

    Returns how many norms and MLPs it replaced, and how many layers; both are 0 if there are no kernels for the type.
    """
    native, dtype = kernels(), _dtype_of_most(model)
    if native is None or dtype not in DTYPES:
        return 0, 0
    parts = replace_modules(model, lambda module: _norm_for(module, native, dtype) or _mlp_for(module, native, dtype))
    return parts, replace_modules(model, lambda module: layer_for(module, native))


def _norm_for(module: nn.Module, native: Kernels, dtype: torch.dtype) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
        return None
    if not isinstance(weight, Tensor) or not _usable(weight, dtype):
        return None
    inputs = _random(dtype, 3, weight.shape[-1]) * 3
    for offset in (0.0, 1.0):
        candidate = NativeRMSNorm(weight.detach(), epsilon, offset, native)
        if _agree(candidate, module, inputs):
            return candidate
    return None


def _mlp_for(module: nn.Module, native: Kernels, dtype: torch.dtype) -> nn.Module | None:
    gate = getattr(module, "gate_proj", None)
    if (
        not isinstance(gate, nn.Linear | QuantisedLinear)
        or not hasattr(module, "up_proj")
        or not hasattr(module, "down_proj")
    ):
        return None
    if not _usable(gate.weight, dtype):
        return None
    candidate = NativeGatedMLP(module, native)
    return candidate if _agree(candidate, module, _random(dtype, 3, gate.in_features)) else None


def _dtype_of_most(model: nn.Module) -> torch.dtype | None:
    """Returns the dtype of most of the model's numbers. Modules that are kept in another, as some norms are in float32,
    get inputs of this one."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else None


def _usable(weight: Tensor, dtype: torch.dtype) -> bool:
    return weight.device.type == "cpu" and weight.dtype == dtype


def _random(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _agree(candidate: nn.Module, module: nn.Module, inputs: Tensor) -> bool:
    difference = relative_difference(candidate(inputs), module(inputs))
    rounds_inputs = any(isinstance(each, QuantisedLinear) for each in module.modules())
    if difference <= largest_difference(inputs.dtype, rounds_inputs=rounds_inputs):
        return True
    logger.debug("a %s is not replaced: it differs by %.2g", type(module).__name__, difference)
    return False
