"""Tests linear.c against float64, in every type of weights and inputs, on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from services.engine.cpu.packed_linear import NativeLinear, narrowest_dtype, pack
from services.engine.native.bindings import DTYPES, Kernels

SHAPES = [(2, 1), (30, 33), (64, 96), (576, 40), (1030, 64)]
"""Inputs and outputs: one panel and several, whole and not, and more inputs than a block has."""
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 12, 13, 25, 97, 200)
"""Every tile of few rows, what is left after tiles, and more than one block of rows."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def weights_and_inputs(shape: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    in_features, out_features = shape
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
    bias = torch.randn(out_features, generator=generator)
    return weight, bias, torch.randn(max(ROWS), in_features, generator=generator)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_products(native: Kernels, shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, bias, wide = weights_and_inputs(shape, dtype)
    panels = pack(weight)
    for inputs in {torch.float32: wide, dtype: wide.to(dtype)}.values():
        exact = inputs.double() @ weight.double().T
        size = inputs.double().abs() @ weight.double().abs().T + bias.abs()
        for rows in ROWS:
            for added in (None, bias):
                found = native.linear(inputs[:rows], panels, added, shape[1])
                assert found.dtype == inputs.dtype
                wanted = exact[:rows] + (0 if added is None else added)
                # Sums of float32 in any order, and one rounding of the result.
                bound = 2e-6 * size[:rows] + ROUNDING[inputs.dtype] * wanted.abs() + 1e-7
                assert ((found.double() - wanted).abs() <= bound).all(), (rows, inputs.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(native: Kernels, dtype: torch.dtype, threads: int) -> None:
    weight, bias, wide = weights_and_inputs((64, 96), dtype)
    panels, inputs = pack(weight), wide.to(dtype).view(2, 100, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = native.linear(inputs, panels, bias, 96)
        torch.set_num_threads(threads)
        assert torch.equal(native.linear(inputs, panels, bias, 96), alone)
        assert native.linear(inputs[:0], panels, bias, 96).shape == (0, 100, 96)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_beyond_the_last_are_not_written(native: Kernels, dtype: torch.dtype) -> None:
    weight, _, wide = weights_and_inputs((30, 33), dtype)
    for rows in (1, 3, 20):
        together = native.linear(wide[:rows].to(dtype), pack(weight), None, 33)
        again = torch.stack([native.linear(row.to(dtype), pack(weight), None, 33) for row in wide[:rows, None]])
        torch.testing.assert_close(together, again[:, 0], rtol=2 * ROUNDING[dtype], atol=1e-4)


@pytest.mark.parametrize(
    ("saved", "narrowest"),
    [(torch.bfloat16, torch.bfloat16), (torch.float16, torch.float16), (torch.float32, torch.float32)],
)
def test_float_weights_are_kept_in_as_few_bits_as_they_have(
    native: Kernels, saved: torch.dtype, narrowest: torch.dtype
) -> None:
    layer = nn.Linear(64, 48)
    layer.weight = nn.Parameter(layer.weight.detach().to(saved).float(), requires_grad=False)
    assert narrowest_dtype(layer.weight) == narrowest
    inputs = torch.randn(7, 64)
    with torch.inference_mode():
        torch.testing.assert_close(NativeLinear(layer, native)(inputs), layer(inputs), rtol=1e-5, atol=1e-6)
