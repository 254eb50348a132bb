"""Tests that the record of a decode leg counts steps, not tokens: a step may bring several tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import worker_pb2
from services.decode.leg import DecodeRecord
from services.engine.config import StepReport
from services.rpc.names import Attr, Span


def report(step_number: int, num_decodes: int, started_s: float) -> StepReport:
    return StepReport((), step_number, num_decodes, num_decodes, started_s, started_s + 0.01)


def test_tokens_of_one_step_count_as_one_step() -> None:
    spans: dict[str, dict[str, Any]] = {}
    host: Any = SimpleNamespace(
        clock=SimpleNamespace(now=lambda: 0.0),
        worker_id="d",
        span=lambda command, name, start_s, end_s, attributes, events: spans.update({name: attributes}),
    )
    record = DecodeRecord(host, worker_pb2.DecodeCommand(leg=1))
    record.admitted(0.0)
    for step, num_tokens in ((7, 3), (8, 1)):
        for _ in range(num_tokens):
            record.token(step / 10, report(step, num_decodes=2 * step, started_s=step / 10 - 0.01))
    record.close()
    run = spans[Span.DECODE_RUN]
    assert run[Attr.NUM_STEPS] == 2
    assert run[Attr.MEAN_BATCH_SIZE] == 15
    assert run[Attr.INTER_TOKEN_MAX_MS] == pytest.approx(100)
