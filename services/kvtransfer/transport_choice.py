"""Keeps how fast each transport brings blocks from each source, and which of them is taken. Pure.

Owns: the rates, by probes and by what fetches then show, and the order in which transports are tried. Never: a probe.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Protocol, TypeVar

_MOST_SOURCES = 256
_LEAST_BYTES = 1 << 20
"""A fetch of less says more about its beginning than about its transport."""
_WEIGHT = 0.25
"""How much the newest fetch counts beside those before it."""


class HasTransport(Protocol):
    @property
    def transport(self) -> Hashable: ...


End = TypeVar("End", bound=HasTransport)
T = TypeVar("T")


class TransportChoice:
    """Keeps the rates of a number of sources, those that were heard of last. A source is named by its incarnation."""

    def __init__(self) -> None:
        self._rates: dict[int, dict[Hashable, float]] = {}
        self._unusable: dict[int, set[Hashable]] = {}
        """The transports by which the source was not reached, until a probe shows otherwise."""

    def knows(self, source: int) -> bool:
        """Returns whether the source's transports were compared."""
        return source in self._rates

    def in_order(self, source: int, ends: Sequence[End]) -> list[End]:
        """Returns the ends with the fastest first. What was not compared comes next, in the order given, and last what
        did not work: to find that out again may take as long as a connection to nowhere."""
        rates, unusable = self._rates.get(source, {}), self._unusable.get(source, ())
        return sorted(ends, key=lambda end: (end.transport in unusable, -rates.get(end.transport, -1.0)))

    def probed(self, source: int, rates: Mapping[Hashable, float]) -> None:
        """Notes rates in bytes per second; 0 is for a transport that does not work."""
        _keep(self._rates, source, dict(rates))
        _keep(self._unusable, source, {transport for transport, rate in rates.items() if not rate})

    def fetched(self, source: int, transport: Hashable, num_bytes: int, seconds: float) -> None:
        """Notes what a fetch has shown, also of a transport that is not probed."""
        rates = self._rates.get(source)
        if rates is not None and num_bytes >= _LEAST_BYTES and seconds > 0:
            shown = num_bytes / seconds
            rate = rates.get(transport, shown)
            rates[transport] = rate + _WEIGHT * (shown - rate)

    def failed(self, source: int) -> None:
        """Forgets a source's rates, so that its transports are compared again."""
        self._rates.pop(source, None)

    def unusable(self, source: int, transport: Hashable) -> None:
        """Notes that the source is not reached by a transport, and has its transports compared again."""
        _keep(self._unusable, source, self._unusable.get(source, set()) | {transport})
        self.failed(source)

    def has_unusable(self, source: int) -> bool:
        """Returns whether the source was not reached by a transport, and no probe has reached it since."""
        return bool(self._unusable.get(source))

    def rate(self, source: int, transport: Hashable) -> float | None:
        """Returns the rate in bytes per second; None if it is not known."""
        return self._rates.get(source, {}).get(transport)


def _keep(by_source: dict[int, T], source: int, what: T) -> None:
    """Keeps it as that of the source heard of last."""
    by_source.pop(source, None)
    by_source[source] = what
    while len(by_source) > _MOST_SOURCES:
        del by_source[next(iter(by_source))]
