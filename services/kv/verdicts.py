"""Keeps which workers were found to compute wrong, and names KV accordingly. Pure.

A block's hash names tokens and not values. What a damaged worker has computed is found under the same name as what a
healthy one would have computed, by whoever has taken it over, and so is all that was computed behind it. So after each
verdict every block has another name: beside the salt, hashes begin with an *epoch* (`core.hashing.salt_in`), which
follows from the verdicts. What has an older name is found no more, wherever it lies and whenever it arrives, and is
evicted in time.

Owns: the verdicts, and the epoch. Never: who is wrong, or what becomes of requests (the router's `canaries.py`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping


class Verdicts:
    """Keeps how often each incarnation of a worker was found wrong. All who have heard the same are in one epoch,
    whatever the order in which they heard it."""

    def __init__(self) -> None:
        self.num_of: dict[int, int] = {}
        """The number of verdicts by incarnation. It grows by one entry for each damaged process, and is never cut: an
        older epoch would come back."""
        self.epoch = ""
        """The name of the epoch; empty before the first verdict."""

    def add(self, incarnation: int) -> None:
        """Notes one more verdict on the incarnation."""
        self.merge({incarnation: self.num_of.get(incarnation, 0) + 1})

    def merge(self, num_of: Mapping[int, int]) -> list[int]:
        """Takes over what another process has heard. Returns the incarnations on which there are verdicts that were not
        known here."""
        news = [incarnation for incarnation, num in num_of.items() if num > self.num_of.get(incarnation, 0)]
        if news:
            self.num_of.update({incarnation: num_of[incarnation] for incarnation in news})
            self.epoch = hashlib.blake2b(repr(sorted(self.num_of.items())).encode(), digest_size=8).hexdigest()
        return news
