"""Carries out DecodeCommands, each from its arrival to its last token.

Owns: the leg's place in the session, in the hub and in the engine. Never: how KV is taken in (`intake`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import BatonError, DeadlineExceeded, LayoutMismatch, unforeseen
from services.decode.intake import Held, ImportIntake, Refused
from services.decode.record import DecodeRecord
from services.engine.config import StepReport
from services.engine.schedule.sequence import Admitted, Failed, Mode, Preempted, SequenceEvent, Token
from services.kvtransfer.client import lease_may_live
from services.rpc.logging import ids, log_ids
from services.rpc.status import to_status
from services.worker.commands import tokens_of
from services.worker.host import WorkerHost
from services.worker.session import RouterSession

log = logging.getLogger(__name__)


class DecodePhase:
    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._intake = ImportIntake(host)

    def begin(self, session: RouterSession, command: worker_pb2.DecodeCommand) -> None:
        DecodeLeg(self._host, self._intake, session, command).start()


class DecodeLeg:
    """A decode leg is registered in `session.legs` from `start` until `_close`."""

    def __init__(
        self, host: WorkerHost, intake: ImportIntake, session: RouterSession, command: worker_pb2.DecodeCommand
    ) -> None:
        self._host = host
        self._intake = intake
        self._session = session
        self._command = command
        self._sequence = host.new_sequence(command, Mode.GENERATE)
        self._record = DecodeRecord(host, command)
        self._held: Held | None = None
        """The blocks that the sequence does not have yet."""
        self._task: asyncio.Task[None] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._over = False

    @property
    def number(self) -> int:
        return self._command.leg

    def start(self) -> None:
        """Starts the leg: without a handoff the engine queues the sequence, else the handoff's KV is taken in.

        A handoff from another worker is admitted or refused as soon as its tokens are hashed; one of this worker's own
        is admitted at once.
        """
        self._session.legs[self.number] = self
        if self._command.HasField("remaining_ms"):
            self._deadline = self._host.call_later(self._command.remaining_ms / 1000, self._deadline_passed)
        if not self._command.HasField("handoff"):
            self._host.hub.register(self._sequence.seq_id, self)
            self._host.engine.add(self._sequence)
        elif self._intake.is_local(self._command.handoff):
            self._admitted(0)
            self._run(self._adopt, f"adopt leg {self.number}")
        else:
            self._run(self._import, f"import leg {self.number}")

    def cancel(self) -> None:
        """Gives the leg up: its sequence leaves after the step in flight, an import's blocks after their last copy."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()  # the leg closes when its task has ended
        else:
            self._host.engine.abort(self._sequence.seq_id)
            self._close()

    # -- how KV comes in -----------------------------------------------------------------------------------------------

    async def _import(self) -> None:
        try:
            await self._host.hash_prompt(self._sequence)
            self._held = self._intake.reserve(self._command, self._sequence)
        except Refused as error:
            refused = worker_pb2.DecodeRefused(
                leg=self.number,
                needed_blocks=error.refusal.needed_blocks,
                missing_blocks=error.refusal.missing_blocks,
            )
            self._emit(worker_pb2.LegEvent(refused=refused))
        except LayoutMismatch as error:
            self._import_failed(error)
        else:
            self._admitted(len(self._held.prefix) * self._host.engine.info.block_size)
            await self._fetch(self._held)

    def _run(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        self._task = self._host.spawn(self._reporting_defects(work), name)
        self._task.add_done_callback(lambda _: self._task_over())

    async def _reporting_defects(self, work: Callable[[], Awaitable[None]]) -> None:
        """Runs the work, and reports to the router any exception that the work does not handle itself.

        Such an exception is no failed import, which another worker could repeat, but a defect of this one.
        """
        try:
            await work()
        except Exception as error:
            self._host.defect(error)
            self._fail(unforeseen(error))

    def _task_over(self) -> None:
        """Closes the leg if its task has ended and the sequence did not reach the engine.

        This holds for a task that was cancelled before it ran, too.
        """
        if self._task is not None:
            self._task = None
            self._close()

    async def _fetch(self, held: Held) -> None:
        try:
            # A transfer does not know its request; its log lines get the ids here.
            with log_ids(self._command.request_id, self._command.traceparent):
                outcome = await self._intake.fetch(self._command, held)
        except Exception as error:  # whatever went wrong, the router must learn of it
            self._import_failed(error)
            return
        self._record.transferred(outcome)
        self._take_over(outcome.first_token, held if outcome.ready else None)

    async def _adopt(self) -> None:
        started_s = self._host.clock.now()
        await self._host.hash_prompt(self._sequence)
        try:
            first_token, self._held = await self._intake.adopt(self._command)
        except Exception as error:
            self._import_failed(error)
            return
        self._record.adopted(started_s, len(self._held.block_ids) if self._held is not None else 0)
        self._take_over(first_token, self._held)

    def _take_over(self, first_token: types_pb2.SequenceTokens, held: Held | None) -> None:
        """Reports valid KV and repeats token 0 to the router, and lets the sequence join the batch.

        `held` has its blocks; None if token 0 ended the sequence.
        """
        if self._over:  # the leg was cancelled just when the Release was answered
            return
        self._emit(worker_pb2.LegEvent(ready=worker_pb2.ImportReady(leg=self.number)))
        tokens = types_pb2.SequenceTokens()
        tokens.CopyFrom(first_token)
        tokens.leg = self.number
        tokens.ClearField("timings")
        self._emit(worker_pb2.LegEvent(tokens=tokens))
        if held is not None:
            self._log(logging.INFO, "decode begins")
            self._host.hub.register(self._sequence.seq_id, self)
            self._intake.enter(self._sequence, first_token, held)
            self._task = None

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
                self._session.emit(worker_pb2.LegEvent(tokens=tokens))
                if event.finish is not None:
                    self._close()
            case Preempted():
                self._record.preempted(event.now)
            case Failed():
                self._fail(event.error)

    def on_defect(self, event: SequenceEvent, error: Exception) -> None:
        self._fail(unforeseen(error))

    # -- what the router is told ---------------------------------------------------------------------------------------

    def _admitted(self, num_cached: int) -> None:
        self._emit(worker_pb2.LegEvent(admitted=worker_pb2.DecodeAdmitted(leg=self.number, cached_tokens=num_cached)))

    def _import_failed(self, error: Exception) -> None:
        if not isinstance(error, BatonError):
            self._host.defect(error)
        failed = worker_pb2.ImportFailed(leg=self.number, lease_alive=lease_may_live(error), status=to_status(error))
        if not self._over:
            self._emit(worker_pb2.LegEvent(import_failed=failed))
            reason = error.reason if isinstance(error, BatonError) else BatonError.reason
            self._host.tally.transfers_failed[reason.lower()] += 1
            self._log(logging.WARNING, f"import failed: {error}")

    def _deadline_passed(self) -> None:
        self._fail(DeadlineExceeded("the deadline passed on the decode worker"))

    def _fail(self, error: Exception) -> None:
        if not self._over:
            failed = worker_pb2.LegFailed(leg=self.number, status=to_status(error))
            self._emit(worker_pb2.LegEvent(failed=failed))
            self._log(logging.WARNING, f"failed: {error}")
        self.cancel()

    def _log(self, level: int, what: str) -> None:
        log.log(level, "leg %d: %s", self.number, what, extra=ids(self._command.request_id, self._command.traceparent))

    def _emit(self, event: worker_pb2.LegEvent) -> None:
        self._session.emit(event)
        self._session.flush()

    def _close(self) -> None:
        self._over = True
        if self._held is not None:
            self._intake.give_up(self._held)
        if self._deadline is not None:
            self._deadline.cancel()
        self._host.hub.unregister(self._sequence.seq_id)
        self._host.leg_over(self._session, self.number)
        self._record.close()
