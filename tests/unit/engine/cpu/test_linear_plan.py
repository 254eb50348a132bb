"""Tests that linear layers get the fastest way that computes the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from services.engine.cpu import linear_plan
from services.engine.cpu.linear_plan import pack_linears
from services.engine.cpu.packed_linear import agrees
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
    """The others take a second more, as far as the plan is told."""

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


class Timed:
    """Counts products, and lets one way be the fastest."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, fastest: str) -> None:
        self.fastest = fastest
        self.num_calls = 0
        monkeypatch.setattr(linear_plan, "_time", self._time)

    def _time(self, made: dict[str, nn.Module], rows: int, layer: nn.Linear) -> dict[str, float]:
        self.num_calls += 1
        return {name: float(name != self.fastest) for name in made}


def test_a_plan_is_made_once_for_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = Timed(monkeypatch, "oneDNN")
    assert pack_linears(model(torch.float32), tmp_path) == {"oneDNN": 2}
    num_calls, timed.fastest = timed.num_calls, "torch"
    assert pack_linears(model(torch.float32), tmp_path) == {"oneDNN": 2}
    assert timed.num_calls == num_calls, "workers of one host compute alike, and only the first of them times"
    # Other weights (those of 16 bits are read faster), layers or instructions are another matter.
    assert pack_linears(model(torch.bfloat16).float(), tmp_path) == {"torch": 2}
    assert pack_linears(nn.Sequential(nn.Linear(8, 8)), tmp_path) == {"torch": 1}
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert pack_linears(model(torch.float32), tmp_path) == {"torch": 2}
    assert len(list(tmp_path.glob("*.json"))) == 4


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"ways": {}}', '{"ways": 1}'])
def test_a_plan_that_makes_no_sense_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str
) -> None:
    timed = Timed(monkeypatch, "oneDNN")
    pack_linears(model(torch.float32), tmp_path)
    (entry,) = tmp_path.glob("*.json")
    entry.write_text(content)
    timed.fastest = "torch"
    assert pack_linears(model(torch.float32), tmp_path) == {"torch": 2}


def test_a_way_that_is_not_there_is_left_to_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Timed(monkeypatch, "oneDNN")
    pack_linears(model(torch.float32), tmp_path)
    (entry,) = tmp_path.glob("*.json")
    entry.write_text(entry.read_text().replace("oneDNN", "gone"))
    assert pack_linears(model(torch.float32), tmp_path) == {"torch": 2}


def test_a_folder_that_cannot_be_written_costs_a_timing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Containers only read their volume: each start times, and no warning is given."""
    Timed(monkeypatch, "oneDNN")
    (tmp_path / "file").touch()
    assert pack_linears(model(torch.float32), tmp_path / "file") == {"oneDNN": 2}
    assert not caplog.records


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
