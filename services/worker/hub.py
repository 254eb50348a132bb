"""Brings step events from the engine thread to the event loop, and each to the leg it belongs to.

Never: blocks the engine thread, or computes on the loop. A leg that raises over an event ends alone: the others of its
step still get theirs.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Protocol

from services.engine.config import StepReport
from services.engine.schedule.sequence import SequenceEvent


class EventSink(Protocol):
    def on_event(self, event: SequenceEvent, report: StepReport) -> None: ...

    def on_defect(self, event: SequenceEvent, error: Exception) -> None:
        """Ends the sequence, and reports it to the router, after `on_event` raised `error`."""
        ...


class EventHub:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        flush: Callable[[], None],
        abandon: Callable[[int], None],
        on_defect: Callable[[Exception], None],
    ) -> None:
        """`flush` sends the events that a step has queued and is called once per step.

        `abandon` ends a sequence whose leg fails to do so itself; `on_defect` is called with each exception.
        """
        self._loop = loop
        self._flush = flush
        self._abandon = abandon
        self._on_defect = on_defect
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
        """Hands a step's report to the event loop. Call on the engine thread."""
        try:
            self._loop.call_soon_threadsafe(self._dispatch, report)
        except RuntimeError:
            # The loop closed while the last step ran, so there is no one left to report to.
            if not self._loop.is_closed():
                raise

    def _dispatch(self, report: StepReport) -> None:
        for event in report.events:
            sink = self._sinks.get(event.seq_id)
            if sink is not None:
                try:
                    sink.on_event(event, report)
                except Exception as error:
                    self._end(sink, event, error)
        self._flush()

    def _end(self, sink: EventSink, event: SequenceEvent, error: Exception) -> None:
        self._on_defect(error)
        try:
            sink.on_defect(event, error)
        except Exception as again:
            self._on_defect(again)
            self.unregister(event.seq_id)
            self._abandon(event.seq_id)
