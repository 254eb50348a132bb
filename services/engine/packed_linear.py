"""Linear layers with weights in oneDNN's own layout: half the time of plain ones for few rows, on CPUs in bfloat16.

An optimisation only: each layer is checked against the plain one, which stays where it disagrees or the operators are
missing.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)

_TOLERANCE = 0.02
"""Of the root mean square difference, relative to the output's: a few roundings of bfloat16."""


class PackedLinear(nn.Module):
    """Takes the place of an `nn.Linear`, whose weight can then be freed."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        # For model code that asks the weight for its dtype or device.
        self.weight = nn.Parameter(linear.weight.new_empty(0), requires_grad=False)
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach())

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.numel() == 0:
            return inputs.new_empty(*inputs.shape[:-1], self.out_features)
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(inputs, self._packed, self.bias, "none", [], "")
        return outputs


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replaces what it can in the model; returns how many layers."""
    num_packed = 0
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and _can_pack(child):
                packed = _pack(child)
                if packed is not None:
                    setattr(parent, name, packed)
                    num_packed += 1
    return num_packed


def _can_pack(linear: nn.Linear) -> bool:
    return linear.weight.device.type == "cpu" and linear.weight.dtype == torch.bfloat16


def _pack(linear: nn.Linear) -> PackedLinear | None:
    try:
        packed = PackedLinear(linear)
        inputs = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
        found, expected = packed(inputs).float(), linear(inputs).float()
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("linear layers stay plain: %s", error)
        return None
    difference = (found - expected).norm() / expected.norm()
    if not difference <= _TOLERANCE:
        logger.warning("a packed linear layer differs by %.2g and stays plain", difference)
        return None
    return packed
