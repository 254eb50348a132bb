"""Remembers what was placed on a worker lately: the blocks of prompts, and the conversations. Pure.

Owns: a bounded memory for each worker, which policy may look at. Never: what the worker's prefix cache really holds;
the worker alone knows that, and a prompt that is expected there but is not costs what it costs anywhere.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TypeVar

from services.core.hashing import BlockHash

T = TypeVar("T")

_MOST_BLOCKS = 1 << 16
_MOST_CONVERSATIONS = 4096


class PlacedPrompts:
    """Remembers the newest prompts that a worker was given, by the hashes of their full blocks."""

    def __init__(self, most_blocks: int) -> None:
        """`most_blocks` are those of the worker's pool: it caches no more."""
        self._most_blocks = min(most_blocks, _MOST_BLOCKS)
        self._blocks: dict[BlockHash, None] = {}
        self._conversations: dict[str, None] = {}

    def add(self, hashes: Sequence[BlockHash], conversation: str) -> None:
        """Remembers a prompt. `hashes` are those of its full blocks, in order; `conversation` is empty for none."""
        # The first block comes last, and so is the last to go: without it none of the others is of use.
        _remember(self._blocks, reversed(hashes[: self._most_blocks]), self._most_blocks)
        if conversation:
            _remember(self._conversations, (conversation,), _MOST_CONVERSATIONS)

    def num_blocks(self, hashes: Sequence[BlockHash]) -> int:
        """Returns how many of a prompt's first blocks were in prompts that the worker was given."""
        # Whoever remembers a block remembers those before it, so there is one place from which on all are missing.
        return bisect_left(range(len(hashes)), True, key=lambda number: hashes[number] not in self._blocks)

    def has_conversation(self, conversation: str) -> bool:
        return conversation in self._conversations


def _remember(memory: dict[T, None], items: Iterable[T], most: int) -> None:
    for item in items:
        memory.pop(item, None)
        memory[item] = None
    while len(memory) > most:
        del memory[next(iter(memory))]
