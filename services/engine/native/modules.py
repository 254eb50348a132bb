"""Root mean square norms and gated MLPs, each in one kernel instead of many operators, on CPUs in bfloat16.

An optimisation only: a module is replaced where its own output and the kernel's agree, whatever its class is called.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from services.engine.native.bindings import Kernels, kernels

logger = logging.getLogger(__name__)

_TOLERANCE = 0.01
"""Of the root mean square difference, relative to the output's: roundings of bfloat16. Another
activation or form of norm differs by far more."""


class NativeRMSNorm(nn.Module):
    """offset 0: weight * normalised; 1: (1 + weight) * normalised, as Gemma has it."""

    def __init__(self, weight: Tensor, epsilon: float, offset: float, native: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self._epsilon, self._offset, self._native = epsilon, offset, native

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]"""
        return self._native.rms_norm(inputs.contiguous(), self.weight, self._epsilon, self._offset)


class NativeGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, mlp: nn.Module, native: Kernels) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            mlp.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        self._native = native

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., hidden] -> [..., hidden]"""
        gated = self._native.silu_gate(self.gate_proj(inputs), self.up_proj(inputs))
        outputs: Tensor = self.down_proj(gated)
        return outputs


@torch.inference_mode()
def use_native_modules(model: nn.Module) -> int:
    """Replaces what it can in the model; returns how many modules."""
    native = kernels()
    if native is None:
        return 0
    count = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            replacement = _norm_for(child, native) or _mlp_for(child, native)
            if replacement is not None:
                setattr(parent, name, replacement)
                count += 1
    return count


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
    found, expected = candidate(inputs).float(), module(inputs).float()
    return bool((found - expected).norm() <= _TOLERANCE * expected.norm())
