"""Tests that one sequence's defect at a worker takes no other sequence's events with it, and leaves nothing of its own
behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from services.engine.config import StepReport
from services.engine.schedule.sequence import Failed
from services.worker.session import EventHub


class Sink:
    def __init__(self, *, poisoned: bool = False, in_the_end_too: bool = False) -> None:
        self.events: list[Any] = []
        self.defects: list[Exception] = []
        self._poisoned = poisoned
        self._in_the_end_too = in_the_end_too

    def on_event(self, event: Any, report: StepReport) -> None:
        self.events.append(event)
        if self._poisoned:
            raise RuntimeError("poison")

    def on_defect(self, event: Any, error: Exception) -> None:
        self.defects.append(error)
        if self._in_the_end_too:
            raise RuntimeError("poison to the end")


class Bench:
    def __init__(self) -> None:
        self.flushes = 0
        self.abandoned: list[int] = []
        self.defects: list[Exception] = []
        self.hub = EventHub(asyncio.get_running_loop(), self._flush, self.abandoned.append, self.defects.append)

    def _flush(self) -> None:
        self.flushes += 1

    async def step(self, *seq_ids: int) -> None:
        events = tuple(Failed(seq_id, RuntimeError("of a step")) for seq_id in seq_ids)
        self.hub.on_step(StepReport(events, 1, 1, 0, 0.0, 0.0))
        await asyncio.sleep(0)


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_sink_that_raises_takes_no_other_events_along(at: int) -> None:
    bench = Bench()
    sinks = [Sink(poisoned=number == at) for number in range(3)]
    for number, sink in enumerate(sinks):
        bench.hub.register(number, sink)
    await bench.step(0, 1, 2)
    assert [len(sink.events) for sink in sinks] == [1, 1, 1]
    assert [len(sink.defects) for sink in sinks] == [int(number == at) for number in range(3)]
    assert bench.flushes == 1, "what the others have to say is sent"
    assert len(bench.defects) == 1
    assert not bench.abandoned


async def test_one_that_cannot_even_be_ended_is_abandoned() -> None:
    bench = Bench()
    sinks = [Sink(poisoned=True, in_the_end_too=True), Sink()]
    for number, sink in enumerate(sinks):
        bench.hub.register(number, sink)
    await bench.step(0, 1)
    assert bench.abandoned == [0]
    assert len(sinks[1].events) == 1
    assert bench.flushes == 1
    await bench.step(0)
    assert len(sinks[0].events) == 1, "it hears no more"
    assert len(bench.hub) == 1
