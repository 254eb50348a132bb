"""Evicts blocks by W-TinyLFU, for comparison with the order that stores and tiers have (`services.kv.s3_fifo`). Pure.

Gil Einziger, Roy Friedman, Ben Manes: "TinyLFU: a highly efficient cache admission policy", ACM TOS 2017. Here a block
that is in use is in no segment, and counts as used again when it comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from services.core.hashing import BlockHash

_WINDOW_SHARE = 0.01
"""Share of the blocks that the window of new ones may have before its oldest competes for its place."""
_PROTECTED_SHARE = 0.8
"""Share of the main part that blocks may have that were used there."""
_MOST_USES = 15
_USES_PER_BLOCK = 10
"""All counts are halved after so many uses for each block of the capacity: what was popular once is forgotten."""
_NUM_ROWS = 4

Segment = OrderedDict[BlockHash, None]
"""Blocks, the least recently used first."""


class _Sketch:
    """Estimates how often blocks were used lately, in memory that does not depend on how many there are."""

    def __init__(self, capacity: int) -> None:
        self._num_counters = 1 << (8 * capacity - 1).bit_length()
        self._rows = [bytearray(self._num_counters) for _ in range(_NUM_ROWS)]
        self._most_before_halving = _USES_PER_BLOCK * capacity
        self._num_uses = 0

    def count(self, hash: BlockHash) -> None:
        for row, place in self._places(hash):
            row[place] = min(_MOST_USES, row[place] + 1)
        self._num_uses += 1
        if self._num_uses >= self._most_before_halving:
            self._num_uses //= 2
            halves = bytes(number // 2 for number in range(256))
            self._rows = [row.translate(halves) for row in self._rows]

    def uses(self, hash: BlockHash) -> int:
        return min(row[place] for row, place in self._places(hash))

    def _places(self, hash: BlockHash) -> Iterator[tuple[bytearray, int]]:
        # The hash of a block is random already, so its parts serve as hashes.
        for number, row in enumerate(self._rows):
            yield row, int.from_bytes(hash[4 * number : 4 * number + 4], "little") % self._num_counters


class TinyLfu:
    """Has a window for blocks that are new, and a main part that one of them enters only if it was used more often than
    the one that would leave. It is an `EvictionOrder`."""

    def __init__(self, capacity: int) -> None:
        """`capacity` is how many blocks there are about."""
        self._sketch = _Sketch(capacity)
        self._window: Segment = OrderedDict()
        self._probation: Segment = OrderedDict()
        self._protected: Segment = OrderedDict()
        self._in_use: dict[BlockHash, Segment] = {}

    def __len__(self) -> int:
        return sum(map(len, self._segments()))

    def __contains__(self, hash: BlockHash) -> bool:
        return any(hash in segment for segment in self._segments())

    def __iter__(self) -> Iterator[BlockHash]:
        return chain(*self._segments())

    def add(self, hash: BlockHash) -> None:
        self._sketch.count(hash)
        segment = self._in_use.pop(hash, self._window)
        if segment is self._window:
            segment[hash] = None
        else:
            self._protect(hash)

    def use(self, hash: BlockHash) -> None:
        segment = self._segment_of(hash)
        del segment[hash]
        self._in_use[hash] = segment

    def touch(self, hash: BlockHash) -> None:
        self.use(hash)
        self.add(hash)

    def forget(self, hash: BlockHash) -> None:
        del self._segment_of(hash)[hash]

    def evict(self) -> BlockHash:
        if not self._probation and not self._protected:  # nothing competes before there is no room
            while len(self._window) > 1 + _WINDOW_SHARE * len(self):
                oldest, _ = self._window.popitem(last=False)
                self._probation[oldest] = None
        main = self._probation or self._protected
        if not main or len(self._window) > _WINDOW_SHARE * len(self):
            oldest, _ = self._window.popitem(last=False)
            if not main or self._sketch.uses(oldest) <= self._sketch.uses(next(iter(main))):
                return oldest
            self._probation[oldest] = None
        return main.popitem(last=False)[0]

    def _protect(self, hash: BlockHash) -> None:
        self._protected[hash] = None
        while len(self._protected) > 1 + _PROTECTED_SHARE * (len(self._protected) + len(self._probation)):
            oldest, _ = self._protected.popitem(last=False)
            self._probation[oldest] = None

    def _segments(self) -> tuple[Segment, Segment, Segment]:
        return self._window, self._probation, self._protected

    def _segment_of(self, hash: BlockHash) -> Segment:
        return next(segment for segment in self._segments() if hash in segment)
