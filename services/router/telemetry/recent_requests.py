"""Remembers the requests of the last hour, for `baton plan --live`: when each arrived, how long it was, what it took.
No text, no token and no name is kept. Pure.

Owns: the memory and its bounds. Never: a clock; times are those of the router's clock, in seconds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

LONGEST_S = 3600.0
MOST_REQUESTS = 1 << 16
"""The most requests that are remembered of one model: about ten megabytes. Older ones are forgotten first."""


@dataclass(frozen=True, slots=True)
class RecentRequest:
    arrived_s: float
    prompt_tokens: int
    output_tokens: int
    """Output that was passed on."""
    max_tokens: int | None
    """What was asked for; None for as much as the context leaves."""
    priority: int
    ttft_s: float | None
    """None if no token came."""
    total_s: float
    failed: bool


class RecentRequests:
    def __init__(self, most: int = MOST_REQUESTS) -> None:
        self._ended: deque[RecentRequest] = deque(maxlen=most)

    def add(self, request: RecentRequest) -> None:
        """Remembers a request that has ended."""
        self._ended.append(request)

    def since(self, time_s: float) -> Iterator[RecentRequest]:
        """Yields those that have arrived since then, in the order of their arrival."""
        yield from sorted((each for each in self._ended if each.arrived_s >= time_s), key=lambda each: each.arrived_s)
