"""Root mean square norms and gated MLPs, each in one kernel instead of many operators, on CPUs in bfloat16."""

from __future__ import annotations

from torch import Tensor, nn

from services.engine.native.bindings import Kernels


class NativeRMSNorm(nn.Module):
    """offset 0: weight * normalised; 1: (1 + weight) * normalised, as Gemma has it."""

    def __init__(self, weight: Tensor, epsilon: float, offset: float, native: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon, self.offset, self._native = epsilon, offset, native

    def forward(self, inputs: Tensor) -> Tensor:
        """[..., dim] -> [..., dim]"""
        return self._native.rms_norm(inputs.contiguous(), self.weight, self.epsilon, self.offset)


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
