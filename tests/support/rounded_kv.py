"""Has transformers attend over keys and values in 8 bits, each row rounded as a pool keeps it: the plain path of
`--kv-dtype int8`."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from services.engine.attention.int8_rows import as_numbers, packed

OVER_INT8 = "eager_over_int8"
"""The attention's name for `from_pretrained`."""


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Calls the model's own eager attention, which knows its soft cap."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    found: tuple[Tensor, Tensor | None] = eager(
        module, query, *(as_numbers(packed(rows), rows.dtype) for rows in (key, value)), mask, **kwargs
    )
    return found


AttentionInterface.register(OVER_INT8, _attend)
AttentionMaskInterface.register(OVER_INT8, eager_mask)
