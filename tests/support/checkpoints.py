"""Writes GPTQ and AWQ checkpoints of plain models, by the published layouts, in numpy and one number at a time.

Weights are rounded to nearest, group by group; what matters to tests is that each checkpoint comes with the weights
that it stands for, which `write_checkpoint` saves as a plain model beside it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of 8 consecutive ones, that stands at each place of a word, from the lowest bits up."""


@dataclass(frozen=True)
class Form:
    """Describes a way to write a checkpoint."""

    method: str = "gptq"
    bits: int = 4
    group_size: int = 32
    sym: bool = False
    desc_act: bool = False
    version: str = ""
    """GPTQ's `checkpoint_format`: "gptq", "gptq_v2", or "" for none, which means the first."""

    def fields(self) -> dict[str, Any]:
        """Returns `quantization_config`."""
        shared = {"quant_method": self.method, "bits": self.bits, "group_size": self.group_size}
        if self.method == "awq":
            return {**shared, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
        form = {"checkpoint_format": self.version} if self.version else {}
        return {**shared, "sym": self.sym, "desc_act": self.desc_act, "damp_percent": 0.01, **form}


@dataclass(frozen=True)
class Rounded:
    """Keeps a rounded matrix: a weight is scales[group, out] * (values[in, out] - zeros[group, out])."""

    values: NDArray[np.int64]
    zeros: NDArray[np.int64]
    scales: NDArray[np.float16]
    group_of: NDArray[np.int64]
    """[in]: the group of each input."""

    def dequantised(self) -> NDArray[np.float64]:
        """Returns the weights [out, in]."""
        scales, zeros = self.scales.astype(np.float64)[self.group_of], self.zeros[self.group_of]
        return (scales * (self.values - zeros)).T


def round_matrix(weight: NDArray[Any], form: Form, seed: int = 0) -> Rounded:
    """Rounds a matrix [out, in]. With `desc_act`, inputs are assigned to groups in a random order."""
    size = weight.shape[1] if form.group_size == -1 else form.group_size
    group_of = np.arange(weight.shape[1]) // size
    if form.desc_act:
        group_of = np.random.default_rng(seed).permutation(group_of)
    most, first = 2**form.bits - 1, 1 if form.version != "gptq_v2" and form.method == "gptq" else 0
    num_groups = group_of.max() + 1
    shape = (num_groups, weight.shape[0])
    scales, zeros = np.zeros(shape, np.float16), np.zeros(shape, np.int64)
    values = np.zeros(weight.shape[::-1], np.int64)
    for group in range(num_groups):
        inputs = np.flatnonzero(group_of == group)
        part = weight[:, inputs].astype(np.float64)
        if form.sym:
            scale = np.abs(part).max(1) * 2 / most
            zero = np.full(len(part), (most + 1) // 2)
        else:
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            scale = (high - low) / most
            zero = np.clip(np.round(-low / scale), first, most)  # the first version has no zero point 0
        scales[group], zeros[group] = scale.astype(np.float16), zero
        rounded = np.round(part / scales[group].astype(np.float64)[:, None]) + zero[:, None]
        values[inputs] = np.clip(rounded, 0, most).T
    return Rounded(values, zeros, scales, group_of)


def _words(numbers: NDArray[np.int64], bits: int, order: tuple[int, ...] | None = None) -> NDArray[np.int32]:
    """Packs the columns of [rows, columns] into words from the lowest bits up: [rows, columns * bits / 32]."""
    per_word = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // per_word), np.uint64)
    for word in range(words.shape[1]):
        for place in range(per_word):
            column = word * per_word + (place if order is None else order[place])
            words[:, word] |= numbers[:, column].astype(np.uint64) << np.uint64(place * bits)
    return words.astype(np.uint32).view(np.int32)


def pack(rounded: Rounded, form: Form) -> dict[str, torch.Tensor]:
    """Returns the tensors of a layer by their names."""
    if form.method == "awq":
        arrays = {
            "qweight": _words(rounded.values, 4, AWQ_ORDER),
            "qzeros": _words(rounded.zeros, 4, AWQ_ORDER),
            "scales": rounded.scales,
        }
    else:
        kept = rounded.zeros - (form.version != "gptq_v2")
        arrays = {
            "qweight": np.ascontiguousarray(_words(np.ascontiguousarray(rounded.values.T), form.bits).T),
            "qzeros": _words(kept, form.bits),
            "scales": rounded.scales,
            "g_idx": rounded.group_of.astype(np.int32),
        }
    return {name: torch.from_numpy(each) for name, each in arrays.items()}


def write_checkpoint(
    model: Path, form: Form, keep_plain: Callable[[str], bool] = lambda name: "lm_head" in name, shards: int = 1
) -> tuple[Path, Path]:
    """Writes a checkpoint of the plain model in the directory, and a plain model of the weights that it stands for, in
    float32; returns both directories. `keep_plain` says which linear layers are not quantised, by their names."""
    label = "-".join(map(str, form.fields().values())).replace("/", "")
    saved, plain = model.parent / f"{model.name}-{label}", model.parent / f"{model.name}-{label}-plain"
    for directory in (saved, plain):
        shutil.copytree(model, directory)
    weights = load_file(model / "model.safetensors")
    packed: dict[str, torch.Tensor] = {}
    for name, weight in list(weights.items()):
        layer, _, kind = name.rpartition(".")
        parts = {name: weight}
        if kind == "weight" and weight.ndim == 2 and "embed" not in layer and not keep_plain(layer):
            # The layers of a block that have the same inputs order them in the same way.
            seed = sum(layer.rpartition(".")[0].encode()) * (weight.shape[1] + 1)
            rounded = round_matrix(weight.float().numpy(), form, seed)
            weights[name] = torch.from_numpy(rounded.dequantised()).float().contiguous()
            parts = {f"{layer}.{each}": tensor for each, tensor in pack(rounded, form).items()}
        packed |= parts
    save_file(weights, plain / "model.safetensors", metadata={"format": "pt"})
    _save_shards(packed, saved, shards)
    config = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**config, "quantization_config": form.fields()}))
    return saved, plain


def _save_shards(tensors: dict[str, torch.Tensor], directory: Path, count: int) -> None:
    (directory / "model.safetensors").unlink()
    if count == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names = sorted(tensors)
    files = {name: f"model-{index % count + 1:05}-of-{count:05}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
