"""Tests that GPTQ and AWQ layers mean what the published layouts say, bit for bit, and which of them are read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear
from transformers import PreTrainedConfig

from services.core.errors import UnsupportedModel
from services.engine.cpu.quantised_linear import QuantisedLinear, side_by_side
from services.engine.model.gptq_awq import SavedLinear, packing_of
from services.engine.model.gptq_awq_loading import saved_layers
from services.engine.model.grouped_weights import round_inputs
from tests.support.checkpoints import Form, pack, round_matrix

IN, OUT = 160, 24
FORMS = [
    Form(),
    Form(sym=True, group_size=64),  # the last group is of 32
    Form(group_size=128, version="gptq_v2"),
    Form(group_size=-1),
    Form(desc_act=True),
    Form(desc_act=True, group_size=-1, sym=True),
    Form(bits=8),
    Form(bits=8, sym=True, desc_act=True),
    Form("awq"),
    Form("awq", group_size=-1),
]


def saved(form: Form, seed: int = 0) -> tuple[SavedLinear, torch.Tensor]:
    """Returns a layer of random weights as a checkpoint keeps it, and the weights that it stands for."""
    weight = np.random.default_rng(seed).standard_normal((OUT, IN)) * 0.1 + 0.02
    rounded = round_matrix(weight, form)
    layer = SavedLinear(packing_of(form.fields()), IN, OUT, None)
    layer.fill(pack(rounded, form))
    return layer, torch.from_numpy(rounded.dequantised()).float()


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_those_that_were_packed(form: Form) -> None:
    layer, weights = saved(form)
    assert torch.equal(layer.dequantised(), weights)
    grouped = layer.grouped()
    assert grouped is not None
    assert torch.equal(grouped.dequantised(), weights)
    assert (grouped.bits, grouped.in_features, grouped.out_features) == (form.bits, IN, OUT)
    assert (grouped.order is not None) == (form.desc_act and form.group_size != -1)
    assert (grouped.minimums is None) == (form.bits == 8 and form.sym)


@pytest.mark.parametrize("form", FORMS)
def test_a_layer_computes_with_them(form: Form) -> None:
    """Inputs are rounded in groups of 32 in the order in which weights have their scales."""
    layer, weights = saved(form)
    grouped = layer.grouped()
    assert grouped is not None
    bias = torch.arange(OUT) / 10
    found = QuantisedLinear(grouped, bias, bias)
    assert torch.equal(found.grouped.dequantised(), weights)
    inputs = torch.randn(2, 5, IN, generator=torch.Generator().manual_seed(1))
    order = torch.arange(IN) if grouped.order is None else grouped.order
    expected = linear(round_inputs(inputs[..., order]), weights[:, order], bias)
    torch.testing.assert_close(found(inputs), expected, rtol=1e-4, atol=1e-4)


def test_layers_stand_side_by_side_only_if_their_inputs_have_the_same_order() -> None:
    one, other = (saved(Form(desc_act=True), seed)[0].grouped() for seed in range(2))
    plain = saved(Form())[0].grouped()
    assert one is not None
    assert other is not None
    assert plain is not None
    like, inputs = torch.zeros(0), torch.randn(3, IN, generator=torch.Generator().manual_seed(2))
    for second, joins in ((other, True), (plain, False)):
        layers = [QuantisedLinear(each, None, like) for each in (one, second)]
        both = side_by_side(layers)
        assert isinstance(both, QuantisedLinear) == joins
        expected = torch.cat([layer(inputs) for layer in layers], dim=1)
        torch.testing.assert_close(both(inputs), expected, rtol=1e-5, atol=1e-5)


def test_the_order_of_numbers_in_a_word() -> None:
    """GPTQ's word has 8 inputs of an output from the lowest bits up; AWQ's has the outputs 0, 2, 4, 6, 1, 3, 5, 7."""
    ones = torch.ones(1, 8, dtype=torch.float16)
    gptq = SavedLinear(packing_of({"quant_method": "gptq", "bits": 4, "group_size": -1}), 8, 8, None)
    words = torch.full((1, 8), 0x76543210, dtype=torch.int32)
    gptq.fill({"qweight": words, "qzeros": torch.tensor([[0x33333333]], dtype=torch.int32), "scales": ones})
    assert gptq.dequantised().tolist() == [[value - 4.0 for value in range(8)]] * 8
    awq = SavedLinear(packing_of({"quant_method": "awq", "bits": 4, "group_size": -1}), 8, 8, None)
    words = torch.full((8, 1), 0x75316420, dtype=torch.int32)
    awq.fill({"qweight": words, "qzeros": torch.tensor([[0x33333333]], dtype=torch.int32), "scales": ones})
    assert awq.dequantised().T.tolist() == [[value - 3.0 for value in range(8)]] * 8


def test_the_first_version_keeps_a_zero_point_of_0_as_the_largest_number() -> None:
    layer = SavedLinear(packing_of(Form(group_size=-1).fields()), 8, 8, None)
    zeros, scales = torch.full((1, 1), -1, dtype=torch.int32), torch.ones(1, 8, dtype=torch.float16)
    layer.fill({"qweight": torch.zeros(1, 8, dtype=torch.int32), "qzeros": zeros, "scales": scales})
    assert not layer.dequantised().any()


def test_groups_that_divide_32_inputs_are_not_kept() -> None:
    layer, weights = saved(Form(group_size=16))
    assert layer.grouped() is None
    assert torch.equal(layer.dequantised(), weights)


def test_an_input_of_no_group() -> None:
    form = Form()
    tensors = pack(round_matrix(np.ones((OUT, IN)), form), form)
    for wrong in (-1, 5, 2**31 - 1):
        tensors["g_idx"][7] = wrong
        with pytest.raises(UnsupportedModel, match="g_idx has groups beyond the last"):
            SavedLinear(packing_of(form.fields()), IN, OUT, None).fill(tensors)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"quant_method": "gptq", "bits": 3}, "GPTQ weights of 3 bits are not supported, only those of 4 and 8"),
        ({"quant_method": "gptq", "bits": 2}, "GPTQ weights of 2 bits"),
        ({"quant_method": "gptq"}, "GPTQ weights of None bits"),
        ({"quant_method": "awq", "bits": 8}, "AWQ weights of 8 bits are not supported, only those of 4"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ weights in the layout 'gemv' .* only gemm"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin' .* only gptq and gptq_v2"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "groups of 0 inputs"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "groups of '128' inputs"),
        ({"quant_method": "gptq", "bits": [4]}, r"GPTQ weights of \[4\] bits"),
        ({"quant_method": "gptq", "bits": 4.0}, r"GPTQ weights of 4\.0 bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 10**30}, "groups of 10+ inputs"),
    ],
)
def test_what_is_not_read(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UnsupportedModel, match=reason):
        packing_of(fields)


def test_a_method_that_is_no_word_is_none_of_these() -> None:
    config = PreTrainedConfig()
    config.quantization_config = {"quant_method": ["gptq"], "bits": 4}
    assert saved_layers(config, Path()) is None


def test_the_words_for_a_layout() -> None:
    assert packing_of({"quant_method": "awq", "bits": 4, "version": "GEMM"}).scheme == "AWQ 4-bit (groups of 128)"
    assert packing_of(Form(group_size=-1).fields()).scheme == "GPTQ 4-bit (one group)"
    assert [packing_of(Form(version=version).fields()).zero_offset for version in ("", "gptq", "gptq_v2")] == [1, 1, 0]
