"""Puts native modules in place of a model's own.

An optimisation only: a module is replaced where its own output and the kernel's agree, whatever its class is called.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from services.engine.native.bindings import Kernels, kernels
from services.engine.native.decoder_layer import layer_for
from services.engine.native.modules import NativeGatedMLP, NativeRMSNorm
from services.engine.replacement import relative_difference, replace_modules

_TOLERANCE = 0.01
"""Of the root mean square difference, relative to the output's: roundings of bfloat16. Another
activation or form of norm differs by far more."""


@torch.inference_mode()
def use_native_modules(model: nn.Module) -> tuple[int, int]:
    """Replaces what it can in the model; returns how many norms and gates, and how many whole layers."""
    native = kernels()
    if native is None:
        return 0, 0
    parts = replace_modules(model, lambda module: _norm_for(module, native) or _mlp_for(module, native))
    return parts, replace_modules(model, lambda module: layer_for(module, native))


def _norm_for(module: nn.Module, native: Kernels) -> nn.Module | None:
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not type(module).__name__.endswith("RMSNorm") or not isinstance(epsilon, float):
        return None
    if not isinstance(weight, Tensor) or not _usable(weight):
        return None
    inputs = _random(3, weight.shape[-1]) * 3
    for offset in (0.0, 1.0):
        candidate = NativeRMSNorm(weight.detach(), epsilon, offset, native)
        if _agree(candidate, module, inputs):
            return candidate
    return None


def _mlp_for(module: nn.Module, native: Kernels) -> nn.Module | None:
    gate = getattr(module, "gate_proj", None)
    if not isinstance(gate, nn.Linear) or not hasattr(module, "up_proj") or not hasattr(module, "down_proj"):
        return None
    if not _usable(gate.weight):
        return None
    candidate = NativeGatedMLP(module, native)
    return candidate if _agree(candidate, module, _random(3, gate.in_features)) else None


def _usable(weight: Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.bfloat16


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).bfloat16()


def _agree(candidate: Callable[[Tensor], Tensor], module: Callable[[Tensor], Tensor], inputs: Tensor) -> bool:
    return relative_difference(candidate(inputs), module(inputs)) <= _TOLERANCE
