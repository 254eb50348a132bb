"""Computes root mean square norms and the gates of MLPs in one kernel each, on CPUs.

Owns: the modules that call these kernels. Never: which modules of a model they replace (`fast_paths`).
"""

from __future__ import annotations

from torch import Tensor, nn

from services.engine.native.bindings import Kernels


class NativeRMSNorm(nn.Module):
    """Computes a root mean square norm (arXiv 1910.07467).

    The normalised input is multiplied by weight if offset is 0, by 1 + weight if it is 1 (Gemma).
    """

    def __init__(self, weight: Tensor, epsilon: float, offset: float, native: Kernels) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.epsilon, self.offset, self._native = epsilon, offset, native

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the norm of inputs [..., dim], in the same shape."""
        return self._native.rms_norm(inputs.contiguous(), self.weight, self.epsilon, self.offset)


class NativeGatedMLP(nn.Module):
    """Computes a gated MLP, down(silu(gate(x)) * up(x)) (SwiGLU, arXiv 2002.05202)."""

    def __init__(self, mlp: nn.Module, native: Kernels) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = (
            mlp.get_submodule(name) for name in ("gate_proj", "up_proj", "down_proj")
        )
        self._native = native

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the output for inputs [..., hidden_size], in the same shape."""
        gated = self._native.silu_gate(self.gate_proj(inputs), self.up_proj(inputs))
        outputs: Tensor = self.down_proj(gated)
        return outputs
