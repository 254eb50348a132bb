"""Says on how many examples and in which combinations something is tried in `make test`, and in `make test-all`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

_CHOSEN = os.environ.get("BATON_EXAMPLES", "")


def has_all_examples() -> bool:
    """Returns whether examples are drawn anew in each run, and all of them, as in `make test-all`."""
    return bool(_CHOSEN)


def num_examples(count: int) -> int:
    """Returns how many examples to try of a property for which `make test-all` tries `count` (`BATON_EXAMPLES=all`).

    It is a quarter of them, or what somebody asks for who looks for more (`BATON_EXAMPLES=2000`).
    """
    if _CHOSEN == "all":
        return count
    return int(_CHOSEN or (count + 3) // 4)


def combinations(*axes: Sequence[Any]) -> list[Any]:
    """Returns all combinations of the axes' values, for `pytest.mark.parametrize`.

    Those that are marked `long` are for `make test-all` only. The others are as few as hold every value of every axis.
    """
    few = {tuple(number % len(axis) for axis in axes) for number in range(max(map(len, axes)))}
    return [
        pytest.param(*(value for _, value in chosen), marks=() if _places(chosen) in few else pytest.mark.long)
        for chosen in itertools.product(*map(enumerate, axes))
    ]


def _places(chosen: Sequence[tuple[int, Any]]) -> tuple[int, ...]:
    return tuple(place for place, _ in chosen)
