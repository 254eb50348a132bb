"""Says where a live request is, for clients that wait: its place in the queue, what of its prompt is computed. Pure.

Owns: the places, which are found for all that is queued at once, and at most once a second: thousands may ask. Never:
when a client is told.
"""

from __future__ import annotations

import enum
import math
from typing import NamedTuple

from services.router.coordinator.book import Book
from services.router.coordinator.request import Phase, Request

_PLACES_HOLD_S = 1.0


class ProgressState(enum.Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    HANDOFF = "handoff"
    DECODING = "decoding"


class LiveProgress(NamedTuple):
    """Says how far a live request has come; the proto's `Progress` has the units."""

    state: ProgressState
    position: int | None
    of: int


class QueuePlaces:
    """Keeps the place of each queued request for a second."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._places: dict[str, int] = {}
        self._found_s = -math.inf

    def of(self, request: Request, now: float) -> int:
        """Returns the request's place, counted from 1. One that has come meanwhile is the last."""
        if now - self._found_s >= _PLACES_HOLD_S:
            self._places = {each.key: place for place, each in enumerate(self._book.queue.in_order(), 1)}
            self._found_s = now
        return self._places.get(request.key, len(self._book.queue))


def progress_of(request: Request, places: QueuePlaces, num_queued: int, now: float) -> LiveProgress:
    if request.phase is Phase.QUEUED:
        place = places.of(request, now)
        return LiveProgress(ProgressState.QUEUED, place, max(place, num_queued))
    if not request.num_received:
        computed = request.prefill.num_computed if request.prefill is not None else None
        return LiveProgress(ProgressState.PREFILLING, computed, len(request.spec.token_ids))
    state = ProgressState.DECODING if request.phase is Phase.DECODING else ProgressState.HANDOFF
    return LiveProgress(state, request.num_received, request.max_tokens)
