"""Counts a simulated worker's KV blocks, and remembers which parts of prompts stand in them: its prefix cache.

A part is what a trace names: some tokens, whose name stands for them and for all before them. Sequences with the
same part use the same blocks. A part that nobody uses stays until its blocks are needed, the longest unused one first,
as in the engine's own cache. What else a sequence has computed stays there too when it leaves, as a remnant: only the
same sequence could use it again, after a preemption, but it takes its turn in making room. Owns: counts and names.
Never: who is admitted.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from services.core.hashing import HASH_BYTES, BlockHash, ShortHash

_ODD = 0x9E3779B97F4A7C15
_MASK = (1 << 8 * HASH_BYTES) - 1


@dataclass(frozen=True, slots=True)
class PromptParts:
    """Names the parts that a prompt begins with, each of `part_tokens` tokens; none where nothing is known of it."""

    names: tuple[BlockHash, ...] = ()
    part_tokens: int = 1

    def block_hashes(self, block_size: int) -> tuple[ShortHash, ...]:
        """Returns the hashes of the full blocks of all parts, as they stand for them here and in the router."""
        return tuple(
            hash
            for name, first, count in _blocks_of_parts(self.names, self.part_tokens, block_size)
            for hash in block_hashes_of(name, first, count)
        )


@dataclass(eq=False, slots=True)
class Part:
    name: BlockHash
    first_block: int
    num_blocks: int
    num_users: int = 0


@dataclass(eq=False, slots=True)
class Remnant:
    """Counts full blocks that a sequence has left behind, from its block `first_block` on."""

    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Hits:
    """Says what the cache has of a sequence."""

    parts: list[Part]
    num_part_blocks: int
    """Blocks of these parts that are not computed again."""
    num_remnant_blocks: int
    num_unused: int
    """Blocks among them that nobody uses now, so that they count as available."""

    @property
    def num_blocks(self) -> int:
        return self.num_part_blocks + self.num_remnant_blocks


class SimPool:
    def __init__(self, num_blocks: int, block_size: int, *, caches: bool = True, is_followed: bool = False) -> None:
        """`caches` says whether parts are kept, `is_followed` whether somebody wants to know of changes in them."""
        self.changes: dict[ShortHash, bool] = {}
        """Blocks whose place in the cache has changed since this was emptied last, and whether they are there."""
        self.num_free = num_blocks
        self.num_cached = 0
        """Blocks of parts that nobody uses."""
        self._block_size = block_size
        self._caches = caches
        self._is_followed = is_followed
        self._parts: dict[BlockHash, Part] = {}
        self._unused: OrderedDict[Part | Remnant, None] = OrderedDict()  # next to make room first

    @property
    def available(self) -> int:
        """Returns how many blocks can be taken."""
        return self.num_free + self.num_cached

    def take(self, count: int) -> None:
        """Takes `count` blocks, which must be available. What nobody uses makes room."""
        assert count <= self.available
        while self.num_free < count:
            oldest = next(iter(self._unused))
            num_blocks = oldest.num_blocks
            if isinstance(oldest, Remnant):  # its end goes first, block by block
                num_blocks = min(num_blocks, count - self.num_free)
                oldest.num_blocks -= num_blocks
            if isinstance(oldest, Part) or not oldest.num_blocks:
                del self._unused[oldest]
            if isinstance(oldest, Part):
                del self._parts[oldest.name]
                self._note(oldest, there=False)
            self.num_cached -= num_blocks
            self.num_free += num_blocks
        self.num_free -= count

    def give(self, count: int) -> None:
        """Frees `count` blocks, in which nothing is left that anybody could use."""
        self.num_free += count

    def leave(self, first_block: int, count: int) -> Remnant | None:
        """Leaves `count` blocks that one sequence has computed in the cache; returns them if they stay there."""
        if not self._caches or count <= 0:
            self.num_free += max(0, count)
            return None
        remnant = Remnant(first_block, count)
        self._unused[remnant] = None
        self.num_cached += count
        return remnant

    def find(self, prompt: PromptParts, num_tokens: int, remnant: Remnant | None = None) -> Hits:
        """Returns what is here of a sequence's first `num_tokens` tokens, in full blocks; the last token is always
        computed again, and so is the block that it is in. It takes nothing (see `hold`)."""
        parts, num_blocks, num_unused = list[Part](), 0, 0
        most_blocks = (num_tokens - 1) // self._block_size
        for name, _, count in self._full_parts(prompt, num_tokens):
            part = self._parts.get(name)
            if part is None or num_blocks >= most_blocks:
                break
            num_blocks = min(num_blocks + count, most_blocks)
            num_unused += 0 if part.num_users else part.num_blocks
            parts.append(part)
        if remnant is None or remnant.first_block != num_blocks:
            return Hits(parts, num_blocks, 0, num_unused)
        assert num_blocks + remnant.num_blocks <= max(num_blocks, most_blocks), "its last token is not computed"
        return Hits(parts, num_blocks, remnant.num_blocks, num_unused + remnant.num_blocks)

    def hold(self, hits: Hits, remnant: Remnant | None = None) -> None:
        """Uses what `find` has found. The blocks of the remnant are the sequence's own from then on."""
        for part in hits.parts:
            self._use(part)
        if remnant is not None and hits.num_remnant_blocks:
            del self._unused[remnant]
            self.num_cached -= remnant.num_blocks

    def keep(self, prompt: PromptParts, num_tokens: int) -> list[Part]:
        """Names the full parts of a sequence whose first `num_tokens` tokens are computed, but those that are named
        already. Returns the new ones: their blocks, which were the sequence's own, are the cache's now, and used."""
        new = []
        for name, first_block, num_blocks in self._full_parts(prompt, num_tokens):
            if name not in self._parts:
                part = self._parts[name] = Part(name, first_block, num_blocks, num_users=1)
                self._note(part, there=True)
                new.append(part)
        return new

    def let_go(self, parts: Sequence[Part]) -> None:
        """Ends a use of these parts. The last of a prompt is the first to go, since it is of no use without the
        others."""
        for part in reversed(parts):
            part.num_users -= 1
            if part.num_users == 0:
                self._unused[part] = None
                self.num_cached += part.num_blocks

    def _note(self, part: Part, *, there: bool) -> None:
        if self._is_followed:
            hashes = block_hashes_of(part.name, part.first_block, part.num_blocks)
            self.changes.update(dict.fromkeys(hashes, there))

    def _use(self, part: Part) -> None:
        if part.num_users == 0:
            del self._unused[part]
            self.num_cached -= part.num_blocks
        part.num_users += 1

    def _full_parts(self, prompt: PromptParts, num_tokens: int) -> Iterator[tuple[BlockHash, int, int]]:
        """Yields the name of each part that is full, and the first of the blocks that end in it, and how many do."""
        if not self._caches:
            return iter(())
        full = prompt.names[: num_tokens // prompt.part_tokens]
        return _blocks_of_parts(full, prompt.part_tokens, self._block_size)


def block_hashes_of(name: BlockHash, first_block: int, num_blocks: int) -> list[ShortHash]:
    """Returns the hashes of blocks that end in the part of that name, by their numbers in the prompt."""
    start = int.from_bytes(name[:HASH_BYTES], "little")
    return [(start + number * _ODD) & _MASK for number in range(first_block, first_block + num_blocks)]


def _blocks_of_parts(
    names: Sequence[BlockHash], part_tokens: int, block_size: int
) -> Iterator[tuple[BlockHash, int, int]]:
    num_blocks = 0
    for number, name in enumerate(names, start=1):
        until = number * part_tokens // block_size
        yield name, num_blocks, until - num_blocks
        num_blocks = until
