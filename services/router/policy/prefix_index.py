"""Finds how much of a prompt each of many workers has, without asking each of them. Pure.

Owns: which workers have told of which anchors. An anchor is one block in sixteen, chosen by its hash, so that the index
is small. Never: what a worker has told of between two anchors (`known_cache.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat

from services.core.hashing import PromptHashes, ShortHash, anchor_keys


class PrefixIndex:
    """Keeps, for each anchor, the workers that have it: a bit each. All have blocks of one size."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        """By the anchors' keys. These are objects of their own, beside one another in memory, unlike the hashes."""
        self._taken = 0
        """The bits in use."""

    def __len__(self) -> int:
        """Returns how many anchors some worker has."""
        return len(self._holders)

    @property
    def is_unused(self) -> bool:
        """Returns whether no bit stands for a worker."""
        return not self._taken

    def take_bit(self) -> int:
        """Returns a bit that stands for one worker from now on."""
        bit = ~self._taken & (self._taken + 1)
        self._taken |= bit
        return bit

    def give_back(self, bit: int, hashes: Iterable[ShortHash]) -> None:
        """Frees the bit of a worker. `hashes` are all that it had."""
        self.remove(bit, hashes)
        self._taken &= ~bit

    def add(self, bit: int, hashes: Iterable[ShortHash]) -> None:
        """Notes which of the hashes are anchors."""
        holders = self._holders
        for key in anchor_keys(hashes):
            holders[key] = holders.get(key, 0) | bit

    def remove(self, bit: int, hashes: Iterable[ShortHash]) -> None:
        holders = self._holders
        for key in anchor_keys(hashes):
            if rest := holders.get(key, 0) & ~bit:
                holders[key] = rest
            else:
                holders.pop(key, None)

    def ranges(self, prompt: PromptHashes, bits: int) -> Iterator[tuple[int, int, int]]:
        """Yields (low, high, bits): those of the workers have the anchors among the first `low` blocks of a prompt, the
        last of which is one, and not the one right after the first `high`, unless that is the end.

        Workers that have no anchor come first.
        """
        low, holders_of_each = 0, map(self._holders.get, prompt.anchor_keys, repeat(0))
        for place, holders in zip(prompt.anchors, holders_of_each, strict=True):
            if (rest := bits & holders) != bits:
                yield low, place, bits ^ rest
                if not rest:
                    return
                bits = rest
            low = place + 1
        yield low, len(prompt), bits
