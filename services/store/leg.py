"""Carries out ParkCommands, each from its arrival until its lease has ended and nothing of it is left.

A park leg is the destination of one handoff and then the source of another: it takes the KV in as a decode leg does,
and leases the same blocks out again as a prefill leg does, with the same first tokens.
Owns: the leg's place in its session, and the blocks on their way from the import to the lease. Never: how KV is fetched
(`services.kvtransfer`), or whether there is room (`services.worker.handoffs`).
"""

from __future__ import annotations

import asyncio
import logging

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import DeadlineExceeded, InvalidRequest, LayoutMismatch, LeaseInvalid, unforeseen
from services.core.hashing import num_blocks_for
from services.core.ids import new_lease_id
from services.kv.handoff_admission import AdmissionPolicy, EngineRoom
from services.kv.imports import Import, ImportState
from services.kv.lease import Lease
from services.kv.pool import Holder
from services.kvtransfer.client import FetchOrder, FetchOutcome
from services.rpc.logging import log_ids
from services.rpc.names import Attr, Event, Span
from services.rpc.parameters import MAX_ANSWERS, within
from services.rpc.plain import enum_word
from services.rpc.telemetry import Attributes, Value
from services.store.engine import StoreEngine
from services.worker.commands import num_answers_of
from services.worker.handoffs import Expected, HandoffIntake, HandoffLeg, Refused
from services.worker.host import WorkerHost
from services.worker.session import RouterSession, lease_ended_of


class StorePhase:
    def __init__(self, host: WorkerHost, engine: StoreEngine) -> None:
        """`engine` is the host's."""
        self._host = host
        self._engine = engine
        # Nothing that is kept grows, so that no room is left for it.
        self._intake = HandoffIntake(host, AdmissionPolicy(watermark=0.0))

    def begin(self, session: RouterSession, command: worker_pb2.ParkCommand) -> None:
        within("n", num_answers_of(command), 1, MAX_ANSWERS)
        if command.num_tokens < 1 or command.output_base < 0:
            raise InvalidRequest("num_tokens", "is not positive, or output_base is negative")
        ParkLeg(self._host, self._engine, self._intake, session, command).start()


