"""Chooses how each linear layer of a model is computed on this CPU: by torch, by oneDNN or by linear.c.

Owns: the choice, by a timing on this machine for each shape of layers. Never: how the ways compute (`packed_linear`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import nn

from services.engine.cpu import kept_timings
from services.engine.cpu.packed_linear import NativeLinear, OneDnnLinear, agrees, narrowest_dtype
from services.engine.cpu.replacement import replace_modules
from services.engine.native.bindings import DTYPES, kernels

logger = logging.getLogger(__name__)

_ROWS = ((1, 64.0), (16, 4.0), (256, 4.0))
"""Rows of a product, and how many of them the usual request takes: 1,024 tokens of prompt in chunks, and 128 of output,
half of them alone and half in a batch of 16 (the medians of conversations: Splitwise, arXiv 2311.18677, §III)."""
_MOST_PRODUCTS = 1.5e9
"""Multiplications of a timed product. Fewer rows are timed of layers that would take more."""
_ROUNDS = 3
_VERSION = 1
"""The version of the way of timing. Increase it to make earlier plans void."""
_LOCK_LIMIT_S = 60.0
_TORCH = "torch"
"""The name of the way of a layer that stays as it is."""
_Way = Callable[[nn.Linear], nn.Module]


@torch.inference_mode()
def pack_linears(model: nn.Module, keep_in: Path | None = None) -> dict[str, int]:
    """Replaces every linear layer of the model by the fastest way that computes the same; returns how many layers are
    computed in each.

    `keep_in` is a folder for what the timing has found on this host; without it, each call times anew.
    """
    ways, kinds = _ways(), _kinds(model)
    if not kinds:
        return {}
    if keep_in is None:
        plan = {kind: _fastest(layer, ways) for kind, layer in kinds.items()}
    else:
        plan = _kept_plan(kinds, ways, keep_in)
    counts: Counter[str] = Counter()

    def replacement(module: nn.Module) -> nn.Module | None:
        if not _is_packable(module):
            return None
        name = plan[_kind(module)]
        packed = _packed(module, name, ways)
        counts[name if packed is not None else _TORCH] += 1
        return packed

    replace_modules(model, replacement)
    return dict(counts)


def _is_packable(module: nn.Module) -> TypeGuard[nn.Linear]:
    return type(module) is nn.Linear and module.weight.device.type == "cpu" and module.weight.dtype in DTYPES


def _kind(layer: nn.Linear) -> str:
    return f"{layer.in_features} x {layer.out_features} in {str(layer.weight.dtype).removeprefix('torch.')}"


def _kinds(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns a layer of each kind."""
    return {_kind(module): module for module in model.modules() if _is_packable(module)}


def _kept_plan(kinds: dict[str, nn.Linear], ways: dict[str, _Way], folder: Path) -> dict[str, str]:
    # Weights that 16 bits can hold are read in half the time.
    described = sorted(f"{kind}, {narrowest_dtype(layer.weight)}" for kind, layer in kinds.items())
    subject = {**kept_timings.host(), "kinds": described, "version": _VERSION}

    def find() -> dict[str, object]:
        return {"ways": {kind: _fastest(layer, ways) for kind, layer in kinds.items()}, "for": subject}

    def read(content: Any) -> dict[str, str]:
        return {kind: str(content["ways"][kind]) for kind in kinds}

    entry = folder / f"linear-{kept_timings.digest_of(subject)}.json"
    what = "the plan of linear layers"
    return kept_timings.once_per_host(entry, read, find, limit_s=_LOCK_LIMIT_S, what=what, level=logging.INFO)


def _ways() -> dict[str, _Way]:
    """Returns the ways that replace a layer, by name."""
    native = kernels()
    ways: dict[str, _Way] = {"oneDNN": OneDnnLinear}
    if native is not None:
        ways["linear.c"] = lambda layer: NativeLinear(layer, native)
    return ways


def _packed(layer: nn.Linear, name: str, ways: dict[str, _Way]) -> nn.Module | None:
    """Returns the layer in this way, or None if it must stay as it is."""
    if name not in ways or (name == "linear.c" and layer.in_features % 2):
        return None
    try:
        packed = ways[name](layer)
        if agrees(packed, layer):
            return packed
        logger.warning("a linear layer by %s differs and stays plain", name)
    except (RuntimeError, AttributeError, NotImplementedError) as error:
        logger.info("linear layers are not computed by %s here: %s", name, error)
    return None


def _fastest(layer: nn.Linear, ways: dict[str, _Way]) -> str:
    """Returns the way that takes least for the usual request, on one thread."""
    packed = {name: _packed(layer, name, ways) for name in ways}
    made: dict[str, nn.Module] = {_TORCH: layer, **{name: each for name, each in packed.items() if each is not None}}
    if len(made) == 1:
        return _TORCH
    costs = dict.fromkeys(made, 0.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for rows, times in _ROWS:
            rows = max(1, min(rows, int(_MOST_PRODUCTS / (layer.in_features * layer.out_features))))
            for name, taken_s in _time(made, rows, layer).items():
                costs[name] += times * taken_s
    finally:
        torch.set_num_threads(threads)
    best = min(costs, key=costs.__getitem__)
    told = ", ".join(f"{name} {1e3 * each:.1f} ms" for name, each in costs.items())
    logger.info("%s: %s", _kind(layer), told)
    return best


def _time(made: dict[str, nn.Module], rows: int, layer: nn.Linear) -> dict[str, float]:
    """Returns the least processor time of a few products of `rows` rows, in seconds, of each way in turns."""
    inputs = torch.randn(rows, layer.in_features).to(layer.weight.dtype)
    found: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(_ROUNDS):
        for name, module in made.items():
            started_s = time.thread_time()
            module(inputs)
            found[name].append(time.thread_time() - started_s)
    return {name: min(each) for name, each in found.items()}
