"""Keeps the times of a decode leg's events, for its spans and for the timings in its last message.

Owns: those times, and the counts of transfers that metrics show. Never: decides anything.
"""

from __future__ import annotations

from collections.abc import Sequence

from baton.v1 import types_pb2, worker_pb2
from services.engine.config import StepReport
from services.kvtransfer.client import FetchOutcome
from services.rpc.names import Attr, Event, Span
from services.rpc.plain import enum_word
from services.rpc.telemetry import Attributes, Value
from services.worker.host import WorkerHost


class DecodeRecord:
    """Keeps the record of one decode leg.

    `admitted`, `transferred`, `adopted`, `token` and `preempted` are called as these happen, and `close`, which writes
    the spans, once at the end.
    """

    def __init__(self, host: WorkerHost, command: worker_pb2.DecodeCommand) -> None:
        self._host = host
        self._command = command
        self._arrival_s = host.clock.now()
        self._admitted_s: float | None = None  # when the engine admitted the sequence, if it prefills here
        self._ready_s: float | None = None  # when the KV was taken over, if it was
        self._first_step_s = 0.0
        self._first_step_ended_s = 0.0
        self._last_token_s = 0.0
        self._last_of: dict[int, float] = {}  # when each answer had its newest token
        self._gaps_ms: list[float] = []
        self._preempted_s: list[float] = []
        self._num_steps = 0
        self._newest_step = 0
        self._sum_batch = 0
        self._timings = types_pb2.PhaseTimings()

    def admitted(self, now: float) -> None:
        self._admitted_s = now

    def transferred(self, outcome: FetchOutcome) -> None:
        self._transfer(
            outcome.transport,
            outcome.began_s,
            outcome.sealed_s,
            outcome.ended_s,
            num_blocks=outcome.num_blocks,
            num_bytes=outcome.num_bytes,
        )

    def adopted(self, started_s: float, num_blocks: int) -> None:
        now = self._host.clock.now()
        self._transfer(types_pb2.TRANSPORT_LOCAL, started_s, now, now, num_blocks=num_blocks, num_bytes=0)

    def token(self, now: float, report: StepReport, index: int = 0) -> None:
        """Notes a token of the answer with that index."""
        if self._num_steps == 0:
            self._first_step_s = report.started_s
            self._first_step_ended_s = now
        if index in self._last_of:
            self._gaps_ms.append((now - self._last_of[index]) * 1000)
        self._last_of[index] = now
        if report.step_number != self._newest_step:  # one step may bring several tokens
            self._newest_step = report.step_number
            self._num_steps += 1
            self._sum_batch += max(1, report.num_decodes)
        self._last_token_s = now

    def preempted(self, now: float) -> None:
        self._preempted_s.append(now)

    def timings(self) -> types_pb2.PhaseTimings:
        """Returns the timings known so far, in milliseconds."""
        if self._num_steps:
            if self._ready_s is not None:
                self._timings.decode_wait_ms = (self._first_step_s - self._ready_s) * 1000
            elif self._admitted_s is not None:
                self._timings.prefill_wait_ms = (self._admitted_s - self._arrival_s) * 1000
                self._timings.prefill_compute_ms = (self._first_step_ended_s - self._admitted_s) * 1000
            self._timings.decode_run_ms = (self._last_token_s - self._run_start_s) * 1000
        return self._timings

    def close(self) -> None:
        if not self._num_steps:
            return
        common: dict[str, Value] = {Attr.LEG: self._command.leg, Attr.WORKER: self._host.worker_id}
        if self._ready_s is not None:
            self._span(Span.DECODE_WAIT, self._ready_s, self._first_step_s, common)
        elif self._admitted_s is not None:
            self._span(Span.PREFILL_WAIT, self._arrival_s, self._admitted_s, common)
            prompt: dict[str, Value] = {Attr.NUM_TOKENS: len(self._command.token_ids)}
            self._span(Span.PREFILL_COMPUTE, self._admitted_s, self._first_step_ended_s, {**common, **prompt})
        gaps = sorted(self._gaps_ms)
        steps: dict[str, Value | None] = {
            Attr.NUM_STEPS: self._num_steps,
            Attr.MEAN_BATCH_SIZE: self._sum_batch / self._num_steps,
            Attr.FIRST_STEP_MS: (self._first_step_ended_s - self._first_step_s) * 1000,
            Attr.INTER_TOKEN_P50_MS: _quantile(gaps, 0.50),
            Attr.INTER_TOKEN_P99_MS: _quantile(gaps, 0.99),
            Attr.INTER_TOKEN_MAX_MS: gaps[-1] if gaps else None,
            Attr.NUM_PREEMPTIONS: len(self._preempted_s) or None,
        }
        events: list[tuple[str, float, Attributes]] = [(Event.PREEMPTED, at_s, {}) for at_s in self._preempted_s]
        self._span(Span.DECODE_RUN, self._run_start_s, self._last_token_s, {**common, **steps}, events)

    @property
    def _run_start_s(self) -> float:
        """Returns when the decode run began: after the first token if the prompt was computed here, else at the first
        step."""
        return self._first_step_s if self._ready_s is not None else self._first_step_ended_s

    def _transfer(
        self,
        transport: types_pb2.Transport,
        start_s: float,
        sealed_s: float,
        end_s: float,
        *,
        num_blocks: int,
        num_bytes: int,
    ) -> None:
        self._ready_s = end_s
        overlapped_ms, exposed_ms = (sealed_s - start_s) * 1000, (end_s - sealed_s) * 1000
        timings = self._timings
        timings.transfer_ms = overlapped_ms + exposed_ms
        timings.transfer_overlapped_ms, timings.transfer_exposed_ms = overlapped_ms, exposed_ms
        timings.transfer_bytes, timings.transfer_blocks, timings.transport = num_bytes, num_blocks, transport
        name = enum_word(types_pb2.Transport.DESCRIPTOR, transport)
        self._host.tally.transferred(name, num_bytes, end_s - start_s, exposed_ms / 1000)
        attributes: dict[str, Value | None] = {
            Attr.LEG: self._command.leg,
            Attr.WORKER: self._host.worker_id,
            Attr.LEASE_ID: self._command.handoff.lease_id.hex(),
            Attr.TRANSFER_TRANSPORT: name,
            Attr.TRANSFER_BYTES: num_bytes,
            Attr.TRANSFER_BLOCKS: num_blocks,
            Attr.TRANSFER_OVERLAPPED_MS: overlapped_ms,
            Attr.TRANSFER_EXPOSED_MS: exposed_ms,
        }
        self._host.span(self._command, Span.KV_TRANSFER, start_s, end_s, attributes, [(Event.SEALED, sealed_s, {})])

    def _span(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        events: Sequence[tuple[str, float, Attributes]] = (),
    ) -> None:
        self._host.span(self._command, name, start_s, end_s, attributes, events)


def _quantile(ordered: list[float], share: float) -> float | None:
    """Returns the quantile by nearest rank; None if there are no values."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else None