class ParkLeg(HandoffLeg):
    """A park leg is registered in `session.legs` from `start` until `_close`."""

    def __init__(
        self,
        host: WorkerHost,
        engine: StoreEngine,
        intake: HandoffIntake,
        session: RouterSession,
        command: worker_pb2.ParkCommand,
    ) -> None:
        super().__init__(host, session, command)
        self._engine = engine
        self._intake = intake
        self._command = command
        self._arrival_s = host.clock.now()
        self._import: Import | None = None
        self._lease: Lease | None = None
        self._task: asyncio.Task[None] | None = None
        """Takes the KV in."""
        self._deadline: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Admits or refuses the handoff at once, and begins to fetch it."""
        self._session.legs[self.number] = self
        if self._command.HasField("remaining_ms"):
            self._deadline = self._host.call_later(self._command.remaining_ms / 1000, self._deadline_passed)
        try:
            self._intake.demand_layout(self._command.handoff)
            block_ids = self._set_aside()
        except Refused as error:
            self._emit(error.event(self.number))
            self._close()
        except LayoutMismatch as error:
            self._import_failed(error)
            self._close()
        else:
            self._import = self._host.imports.reserve(block_ids, self._host.clock.now())
            self._emit(worker_pb2.LegEvent(admitted=worker_pb2.DecodeAdmitted(leg=self.number)))
            self._task = self._host.spawn(self._park(self._import), f"park leg {self.number}")
            self._task.add_done_callback(lambda _: self._task_over())

    def cancel(self) -> None:
        """Gives the leg up: its lease ends at once, an import's blocks are free after their last copy."""
        if self._over:
            return
        self._over = True
        if self._task is not None:
            self._task.cancel()  # the leg closes when its task has ended
        elif self._lease is not None:
            self._host.leases.abort(self._lease.lease_id, self._host.awake.now())
        else:
            self._close()

    def cancel_answer(self, index: int) -> None:
        """Has no effect: the decode leg does not begin what its router has given up."""

    # -- how KV comes in -----------------------------------------------------------------------------------------------

    def _set_aside(self) -> list[int]:
        command = self._command

        def check(num_fresh: int, room: EngineRoom) -> None:
            self._intake.check(command.handoff, num_fresh, command.age_ms, room, 1)

        num_blocks = num_blocks_for(command.num_tokens, self._host.engine.info.block_size)
        return self._engine.set_aside(num_blocks, check)

    async def _park(self, import_: Import) -> None:
        command = self._command
        order = FetchOrder(
            source=command.handoff.source,
            lease_id=command.handoff.lease_id,
            leg=self.number,
            import_=import_,
            first_block=0,
            targets=import_.block_ids,
        )
        expected = Expected(command.num_tokens, num_answers_of(command), command.output_base)
        try:
            # A transfer does not know its request; its log lines get the ids here.
            with log_ids(command.request_id, command.traceparent):
                outcome = await self._intake.fetch(order, expected)
        except Exception as error:  # whatever went wrong, the router must learn of it
            self._import_failed(error)
            return
        if not outcome.ready:
            self._import_failed(LeaseInvalid("its first tokens have ended every answer, and nothing is to be kept"))
        elif not self._over:  # else the leg was cancelled just when the Release was answered
            try:
                self._lease_out(import_, outcome)
            except Exception as error:
                self._host.defect(error)
                self._fail(unforeseen(error))

    def _lease_out(self, import_: Import, outcome: FetchOutcome) -> None:
        """Opens a lease of the import's blocks, and seals it with what the source's seal brought."""
        leases, now = self._host.leases, self._host.awake.now()
        lease = leases.open(
            new_lease_id(),
            owner=self._session,
            block_ids=import_.block_ids,
            num_tokens=outcome.num_tokens,
            now=now,
            listener=self,
        )
        self._engine.lease(import_.block_ids)
        self._import, self._lease, self._task = None, lease, None
        leases.seal(lease.lease_id, outcome.first_token, now, others=outcome.other_first_tokens)
        parked = worker_pb2.Parked(leg=self.number, lease_id=lease.lease_id, source=self._host.source())
        self._emit(worker_pb2.LegEvent(parked=parked))
        self._note(outcome)
        self._log(logging.INFO, "handoff parked")

    def _task_over(self) -> None:
        """Closes the leg if its task has ended without a lease: also if it was cancelled before it ran."""
        if self._task is not None:
            self._task = None
            self._close()

    # -- how it ends ---------------------------------------------------------------------------------------------------

    def lease_ended(self, lease: Lease) -> None:
        """Frees the blocks, after the lease was released, has expired or was aborted."""
        self._engine.release(lease.block_ids, Holder.LEASE)
        if not self._over:
            self._emit(lease_ended_of(self.number, lease))
        self._lease = None  # the lease refers to this leg; a cycle of the two would wait for the garbage collector
        self._close()

    def _deadline_passed(self) -> None:
        self._fail(DeadlineExceeded("the deadline passed while the handoff was parked"))

    def _import_failed(self, error: Exception) -> None:
        super()._import_failed(error)
        self._over = True

    def _close(self) -> None:
        self._over = True
        if self._deadline is not None:
            self._deadline.cancel()
        if self._import is not None:
            self._host.imports.drain(self._import, self._host.clock.now())
            if self._import.state is ImportState.READY:
                self._engine.release(self._import.block_ids, Holder.IMPORT)
            self._import = None
        self._host.leg_over(self._session, self.number)

    # -- what shows ----------------------------------------------------------------------------------------------------

    def _note(self, outcome: FetchOutcome) -> None:
        """Counts the transfer, and records its span."""
        name, host = enum_word(types_pb2.Transport.DESCRIPTOR, outcome.transport), self._host
        host.tally.transferred(
            name, outcome.num_bytes, outcome.ended_s - outcome.began_s, outcome.ended_s - outcome.sealed_s
        )
        attributes: dict[str, Value | None] = {
            Attr.LEG: self.number,
            Attr.WORKER: host.worker_id,
            Attr.LEASE_ID: self._command.handoff.lease_id.hex(),
            Attr.TRANSFER_TRANSPORT: name,
            Attr.TRANSFER_BYTES: outcome.num_bytes,
            Attr.TRANSFER_BLOCKS: outcome.num_blocks,
        }
        events: list[tuple[str, float, Attributes]] = [(Event.SEALED, outcome.sealed_s, {})]
        host.span(self._command, Span.KV_PARK, self._arrival_s, outcome.ended_s, attributes, events)
