"""Linear layers with weights in oneDNN's own layout: half the time of plain ones for few rows, on CPUs in bfloat16.

An optimisation only: each layer is checked against the plain one, which stays where it disagrees or the operators are
missing.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor, nn

from services.engine.replacement import relative_difference, replace_modules

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
    return replace_modules(model, _pack)


def _pack(linear: nn.Module) -> PackedLinear | None:
    if type(linear) is not nn.Linear or linear.weight.device.type != "cpu" or linear.weight.dtype != torch.bfloat16:
        return None
    try:
        packed = PackedLinear(linear)
        inputs = torch.randn(3, linear.in_features, generator=torch.Generator().manual_seed(0)).bfloat16()
        difference = relative_difference(packed(inputs), linear(inputs))
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("linear layers stay plain: %s", error)
        return None
    if not difference <= _TOLERANCE:
        logger.warning("a packed linear layer differs by %.2g and stays plain", difference)
        return None
    return packed
