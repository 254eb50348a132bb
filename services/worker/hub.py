"""Brings step events from the engine's thread to the event loop, and each to the leg it belongs to.

Never blocks the step thread and never computes on the loop.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from services.engine.config import StepReport
from services.engine.sequence import SequenceEvent


class EventSink(Protocol):
    def on_event(self, event: SequenceEvent, report: StepReport) -> None: ...


class EventHub:
    def __init__(self, loop: asyncio.AbstractEventLoop, flush: Callable[[], None]) -> None:
        """`flush` sends what a step's events have queued; called once per step."""
        self._loop = loop
        self._flush = flush
        self._sinks: dict[int, EventSink] = {}
        self._seq_ids = itertools.count(1)

    def new_seq_id(self) -> int:
        return next(self._seq_ids)

    def register(self, seq_id: int, sink: EventSink) -> None:
        self._sinks[seq_id] = sink

    def unregister(self, seq_id: int) -> None:
        self._sinks.pop(seq_id, None)

    def __len__(self) -> int:
        return len(self._sinks)

    def on_step(self, report: StepReport) -> None:
        """Engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, report)
        except RuntimeError:
            # The loop closed while the last step ran: nobody is left to tell.
            if not self._loop.is_closed():
                raise

    def _dispatch(self, report: StepReport) -> None:
        for event in report.events:
            sink = self._sinks.get(event.seq_id)
            if sink is not None:
                sink.on_event(event, report)
        self._flush()
