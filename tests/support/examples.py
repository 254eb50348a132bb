"""Says on how many examples and in which combinations something is tried in `make test`, and in `make test-all`."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from typing import Any

import pytest

_Pair = tuple[tuple[int, int], tuple[int, int]]
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
    """Returns combinations of the axes' values, for `pytest.mark.parametrize`: a pairwise covering array, so that any
    two values of two axes meet in one of them.

    Those that are marked `long` are for `make test-all` only. The others are as few as hold every value of every axis.
    """
    few = [tuple(number % len(axis) for axis in axes) for number in range(max(map(len, axes)))]
    missing = set[_Pair]().union(*map(_pairs, itertools.product(*(range(len(axis)) for axis in axes))))
    missing.difference_update(*map(_pairs, few))
    more = []
    while missing:
        places = itertools.product(*(range(len(axis)) for axis in axes))
        more.append(max(places, key=lambda each: len(missing & _pairs(each))))
        missing -= _pairs(more[-1])
    marked = [*((each, ()) for each in few), *((each, pytest.mark.long) for each in more)]
    return [
        pytest.param(*(axis[at] for axis, at in zip(axes, each, strict=True)), marks=marks) for each, marks in marked
    ]


def _pairs(places: tuple[int, ...]) -> set[_Pair]:
    """Returns each two of (axis, place of its value)."""
    return set(itertools.combinations(enumerate(places), 2))
