"""Expects how long outputs will be, from those of requests like it that have finished lately. Pure.

Owns: for each caller and length of prompt the newest outputs' lengths, and their median. Bounded: a key keeps
`_WINDOW` lengths, and of callers' keys those that had an output most lately are kept. Never: a request.

Requests are alike if they are of one caller and their prompts have as many binary digits of length; a model has an
object of its own. Where too few requests of a caller have finished, those of all callers with prompts of that length
are taken, then all.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

_WINDOW = 64
_ENOUGH = 8
"""The fewest lengths of a key by which its outputs are judged; with fewer, those of more requests are taken."""
_MOST_KEYS = 1024


class _Newest:
    """Keeps the newest lengths of one key, as they came and sorted."""

    __slots__ = ("_by_length", "_by_time", "median")

    def __init__(self) -> None:
        self.median: int | None = None
        """The median by nearest rank; None before the first length."""
        self._by_time: deque[int] = deque()
        self._by_length: list[int] = []

    def __len__(self) -> int:
        return len(self._by_time)

    def add(self, length: int) -> None:
        if len(self._by_time) == _WINDOW:
            del self._by_length[bisect_left(self._by_length, self._by_time.popleft())]
        self._by_time.append(length)
        insort(self._by_length, length)
        self.median = self._by_length[len(self._by_length) // 2]


class OutputLengths:
    def __init__(self) -> None:
        self._of_callers: dict[tuple[str, int], _Newest] = {}
        """The key that had an output last is the last one."""
        self._of_prompts: dict[int, _Newest] = {}
        """Over all callers. Lengths have few numbers of digits."""
        self._of_all = _Newest()

    def __len__(self) -> int:
        """Counts the newest outputs that are known, of all callers: 0 before the first."""
        return len(self._of_all)

    @property
    def median(self) -> int | None:
        """Returns the median of the newest outputs of all callers; None before the first."""
        return self._of_all.median

    @property
    def num_keys(self) -> int:
        return len(self._of_callers)

    def observe(self, caller: str, prompt_tokens: int, output_tokens: int) -> None:
        """Notes the output of a request that has finished. `caller` may be empty: then it is not known who asked."""
        key = (caller, prompt_tokens.bit_length())
        of_caller = self._of_callers.pop(key, None) or _Newest()
        if len(self._of_callers) >= _MOST_KEYS:
            del self._of_callers[next(iter(self._of_callers))]
        self._of_callers[key] = of_caller
        for newest in (of_caller, self._of_prompts.setdefault(key[1], _Newest()), self._of_all):
            newest.add(output_tokens)

    def median_like(self, caller: str, prompt_tokens: int) -> int | None:
        """Returns the median of the outputs of requests like this one; None before the first output."""
        key = (caller, prompt_tokens.bit_length())
        for newest in (self._of_callers.get(key), self._of_prompts.get(key[1])):
            if newest is not None and len(newest) >= _ENOUGH:
                return newest.median
        return self._of_all.median
