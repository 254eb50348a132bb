"""Products by weights of 4 and 8 bits, against whole numbers in float64; on every instruction set of this machine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from services.engine.cpu.quantised_linear import pack, unpack
from services.engine.model.grouped_weights import GroupedWeights, joined, round_inputs, round_weights
from services.engine.native.bindings import Kernels
from services.engine.native.instruction_sets import usable

SHAPES = [(576, 48), (64, 96), (33, 17), (100, 5), (31, 1), (1536, 20)]


def forms(in_features: int, out_features: int) -> dict[str, GroupedWeights]:
    """Returns weights of each form, with the largest and smallest values that it can have."""
    generator = torch.Generator().manual_seed(in_features)
    weight = torch.randn(out_features, in_features, generator=generator)
    eight, four = round_weights(weight, 8), round_weights(weight, 4)
    groups = eight.scales.shape[1]

    def values(least: int, most: int) -> Tensor:
        found = torch.randint(least, most + 1, eight.values.shape, generator=generator)
        found[0], found[-1] = least, most
        found[:, in_features:] = 0
        return found.to(torch.int8)

    def factors(count: int) -> Tensor:
        return torch.randn(out_features, count, generator=generator)

    return {
        "int8": eight,
        "int4": four,
        "8 bits": GroupedWeights(values(-128, 127), factors(groups), None, 8, 32, in_features),
        "8 bits, minimums": GroupedWeights(values(0, 31), factors(groups), factors(groups), 8, 32, in_features),
        "8 bits, groups of 16": GroupedWeights(values(-128, 127), factors(2 * groups), None, 8, 16, in_features),
        "4 bits, wide scales": GroupedWeights(values(0, 15), factors(groups), factors(groups), 4, 32, in_features),
        "4 bits, tiny scales of 16 bits": GroupedWeights(
            values(0, 15), (1e-6 * factors(groups)).half().float(), factors(groups).half().float(), 4, 32, in_features
        ),
    }


@pytest.mark.parametrize(("in_features", "out_features"), SHAPES)
def test_products_are_exact_but_for_sums_of_floats(native: Kernels, in_features: int, out_features: int) -> None:
    bias = torch.randn(out_features)
    inputs = torch.randn(70, in_features)
    inputs[3], inputs[4] = 0, torch.sign(inputs[4])  # as large as 8 bits allow
    inputs[5] *= 1e30
    for name, weights in forms(in_features, out_features).items():
        packed = pack(weights)
        exact = round_inputs(inputs).double() @ weights.dequantised().double().T
        for rows in (1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 70):
            for added in (None, bias):
                found = native.quantised_linear(inputs[:rows], packed, added)
                wanted = exact[:rows] + (0 if added is None else added)
                size = round_inputs(inputs[:rows]).double().abs() @ weights.dequantised().double().abs().T
                largest = weights.scales.abs().max() * 256
                bound = 2e-6 * (size + inputs[:rows].double().abs().sum(1, keepdim=True) * largest + 1)
                assert ((found - wanted).abs() <= bound).all(), (name, rows)
        narrow = native.quantised_linear(inputs.bfloat16(), packed, bias)
        wide = native.quantised_linear(inputs.bfloat16().float(), packed, bias)
        assert narrow.dtype == torch.bfloat16
        assert torch.equal(narrow, wide.bfloat16()), name


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_rows_do_not_depend_on_each_other(native: Kernels, threads: int) -> None:
    """They do not depend on the number of threads either; 1500 rows are more than stay in a cache at once."""
    before = torch.get_num_threads()
    inputs = torch.randn(1500, 544)
    torch.set_num_threads(threads)
    try:
        for name, weights in forms(544, 40).items():
            packed = pack(weights)
            together = native.quantised_linear(inputs.view(2, 750, 544), packed, None).view(1500, 40)
            for row in (0, 5, 700, 1499):
                assert torch.equal(native.quantised_linear(inputs[row], packed, None), together[row]), name
            assert native.quantised_linear(inputs[:0], packed, None).shape == (0, 40)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_visible(native: Kernels, bad: float, dtype: torch.dtype) -> None:
    inputs = torch.randn(3, 100, dtype=dtype)
    inputs[1, 99] = bad
    for name, weights in forms(100, 20).items():
        found = native.quantised_linear(inputs, pack(weights), None)
        assert found[1].isnan().all(), name
        assert found[[0, 2]].isfinite().all(), name


@pytest.mark.parametrize("size", [1e-35, 5e-37, 1e-37, 2e-38, 1e-41])
def test_tiny_inputs_have_tiny_products(native: Kernels, size: float) -> None:
    """127 divided by the size of some of them is infinite in float32."""
    inputs = torch.randn(3, 100).clamp(-3, 3) * size
    assert (round_inputs(inputs) - inputs).abs().max() <= 3 * size
    for name, weights in forms(100, 20).items():
        most = 100 * 6 * size * weights.dequantised().double().abs().max().item()
        found = native.quantised_linear(inputs, pack(weights), None)
        assert found.double().abs().max().item() <= most, name


def test_instruction_sets_agree() -> None:
    built = [each for each in usable() if each.shared_object.exists()]
    if len(built) < 2:
        pytest.skip("built for fewer than two here: BATON_KERNELS=processor python -m services.engine.native.build")
    inputs = torch.randn(9, 576)
    for name, weights in forms(576, 40).items():
        packed = pack(weights)
        first, *others = (
            Kernels(each.name, each.shared_object).quantised_linear(inputs, packed, None) for each in built
        )
        for other in others:
            torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5 * first.abs().max().item(), msg=name)


@pytest.mark.parametrize(("bits", "most"), [(8, 0.007), (4, 0.11)])
def test_rounding_weights(bits: int, most: float) -> None:
    weight = torch.randn(50, 100, generator=torch.Generator().manual_seed(0))
    weight[7] = 0
    weight[8] = 3.0
    rounded = round_weights(weight, bits)
    found = rounded.dequantised()
    assert found.shape == weight.shape
    assert ((found - weight).norm() / weight.norm()).item() < most
    assert torch.equal(found[7], weight[7])
    torch.testing.assert_close(found[8], weight[8])
    narrow = weight.bfloat16()
    assert torch.equal(round_weights(narrow, bits).dequantised(), round_weights(narrow.float(), bits).dequantised())


def test_rows_are_rounded_one_by_one() -> None:
    weight = torch.randn(6, 40)
    for bits in (4, 8):
        together = round_weights(weight, bits)
        parts = joined([round_weights(weight[:2], bits), round_weights(weight[2:], bits)])
        assert parts is not None
        assert torch.equal(parts.dequantised(), together.dequantised())
    assert joined([round_weights(weight, 4), round_weights(weight, 8)]) is None


def test_a_narrower_range_is_tried() -> None:
    """A weight far from all others must not cost these their precision."""
    weight = torch.randn(200, 32, generator=torch.Generator().manual_seed(0))
    lowest, highest = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    scale = (highest - lowest) / 15
    plain = ((weight - lowest) / scale).round() * scale + lowest
    assert (round_weights(weight, 4).dequantised() - weight).norm() < 0.97 * (plain - weight).norm()


def test_packing_loses_nothing() -> None:
    for name, weights in forms(100, 37).items():
        packed = pack(weights)
        again = unpack(packed)
        assert (again.bits, again.group, again.in_features) == (weights.bits, weights.group, weights.in_features)
        assert torch.equal(again.values, weights.values), name
        assert torch.equal(again.scales, weights.scales), name
        assert (again.minimums is None) == (weights.minimums is None)
        assert again.minimums is None or torch.equal(again.minimums, weights.minimums), name
        half = name in ("int4", "4 bits, tiny scales of 16 bits")
        assert packed.half_scales == half
        factors = packed.panels.shape[2] - (256 if weights.bits == 4 else 512)
        assert factors == (64 if half or name in ("int8", "8 bits") else 128)
