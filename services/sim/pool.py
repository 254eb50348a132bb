"""Counts a simulated worker's KV blocks, and remembers which parts of prompts stand in them: its prefix cache.

A part is what a trace names: so many tokens, whose name stands for them and for all before them. Sequences with the
same part use the same blocks. A part that nobody uses stays until its blocks are needed, the longest unused one first,
as in the engine's own cache. Owns: counts and names. Never: who is admitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.core.hashing import BlockHash


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Names the parts that a prompt begins with, each of `part_tokens` tokens; none where nothing is known of it."""

    names: tuple[BlockHash, ...] = ()
    part_tokens: int = 1


@dataclass(eq=False, slots=True)
class Part:
    name: BlockHash
    num_blocks: int
    num_users: int = 0


class SimPool:
    def __init__(self, num_blocks: int, block_size: int, *, caches: bool = True) -> None:
        self.num_free = num_blocks
        self.num_cached = 0
        """Blocks of parts that nobody uses."""
        self._block_size = block_size
        self._caches = caches
        self._parts: dict[BlockHash, Part] = {}
        self._unused: dict[BlockHash, Part] = {}

    @property
    def available(self) -> int:
        """Returns how many blocks can be taken."""
        return self.num_free + self.num_cached

    def take(self, count: int) -> None:
        """Takes so many blocks, which must be available. Parts that nobody uses make room."""
        assert count <= self.available
        while self.num_free < count:
            name, part = next(iter(self._unused.items()))
            del self._unused[name], self._parts[name]
            self.num_cached -= part.num_blocks
            self.num_free += part.num_blocks
        self.num_free -= count

    def give(self, count: int) -> None:
        self.num_free += count

    def hold(self, prompt: PromptParts, num_tokens: int) -> tuple[list[Part], int]:
        """Uses the parts that are here of a sequence's first `num_tokens` tokens. Returns them and how many tokens of
        them are not computed again, in full blocks: the last token always is, and so is the block that it is in."""
        held, num_blocks, most_blocks = list[Part](), 0, (num_tokens - 1) // self._block_size
        for name, count in self._full_parts(prompt, num_tokens):
            part = self._parts.get(name)
            if part is None or num_blocks >= most_blocks:
                break
            num_blocks = min(num_blocks + count, most_blocks)
            self._use(part)
            held.append(part)
        return held, num_blocks * self._block_size

    def keep(self, prompt: PromptParts, num_tokens: int) -> list[Part]:
        """Names the full parts of a sequence whose first `num_tokens` tokens are computed, but those that are named
        already. Returns the new ones: their blocks, which were the sequence's own, are the cache's now, and used."""
        new = []
        for name, num_blocks in self._full_parts(prompt, num_tokens):
            if name not in self._parts:
                part = self._parts[name] = Part(name, num_blocks, num_users=1)
                new.append(part)
        return new

    def let_go(self, parts: Sequence[Part]) -> None:
        """Ends a use of these parts. The last of a prompt is the first to go, since it is of no use without the
        others."""
        for part in reversed(parts):
            part.num_users -= 1
            if part.num_users == 0:
                self._unused[part.name] = part
                self.num_cached += part.num_blocks

    def _use(self, part: Part) -> None:
        if part.num_users == 0:
            del self._unused[part.name]
            self.num_cached -= part.num_blocks
        part.num_users += 1

    def _full_parts(self, prompt: PromptParts, num_tokens: int) -> Iterator[tuple[BlockHash, int]]:
        """Yields the name of each part that is full, and how many blocks end in it."""
        if not self._caches:
            return
        num_blocks = 0
        for number, name in enumerate(prompt.names[: num_tokens // prompt.part_tokens], start=1):
            until = number * prompt.part_tokens // self._block_size
            yield name, until - num_blocks
            num_blocks = until
