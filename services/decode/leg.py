"""One DecodeCommand, from its arrival to its last token.

Owns: the leg's place in the session, in the hub and in the engine. Never: how KV comes in (`intake`).
"""

from __future__ import annotations

import asyncio
import logging

from baton.v1 import decode_pb2, types_pb2
from services.core.errors import BatonError, DeadlineExceeded
from services.decode.intake import Arrival, Intake, Refused, Reservation
from services.decode.record import DecodeRecord
from services.engine.config import StepReport
from services.engine.sequence import Admitted, Failed, Mode, Preempted, SequenceEvent, Token
from services.kvtransfer.client import lease_may_live
from services.rpc.logging import ids, log_ids
from services.rpc.status import to_status
from services.worker.commands import tokens_of
from services.worker.host import WorkerHost
from services.worker.session import RouterSession

log = logging.getLogger(__name__)


class DecodeLeg:
    """Registered in `session.legs` from `start` until `_close`."""

    def __init__(
        self, host: WorkerHost, intake: Intake, session: RouterSession, command: decode_pb2.DecodeCommand
    ) -> None:
        self._host = host
        self._intake = intake
        self._session = session
        self._command = command
        self._sequence = host.new_sequence(command, Mode.GENERATE)
        self._record = DecodeRecord(host, command)
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._over = False

    @property
    def number(self) -> int:
        return self._command.leg

    def start(self) -> None:
        """Admits or refuses at once; a command without handoff queues in the engine."""
        self._session.legs[self.number] = self
        if self._command.HasField("remaining_ms"):
            self._deadline = self._host.call_later(self._command.remaining_ms / 1000, self._deadline_passed)
        if not self._command.HasField("handoff"):
            self._host.hub.register(self._sequence.seq_id, self)
            self._host.engine.add(self._sequence)
        elif self._intake.is_local(self._command.handoff):
            self._admitted(0)
            self._task = self._host.spawn(self._adopt(), f"adopt leg {self.number}")
            self._task.add_done_callback(lambda _: self._task_over())
        else:
            self._import()

    def cancel(self) -> None:
        """A running sequence leaves with the step in flight; an import's blocks follow their last copy."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()  # the leg closes when nothing of it is left
        else:
            self._host.engine.abort(self._sequence.seq_id)
            self._close()

    # -- how KV comes in -----------------------------------------------------------------------------------------------

    def _import(self) -> None:
        try:
            reservation = self._intake.reserve(self._command, self._session)
        except Refused as error:
            refused = decode_pb2.DecodeRefused(
                leg=self.number,
                needed_blocks=error.refusal.needed_blocks,
                missing_blocks=error.refusal.missing_blocks,
            )
            self._emit(decode_pb2.DecodeEvent(refused=refused))
            self._close()
        except BatonError as error:
            self._import_failed(error)
            self._close()
        else:
            self._admitted(len(reservation.prefix) * self._host.engine.info.block_size)
            self._task = self._host.spawn(self._fetch(reservation), f"import leg {self.number}")
            self._task.add_done_callback(lambda _: self._fetch_over(reservation))

    async def _fetch(self, reservation: Reservation) -> None:
        try:
            # Transfers do not know whose they are; their log lines do.
            with log_ids(self._command.request_id, self._command.traceparent):
                outcome, arrival = await self._intake.fetch(self._command, reservation)
            self._record.transferred(outcome)
            self._take_over(arrival)
        except Exception as error:  # whatever went wrong, the router must hear of it
            self._import_failed(error)

    def _fetch_over(self, reservation: Reservation) -> None:
        """Also when the task was cancelled before it ever ran."""
        self._intake.give_up(reservation)
        self._task_over()

    async def _adopt(self) -> None:
        try:
            started_s = self._host.clock.now()
            arrival = await self._intake.adopt(self._command)
            self._record.adopted(started_s, len(arrival.block_ids))
            self._take_over(arrival)
        except Exception as error:
            self._import_failed(error)

    def _task_over(self) -> None:
        if self._task is not None:  # the sequence did not reach the engine
            self._task = None
            self._close()

    def _take_over(self, arrival: Arrival) -> None:
        """The KV is here and valid: token 0 is repeated to the router, and the sequence joins the batch."""
        if self._over:  # cancelled in the very moment the release was answered
            self._intake.discard(arrival)
            return
        self._emit(decode_pb2.DecodeEvent(ready=decode_pb2.ImportReady(leg=self.number)))
        tokens = types_pb2.SequenceTokens()
        tokens.CopyFrom(arrival.first_token)
        tokens.leg = self.number
        tokens.ClearField("timings")
        self._emit(decode_pb2.DecodeEvent(tokens=tokens))
        if not tokens.HasField("finish"):
            self._task = None
            self._host.hub.register(self._sequence.seq_id, self)
            self._intake.enter(self._sequence, arrival)
            self._log(logging.INFO, "decode begins")

    # -- what the engine reports ---------------------------------------------------------------------------------------

    def on_event(self, event: SequenceEvent, report: StepReport) -> None:
        match event:
            case Admitted():
                self._record.admitted(event.now)
                self._admitted(event.num_cached)
            case Token():
                self._record.token(event.now, report)
                tokens = tokens_of(self.number, event)
                if event.finish is not None:
                    tokens.finish.timings.CopyFrom(self._record.timings())
                self._session.emit(decode_pb2.DecodeEvent(tokens=tokens))
                if event.finish is not None:
                    self._close()
            case Preempted():
                self._record.preempted(event.now)
            case Failed():
                self._fail(event.error)

    # -- what the router is told ---------------------------------------------------------------------------------------

    def _admitted(self, num_cached: int) -> None:
        self._emit(
            decode_pb2.DecodeEvent(admitted=decode_pb2.DecodeAdmitted(leg=self.number, cached_tokens=num_cached))
        )

    def _import_failed(self, error: Exception) -> None:
        failed = decode_pb2.ImportFailed(leg=self.number, lease_alive=lease_may_live(error), status=to_status(error))
        if not self._over:
            self._emit(decode_pb2.DecodeEvent(import_failed=failed))
            reason = error.reason if isinstance(error, BatonError) else BatonError.reason
            self._host.tally.transfers_failed[reason.lower()] += 1
            self._log(logging.WARNING, f"import failed: {error}")

    def _deadline_passed(self) -> None:
        self._fail(DeadlineExceeded("the deadline passed on the decode worker"))

    def _fail(self, error: Exception) -> None:
        if not self._over:
            failed = types_pb2.LegFailed(leg=self.number, status=to_status(error))
            self._emit(decode_pb2.DecodeEvent(failed=failed))
            self._log(logging.WARNING, f"failed: {error}")
        self.cancel()

    def _log(self, level: int, what: str) -> None:
        log.log(level, "leg %d: %s", self.number, what, extra=ids(self._command.request_id, self._command.traceparent))

    def _emit(self, event: decode_pb2.DecodeEvent) -> None:
        self._session.emit(event)
        self._session.flush()

    def _close(self) -> None:
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        self._host.hub.unregister(self._sequence.seq_id)
        self._host.leg_over(self._session, self.number)
        self._record.close()
