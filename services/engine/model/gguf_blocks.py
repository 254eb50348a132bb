"""Reads the blocks of quantised GGUF tensors as `GroupedWeights`, without rounding anything again.

The blocks are those of llama.cpp's ggml-quants: 32 weights each, or 256 with scales of their own for parts of them. All
numbers are little-endian. Products of a block's scale and a part's are exact in float32.
Owns: what the bytes of a block mean. Never: which tensors a file has (`gguf_conversion`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.engine.model.grouped_weights import GROUP, GroupedWeights


def grouped_weights(kind: str, rows: Tensor, in_features: int) -> GroupedWeights:
    """Returns the weights of rows [out_features, bytes], uint8, of a GGUF type in `KINDS`, such as "Q4_K"."""
    size, read = KINDS[kind]
    return read(rows.unflatten(1, (-1, size)), in_features)


def _halves(blocks: Tensor, at: int) -> Tensor:
    """Returns a number of 16 bits of each block in float32, [out_features, blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).float().squeeze(2)


def _nibbles(data: Tensor) -> Tensor:
    """Returns [..., 2 * bytes]: the low halves of all bytes, then the high halves."""
    return torch.cat((data & 15, data >> 4), dim=-1)


def _fifth_bits(blocks: Tensor, at: int) -> Tensor:
    """Returns 16 for each weight of a block of 32 whose bit is set, else 0. The bits stand in four bytes."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return ((blocks[:, :, at : at + 4, None] >> shifts & 1) << 4).flatten(2)


def _of_32(values: Tensor, scales: Tensor, minimums: Tensor | None, bits: int, in_features: int) -> GroupedWeights:
    return GroupedWeights(values.to(torch.int8).flatten(1), scales, minimums, bits, GROUP, in_features)


def _q4_0(blocks: Tensor, in_features: int) -> GroupedWeights:
    scales = _halves(blocks, 0)
    return _of_32(_nibbles(blocks[:, :, 2:]), scales, -8 * scales, 4, in_features)


def _q4_1(blocks: Tensor, in_features: int) -> GroupedWeights:
    return _of_32(_nibbles(blocks[:, :, 4:]), _halves(blocks, 0), _halves(blocks, 2), 4, in_features)


def _q5_0(blocks: Tensor, in_features: int) -> GroupedWeights:
    values = (_nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks, 2)).to(torch.int8) - 16
    return _of_32(values, _halves(blocks, 0), None, 8, in_features)


def _q5_1(blocks: Tensor, in_features: int) -> GroupedWeights:
    values = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks, 4)
    return _of_32(values, _halves(blocks, 0), _halves(blocks, 2), 8, in_features)


def _q8_0(blocks: Tensor, in_features: int) -> GroupedWeights:
    return _of_32(blocks[:, :, 2:].contiguous().view(torch.int8), _halves(blocks, 0), None, 8, in_features)


def _factors_of_8(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Returns scales and minimums of the eight parts of Q4_K and Q5_K, [out_features, 8 * blocks] each: 6 bits each, in
    the 12 bytes after the block's own scale and minimum."""
    first, second, third = blocks[:, :, 4:16].split(4, dim=2)
    scales = torch.cat((first & 63, (third & 15) | (first >> 2 & 48)), dim=2).float()
    minimums = torch.cat((second & 63, (third >> 4) | (second >> 2 & 48)), dim=2).float()
    scales *= _halves(blocks, 0)[:, :, None]
    minimums *= -_halves(blocks, 2)[:, :, None]
    return scales.flatten(1), minimums.flatten(1)


def _q4_k(blocks: Tensor, in_features: int) -> GroupedWeights:
    scales, minimums = _factors_of_8(blocks)
    values = _nibbles(blocks[:, :, 16:].unflatten(2, (4, 32)))
    return _of_32(values.flatten(1), scales, minimums, 4, in_features)


def _q5_k(blocks: Tensor, in_features: int) -> GroupedWeights:
    scales, minimums = _factors_of_8(blocks)
    values = _nibbles(blocks[:, :, 48:].unflatten(2, (4, 32))).unflatten(3, (2, 32)).flatten(2, 3)
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    fifth = (blocks[:, :, None, 16:48] >> shifts & 1) << 4  # [out_features, blocks, parts, 32]
    return _of_32((values | fifth).flatten(1), scales, minimums, 8, in_features)


def _q6_k(blocks: Tensor, in_features: int) -> GroupedWeights:
    low = _nibbles(blocks[:, :, :128].unflatten(2, (2, 64)))  # [out_features, blocks, 2, 128]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    high = blocks[:, :, 128:192].unflatten(2, (2, 1, 32)) >> shifts & 3  # [out_features, blocks, 2, 4, 32]
    values = (low | high.flatten(3) << 4).to(torch.int8) - 32
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8).float() * _halves(blocks, 208)[:, :, None]
    return GroupedWeights(values.flatten(1), scales.flatten(1), None, 8, 16, in_features)


_Read = Callable[[Tensor, int], GroupedWeights]
KINDS: dict[str, tuple[int, _Read]] = {
    "Q4_0": (18, _q4_0),
    "Q4_1": (20, _q4_1),
    "Q5_0": (22, _q5_0),
    "Q5_1": (24, _q5_1),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
"""The types that can be kept as they are, with the bytes of a block and how it is read."""
