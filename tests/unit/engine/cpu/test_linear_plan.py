"""Tests that linear layers get the way that the rule says, if it computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from services.engine.cpu import linear_plan
from services.engine.cpu.linear_plan import pack_linears, way
from services.engine.cpu.packed_linear import agrees
from services.engine.native.bindings import DTYPES, kernels


def model(dtype: torch.dtype) -> nn.Sequential:
    return nn.Sequential(nn.Linear(48, 80), nn.Sequential(nn.Linear(80, 16, bias=False))).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed_layers_agree_with_plain_ones(dtype: torch.dtype) -> None:
    plain = model(dtype)
    inputs = torch.randn(2, 7, 48).to(dtype)
    with torch.inference_mode():
        expected = plain(inputs)
        counts = pack_linears(plain)
        assert sum(counts.values()) == 2
        torch.testing.assert_close(plain(inputs), expected, atol=0.02, rtol=0.02)
        assert plain(inputs[:, :0]).shape == (2, 0, 16)


@pytest.mark.parametrize(
    ("weight", "tiles", "built", "expected"),
    [
        (torch.zeros(2, 4, dtype=torch.bfloat16), True, True, "oneDNN"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), False, True, "linear.c"),
        (torch.zeros(2, 4, dtype=torch.bfloat16), False, False, "oneDNN"),
        (torch.zeros(2, 4, dtype=torch.float16), True, True, "linear.c"),
        (torch.zeros(2, 4, dtype=torch.float16), True, False, "torch"),
        (torch.full((2, 4), 0.5), True, True, "linear.c"),  # read in 16 bits
        (torch.full((2, 4), 0.1), True, True, "torch"),
        (torch.full((2, 4), 0.5), True, False, "torch"),
        (torch.full((2, 3), 0.5), True, True, "torch"),  # linear.c takes an even number
    ],
)
def test_the_fastest_way(weight: Tensor, tiles: bool, built: bool, expected: str) -> None:
    native = kernels()
    if built and native is None:
        pytest.skip("the kernels were not built here")
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight, requires_grad=False)
    assert way(layer, native if built else None, tiles=tiles) == expected


@pytest.mark.parametrize("name", ["oneDNN", "linear.c"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_way_computes_the_same(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_plan, "way", lambda *_, **__: name)
    one, inputs = model(dtype), torch.randn(5, 48).to(dtype)
    with torch.inference_mode():
        expected = one(inputs)
        counts = pack_linears(one)
        if name not in counts:
            pytest.skip(f"{name} does not compute {dtype} here")
        assert counts == {name: 2}
        torch.testing.assert_close(one(inputs), expected, atol=0.02, rtol=0.02)


def test_a_way_that_computes_something_else_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, inputs: Tensor) -> Tensor:
            return torch.nn.functional.linear(inputs, self.layer.weight, self.layer.bias) * 1.01

    monkeypatch.setattr(linear_plan, "OneDnnLinear", Wrong)
    monkeypatch.setattr(linear_plan, "way", lambda *_, **__: "oneDNN")
    assert pack_linears(nn.Sequential(nn.Linear(8, 8))) == {"torch": 1}


def test_layers_of_other_kinds_stay() -> None:
    assert pack_linears(nn.Linear(4, 4)) == {}
    assert pack_linears(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Conv1d(4, 4, 1))) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wrong", ["the last column", "three rows", "a whole tile"])
def test_a_kernel_that_is_nearly_right_is_not_used(dtype: torch.dtype, wrong: str) -> None:
    layer = nn.Linear(32, 40_000).to(dtype)

    class NearlyRight(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = layer(inputs).clone()
            if wrong == "the last column":
                outputs[:, -1] = 0
            elif len(inputs) == 3 and wrong == "three rows":
                outputs[2] = 0
            elif len(inputs) >= 12 and wrong == "a whole tile":
                outputs[11] = 0
            return outputs

    assert agrees(layer, layer)
    assert not agrees(NearlyRight(), layer)
