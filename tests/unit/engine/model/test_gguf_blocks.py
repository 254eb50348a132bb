"""Tests that blocks of GGUF files mean what the gguf package says they mean, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from services.engine.model.gguf_blocks import KINDS, grouped_weights

OUT, IN = 5, 512


def some_rows(kind: str) -> torch.Tensor:
    """Random blocks; whatever is read as a number of 16 bits is finite, and some of them are subnormal."""
    size = KINDS[kind][0]
    generator = np.random.default_rng(0)
    num_blocks = OUT * IN // quants.GGML_QUANT_SIZES[GGMLQuantizationType[kind]][0]
    blocks = generator.integers(0, 256, (num_blocks, size), dtype=np.uint8)
    numbers = generator.standard_normal((num_blocks, 2)).astype(np.float16)
    numbers[::3] *= np.float16(1e-6)
    at = 208 if kind == "Q6_K" else 0
    count = min(4, size - at) if kind in ("Q4_1", "Q5_1", "Q4_K", "Q5_K") else 2
    blocks[:, at : at + count] = numbers.view(np.uint8)[:, :count]
    return torch.from_numpy(blocks.reshape(OUT, -1))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_rounded_again(kind: str) -> None:
    rows = some_rows(kind)
    found = grouped_weights(kind, rows, IN)
    expected = torch.from_numpy(quants.dequantize(rows.numpy(), GGMLQuantizationType[kind]))
    assert found.out_features == OUT
    assert torch.equal(found.dequantised(), expected.float())
    assert found.bits == (4 if "4" in kind else 8)
    assert found.bits == 8 or (found.values.min() >= 0 and found.values.max() <= 15)
