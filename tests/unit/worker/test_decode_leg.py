"""Tests what a decode leg tells its router of the engine's events."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from baton.v1 import worker_pb2
from services.decode.leg import DecodeLeg
from services.engine.config import StepReport
from services.engine.schedule.sequence import Admitted, Preempted, Resumed


def test_what_a_preempted_sequence_finds_in_the_cache_is_told() -> None:
    """Another worker may have computed it: the router must know, in case that one is found to compute wrong."""
    sequence, told = SimpleNamespace(seq_id=1), list[worker_pb2.LegEvent]()
    host: Any = SimpleNamespace(clock=SimpleNamespace(now=lambda: 0.0), new_sequences=lambda command, mode: [sequence])
    session: Any = SimpleNamespace(emit=told.append, flush=lambda: None)
    intake: Any = None
    leg = DecodeLeg(host, intake, session, worker_pb2.DecodeCommand(leg=5))
    for event in (Admitted(1, (), 0, 0.0), Preempted(1, 1.0), Resumed(1, 32)):
        leg.on_event(event, StepReport((), 1, 0, 0, 0.0, 0.0))
    assert [(each.admitted.leg, each.admitted.cached_tokens) for each in told] == [(5, 0), (5, 32)]
