"""Linear layers get the fastest way that computes the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from services.engine.cpu import linear_plan
from services.engine.cpu.linear_plan import pack_linears
from services.engine.native.bindings import DTYPES

WAYS = ("torch", "oneDNN", "linear.c")


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


@pytest.mark.parametrize("fastest", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_way_may_be_the_fastest(fastest: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the others took a second more."""

    def time(made: dict[str, nn.Module], rows: int, layer: nn.Linear) -> dict[str, float]:
        return {name: 0.0 if name == fastest else 1.0 for name in made}

    monkeypatch.setattr(linear_plan, "_time", time)
    one, inputs = model(dtype), torch.randn(5, 48).to(dtype)
    with torch.inference_mode():
        expected = one(inputs)
        counts = pack_linears(one)
        if fastest not in counts:
            pytest.skip(f"{fastest} does not compute {dtype} here")
        assert counts == {fastest: 2}
        torch.testing.assert_close(one(inputs), expected, atol=0.02, rtol=0.02)


def test_a_way_that_computes_something_else_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Wrong(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            return super().forward(inputs) * 1.01

    def wrong(layer: nn.Linear) -> nn.Module:
        other = Wrong(layer.in_features, layer.out_features)
        other.weight, other.bias = layer.weight, layer.bias
        return other

    monkeypatch.setattr(linear_plan, "_ways", lambda: {"wrong": wrong})
    assert pack_linears(nn.Sequential(nn.Linear(8, 8))) == {"torch": 1}


def test_layers_of_other_kinds_stay() -> None:
    assert pack_linears(nn.Linear(4, 4)) == {}
    assert pack_linears(nn.Sequential(nn.Linear(4, 4, dtype=torch.float64), nn.Conv1d(4, 4, 1))) == {}
