"""Computes root mean square norms and the gates of MLPs in one kernel each, on CPUs."""

from __future__ import annotations

from torch import Tensor, nn

from services.engine.native.bindings import Kernels


class NativeRMSNorm(nn.Module):
    """A root mean square norm: weight * normalised with offset 0, (1 + weight) * normalised with offset 1 (Gemma)."""

    def __init__(self, weight: Tensor, epsilon: float, offset: float, native: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon, self.offset, self._native = epsilon, offset, native

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the norm of inputs [..., dim], in the same shape."""
        return self._native.rms_norm(inputs.contiguous(), self.weight, self.epsilon, self.offset)


class NativeGatedMLP(nn.Module):
    """A gated MLP, down(silu(gate(x)) * up(x)) (arXiv 2002.05202)."""

    def __init__(self, mlp: nn.Module, native: Kernels) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            mlp.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        self._native = native

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the output for inputs [..., hidden], in the same shape."""
        gated = self._native.silu_gate(self.gate_proj(inputs), self.up_proj(inputs))
        outputs: Tensor = self.down_proj(gated)
        return outputs
