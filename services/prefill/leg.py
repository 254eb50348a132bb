"""Carries out PrefillCommands, each from its arrival until its lease has ended and nothing of it is left.

Owns: the sequence in the engine, then the lease. The engine takes the LEASE references at admission; the lease's end,
whatever its reason, drops them exactly once. Never: the session stream or the lease's clocks.
"""

from __future__ import annotations

import asyncio
import logging

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import BatonError, DeadlineExceeded, unforeseen
from services.core.ids import new_lease_id
from services.engine.config import StepReport
from services.engine.schedule.sequence import Admitted, Failed, Mode, Progress, PromptScored, SequenceEvent, Token
from services.kv.lease import Lease
from services.kv.pool import Holder
from services.rpc.logging import ids
from services.rpc.names import Attr, Event, Span
from services.rpc.status import to_status
from services.rpc.telemetry import Attributes, Value
from services.worker.host import WorkerHost
from services.worker.session import RouterSession, lease_ended_of, prompt_tokens_of, tokens_of

log = logging.getLogger(__name__)


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
        self._sequences = host.new_sequences(command, Mode.PREFILL_ONLY)
        """One for each answer. The first computes the prompt, and the others sample their first tokens with it."""
        self._sequence = self._sequences[0]
        self._sequence.further = self._sequences[1:]
        self._sampled: list[types_pb2.SequenceTokens] = []
        """The first tokens so far, by ascending index."""
        self._lease: Lease | None = None
        self._admission: Admitted | None = None
        self._given_up = False
        self._chunks: list[tuple[str, float, Attributes]] = []
        self._deadline: asyncio.TimerHandle | None = None
        self._preparing: asyncio.Task[None] | None = None

    @property
    def number(self) -> int:
        return self._command.leg

    def start(self) -> None:
        self._session.legs[self.number] = self
        for sequence in self._sequences:
            self._host.hub.register(sequence.seq_id, self)
        if self._command.HasField("remaining_ms"):
            self._deadline = self._host.call_later(self._command.remaining_ms / 1000, self._deadline_passed)
        if self._host.has_to_prepare(self._command):
            self._preparing = self._host.spawn(self._add_prepared(), f"prepare leg {self.number}")
        else:
            self._host.engine.add(self._sequence)

    async def _add_prepared(self) -> None:
        """Adds the sequence with its constraint, and what could be brought of its prefix. If the constraint is invalid,
        no lease is opened, so no other leg learns of it."""
        error = await self._host.prepare(self._session, self._sequences, self._command)
        self._preparing = None
        if error is None:
            self._host.engine.add(self._sequence)
        else:
            self._fail(error)
            self._session.flush()

    def cancel(self) -> None:
        """Gives the leg up: its compute ends with the step in flight, its lease at once."""
        if self._given_up:
            return
        self._given_up = True
        if self._preparing is not None:
            self._preparing.cancel()
        self._host.engine.abort(self._sequence.seq_id)
        if self._lease is not None:
            self._host.leases.abort(self._lease.lease_id, self._host.awake.now())
        elif not self._host.engine.was_admitted(self._sequence):
            self._close()
        # Otherwise the engine has taken the lease's references, and the Admitted event that reports it is on its way.

    def cancel_answer(self, index: int) -> None:
        """Has no effect: the decode leg does not begin what its router has given up."""

    # -- what the engine reports ---------------------------------------------------------------------------------------

    def on_event(self, event: SequenceEvent, report: StepReport) -> None:
        match event:
            case Admitted():
                self._admitted(event)
            case Progress() if self._lease is not None:
                self._chunks.append((Event.CHUNK, event.now, {Attr.NUM_TOKENS: event.num_computed}))
                self._host.leases.publish(self._lease.lease_id, event.num_computed, self._host.awake.now())
                computed = worker_pb2.PromptComputed(leg=self.number, num_tokens=event.num_computed)
                self._session.emit(worker_pb2.LegEvent(prompt_computed=computed))
            case PromptScored() if self._lease is not None:
                self._session.emit(prompt_tokens_of(self.number, event))
            case Token() if self._lease is not None:
                self._sampled.append(tokens_of(self.number, event, len(self._sampled)))
                if len(self._sampled) == len(self._sequences):
                    self._seal(event.now)
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

    def _seal(self, now: float) -> None:
        """Seals the lease, since the prompt is computed, or ends it if the first token ends every answer."""
        assert self._lease is not None
        assert self._admission is not None, "it came with the lease"
        first, *others = self._sampled
        admitted_s = self._admission.now
        first.timings.prefill_wait_ms = (admitted_s - self._arrival_s) * 1000
        first.timings.prefill_compute_ms = (now - admitted_s) * 1000
        self._trace(self._admission, now)
        # The tokens are sent first: the router streams them without waiting for the transfer.
        for tokens in self._sampled:
            self._session.emit(worker_pb2.LegEvent(tokens=tokens))
        finished = all(tokens.HasField("finish") for tokens in self._sampled)
        self._given_up = finished
        self._host.leases.seal(self._lease.lease_id, first, self._host.awake.now(), others=others, finished=finished)
        if self._command.HasField("keep_at"):
            self._host.prefixes.offer(self._command.keep_at, self._host.engine.prefix_hashes(self._sequence))

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def lease_ended(self, lease: Lease) -> None:
        """Frees what the leg held, after the lease has left OPEN or SEALED for any reason."""
        if not lease.adopted:
            self._host.engine.release(lease.block_ids, Holder.LEASE)
        self._host.engine.abort(self._sequence.seq_id)
        if not self._given_up:
            self._session.emit(lease_ended_of(self.number, lease))
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
        for sequence in self._sequences:
            self._host.hub.unregister(sequence.seq_id)
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
