"""Carries out PrefillCommands, each from its arrival until its lease has ended and nothing of it is left.

Owns: the sequence in the engine, then the lease. The engine takes the LEASE references at admission; the lease's end,
whatever its reason, drops them exactly once. Never: the session stream or the lease's clocks.
"""

from __future__ import annotations

import asyncio
import logging

from baton.v1 import worker_pb2
from services.core.errors import BatonError, DeadlineExceeded, unforeseen
from services.core.ids import new_lease_id
from services.engine.config import StepReport
from services.engine.schedule.sequence import Admitted, Failed, Mode, Progress, SequenceEvent, Token
from services.kv.lease import Lease, LeaseState
from services.kv.pool import Holder
from services.rpc.logging import ids
from services.rpc.names import Attr, Event, Span
from services.rpc.status import to_status
from services.rpc.telemetry import Attributes, Value
from services.worker.commands import tokens_of
from services.worker.host import WorkerHost
from services.worker.session import RouterSession

log = logging.getLogger(__name__)

_END_REASONS = {
    LeaseState.RELEASED: worker_pb2.LEASE_END_REASON_RELEASED,
    LeaseState.EXPIRED: worker_pb2.LEASE_END_REASON_EXPIRED,
    LeaseState.ABORTED: worker_pb2.LEASE_END_REASON_ABORTED,
}


class PrefillPhase:
    def __init__(self, host: WorkerHost) -> None:
        self._host = host

    def begin(self, session: RouterSession, command: worker_pb2.PrefillCommand) -> None:
        PrefillLeg(self._host, session, command).start()


class PrefillLeg:
    """A prefill leg is registered in `session.legs` and in the hub from `start` until `_close`."""

    def __init__(self, host: WorkerHost, session: RouterSession, command: worker_pb2.PrefillCommand) -> None:
        self._host = host
        self._session = session
        self._command = command
        self._arrival_s = host.clock.now()
        self._sequence = host.new_sequence(command, Mode.PREFILL_ONLY)
        self._lease: Lease | None = None
        self._admission: Admitted | None = None
        self._given_up = False
        self._chunks: list[tuple[str, float, Attributes]] = []
        self._deadline: asyncio.TimerHandle | None = None

    @property
    def number(self) -> int:
        return self._command.leg

    def start(self) -> None:
        self._session.legs[self.number] = self
        self._host.hub.register(self._sequence.seq_id, self)
        if self._command.HasField("remaining_ms"):
            self._deadline = self._host.call_later(self._command.remaining_ms / 1000, self._deadline_passed)
        self._host.engine.add(self._sequence)

    def cancel(self) -> None:
        """Gives the leg up: its compute ends with the step in flight, its lease at once."""
        if self._given_up:
            return
        self._given_up = True
        self._host.engine.abort(self._sequence.seq_id)
        if self._lease is not None:
            self._host.leases.abort(self._lease.lease_id, self._host.awake.now())
        elif not self._host.engine.was_admitted(self._sequence):
            self._close()
        # Otherwise the engine has taken the lease's references, and the Admitted event that reports it is on its way.

    # -- what the engine reports ---------------------------------------------------------------------------------------

    def on_event(self, event: SequenceEvent, report: StepReport) -> None:
        match event:
            case Admitted():
                self._admitted(event)
            case Progress() if self._lease is not None:
                self._chunks.append((Event.CHUNK, event.now, {Attr.NUM_TOKENS: event.num_computed}))
                self._host.leases.publish(self._lease.lease_id, event.num_computed, self._host.awake.now())
            case Token() if self._lease is not None:
                self._sampled(event)
            case Failed():
                self._fail(event.error)

    def on_defect(self, event: SequenceEvent, error: Exception) -> None:
        if isinstance(event, Admitted) and self._lease is None:  # no lease has taken the references over
            self._host.engine.release(event.block_ids, Holder.LEASE)
        self._given_up = False  # the leg may have been about to end in order
        try:
            self._fail(unforeseen(error))
        finally:
            self.cancel()  # even where the router could not be told
            self._close()

    def _admitted(self, event: Admitted) -> None:
        if self._given_up:
            self._host.engine.release(event.block_ids, Holder.LEASE)
            self._close()
            return
        self._admission = event
        self._lease = self._host.leases.open(
            new_lease_id(),
            owner=self._session,
            block_ids=event.block_ids,
            num_tokens=len(self._command.token_ids),
            now=self._host.awake.now(),
            listener=self,
        )
        started = worker_pb2.PrefillStarted(
            leg=self.number,
            lease_id=self._lease.lease_id,
            source=self._host.source(),
            cached_tokens=event.num_cached,
        )
        self._session.emit(worker_pb2.LegEvent(started=started))
        self._log(logging.INFO, "prefill admitted")

    def _sampled(self, event: Token) -> None:
        """Seals the lease, since the prompt is computed, or ends it if the first token ends the sequence."""
        assert self._lease is not None
        assert self._admission is not None, "it came with the lease"
        tokens = tokens_of(self.number, event)
        admitted_s = self._admission.now
        tokens.timings.prefill_wait_ms = (admitted_s - self._arrival_s) * 1000
        tokens.timings.prefill_compute_ms = (event.now - admitted_s) * 1000
        self._trace(self._admission, event.now)
        # The token is sent first: the router streams it without waiting for the transfer.
        self._session.emit(worker_pb2.LegEvent(tokens=tokens))
        finished = event.finish is not None
        self._given_up = finished
        self._host.leases.seal(self._lease.lease_id, tokens, self._host.awake.now(), finished=finished)

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def lease_ended(self, lease: Lease) -> None:
        """Frees what the leg held, after the lease has left OPEN or SEALED for any reason."""
        if not lease.adopted:
            self._host.engine.release(lease.block_ids, Holder.LEASE)
        self._host.engine.abort(self._sequence.seq_id)
        if not self._given_up:
            ended = worker_pb2.LeaseEnded(leg=self.number, lease_id=lease.lease_id, reason=_END_REASONS[lease.state])
            self._session.emit(worker_pb2.LegEvent(lease_ended=ended))
            self._session.flush()
        self._lease = None  # the lease refers to this leg; a cycle of the two would wait for the garbage collector
        self._close()

    def _deadline_passed(self) -> None:
        self._fail(DeadlineExceeded("the deadline passed on the prefill worker"))
        self._session.flush()

    def _fail(self, error: Exception) -> None:
        if not self._given_up:
            failed = worker_pb2.LegFailed(leg=self.number, status=to_status(error))
            self._session.emit(worker_pb2.LegEvent(failed=failed))
            reason = error.reason if isinstance(error, BatonError) else repr(error)
            self._log(logging.WARNING, f"failed: {reason}")
        self.cancel()

    def _log(self, level: int, what: str) -> None:
        log.log(level, "leg %d: %s", self.number, what, extra=ids(self._command.request_id, self._command.traceparent))

    def _close(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._host.hub.unregister(self._sequence.seq_id)
        self._host.leg_over(self._session, self.number)

    def _trace(self, admission: Admitted, end_s: float) -> None:
        common: dict[str, Value] = {Attr.LEG: self.number, Attr.WORKER: self._host.worker_id}
        self._host.span(self._command, Span.PREFILL_WAIT, self._arrival_s, admission.now, common)
        self._host.span(
            self._command,
            Span.PREFILL_COMPUTE,
            admission.now,
            end_s,
            {
                **common,
                Attr.NUM_TOKENS: len(self._command.token_ids),
                Attr.CACHED_TOKENS: admission.num_cached,
                Attr.NUM_CHUNKS: len(self._chunks),
            },
            self._chunks,
        )
