"""Defines what holds a sequence's output to a form: the `TokenConstraint` protocol. Pure.

Whoever makes a sequence gives it its constraint; the engine asks it at every token. How a form is written and compiled
is not the engine's business (`services/worker/constraints.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:  # stores and routers import this, and have no numpy
    import numpy as np
    from numpy.typing import NDArray

Bits: TypeAlias = "NDArray[np.int32]"
"""Sets of tokens, one in each row: token `i` is bit `i % 32` of number `i // 32`. [num_rows, ceil(vocab_size / 32)]"""


class TokenConstraint(Protocol):
    """Says which tokens may follow a sequence's output. One thread at a time uses it.

    What it says depends on the output alone. Its state is never sent: on another worker, one that was compiled anew
    takes the same output. A method that raises has left it unusable; an error of `core.errors` then ends the sequence.
    """

    def take(self, token_ids: Sequence[int]) -> None:
        """Takes output tokens that follow all that it has taken. Raises InvalidRequest if they may not."""
        ...

    def fill(self, bits: Bits) -> bool:
        """Writes into `bits`, one row which is all zero before, the tokens that may follow the output; returns whether
        the output may end. The tokens that end an output are not the constraint's to allow. Raises InvalidRequest if
        the tokens cannot be told within its limits."""
        ...


def allow(bits: Bits, token_ids: Sequence[int]) -> None:
    """Adds tokens to a set, one row of `Bits`."""
    for token_id in token_ids:
        bits[token_id // 32] |= _BIT[token_id % 32]


def forbid(bits: Bits, token_ids: Sequence[int]) -> None:
    """Takes tokens out of a set, one row of `Bits`."""
    for token_id in token_ids:
        bits[token_id // 32] &= ~_BIT[token_id % 32]


def keep_only(bits: Bits, token_ids: Sequence[int]) -> None:
    """Takes all tokens but these out of a set, one row of `Bits`."""
    kept = {token_id for token_id in token_ids if has(bits, token_id)}
    bits.fill(0)
    allow(bits, sorted(kept))


def has(bits: Bits, token_id: int) -> bool:
    """Returns whether a token is in a set, one row of `Bits`."""
    return bool(bits[token_id // 32] & _BIT[token_id % 32])


_BIT = (*(1 << number for number in range(31)), -(1 << 31))
"""Each bit of an int32 as a number."""


def num_words(vocab_size: int) -> int:
    """Returns how many numbers a row of `Bits` has."""
    return (vocab_size + 31) // 32
