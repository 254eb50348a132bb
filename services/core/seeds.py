"""Derives a seed for each answer of a request from the one seed that the request has. Pure."""

from __future__ import annotations

_MASK_64 = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


def splitmix64(value: int) -> int:
    """Returns splitmix64's output (Steele et al., 2014) for the state `value`; both have 64 bits."""
    value = (value + _STEP) & _MASK_64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return value ^ (value >> 31)


def answer_seed(seed: int, index: int) -> int:
    """Returns the seed of the answer with that index: the request's own for the first, so that it is what a request for
    one answer gets. Router and workers must agree on it: an answer that is computed again has a leg of its own."""
    return seed if index == 0 else splitmix64(splitmix64(seed) ^ index)
