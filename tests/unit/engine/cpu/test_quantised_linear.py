"""Tests quantised linear layers: with the kernels and without them they compute the same."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import linear

from services.engine.cpu import quantised_linear
from services.engine.cpu.quantised_linear import QuantisedLinear, side_by_side
from services.engine.model.grouped_weights import round_inputs, round_weights
from services.engine.native.bindings import Kernels, kernels

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def layer(out_features: int, bits: int, dtype: torch.dtype, *, bias: bool = True) -> QuantisedLinear:
    generator = torch.Generator().manual_seed(out_features)
    weight = torch.randn(out_features, 70, generator=generator).to(dtype)
    return QuantisedLinear(round_weights(weight, bits), weight[:, 0].clone() if bias else None, weight)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("built", [True, False])
def test_against_torch(bits: int, dtype: torch.dtype, built: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if built and kernels() is None:
        pytest.skip("the kernels were not built here")
    if not built:
        monkeypatch.setattr(quantised_linear, "kernels", lambda: None)
    found = layer(33, bits, dtype)
    assert (found.weight.dtype, found.weight.numel(), found.in_features, found.out_features) == (dtype, 0, 70, 33)
    assert found.nbytes < 48 * 96 * 2
    inputs = torch.randn(2, 5, 70).to(dtype)
    outputs = found(inputs)
    assert outputs.dtype == dtype
    expected = linear(round_inputs(inputs), found.grouped.dequantised(), found.bias.float()).to(dtype)
    torch.testing.assert_close(outputs, expected, rtol=1e-2 if dtype == torch.bfloat16 else 2e-3, atol=2e-2)
    assert found(inputs[:0]).shape == (0, 5, 33)


def test_a_product_that_disagrees_is_left_to_torch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if kernels() is None:
        pytest.skip("the kernels were not built here")
    right = layer(20, 4, torch.float32)
    original = Kernels.quantised_linear
    monkeypatch.setattr(Kernels, "quantised_linear", lambda *arguments: original(*arguments) * 1.01)
    other = layer(20, 4, torch.float32)
    assert "a product of 4-bit weights differs by 0.01" in caplog.text
    monkeypatch.undo()
    inputs = torch.randn(4, 70)
    torch.testing.assert_close(other(inputs), right(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_layers_side_by_side(bits: int) -> None:
    one, other = layer(20, bits, torch.bfloat16), layer(7, bits, torch.bfloat16, bias=False)
    both = side_by_side([one, other])
    inputs = torch.randn(3, 70).bfloat16()
    assert torch.equal(both(inputs), torch.cat((one(inputs), other(inputs)), dim=1))
    different = layer(7, 12 - bits, torch.bfloat16)
    assert torch.equal(side_by_side([one, different])(inputs), torch.cat((one(inputs), different(inputs)), dim=1))
