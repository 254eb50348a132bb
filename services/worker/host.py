"""Puts a worker together: engine, block pool, leases, transfers, registration.

Owns: the order of start, drain and stop; the handoff's tables; and what phases need of all that. Never: what a phase
does with a command, when its process is to end (`main`), or how it finishes what it has (`departure`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Protocol

from baton.v1 import control_pb2, types_pb2
from services.core.errors import BatonError
from services.core.ids import new_incarnation
from services.engine.block_pool import Holder
from services.engine.engine import Engine
from services.engine.sequence import Mode, Sequence
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.imports import Import, ImportTable
from services.kvtransfer.lease import Lease
from services.kvtransfer.lease_table import LeaseTable
from services.kvtransfer.wire import layout_to_proto
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import UNTRACED, Attributes, Tracer
from services.worker import commands, report
from services.worker.config import WorkerConfig
from services.worker.departure import Departure
from services.worker.hub import EventHub
from services.worker.machine import Machine
from services.worker.registration import keep_registered
from services.worker.session import RouterSession, SessionHost
from services.worker.tally import Tally
from services.worker.tasks import OwnedTasks
from services.worker.transfer import TRANSFER_SERVICE, Transfer

__all__ = ["MAX_STEP_FAILURES", "TRANSFER_SERVICE", "Phase", "WorkerHost", "role_name"]

log = logging.getLogger(__name__)

MAX_STEP_FAILURES = 3
"""Steps in a row that raise before the worker says that it does not serve."""
_STOP_GRACE_S = 3.0
"""For answers that are on their way when all is over, such as that to a Release; nobody is waited for without need."""


class Phase(Protocol):
    """A servicer of one phase."""

    def __init__(self, host: WorkerHost) -> None: ...

    full_name: str
    sessions: SessionHost[Any, Any]

    def register(self, server: Any) -> None: ...


class WorkerHost:
    """Made on the event loop with a loaded engine; `start` serves and registers, `drain` and `stop` end it."""

    def __init__(
        self,
        config: WorkerConfig,
        role: types_pb2.WorkerRole,
        engine: Engine,
        server: GrpcServer,
        tracer: Tracer,
        incarnation: int | None = None,
        machine: Machine | None = None,
    ) -> None:
        self.config = config
        self.role = role
        self.engine = engine
        self.server = server
        self.machine = machine or Machine()
        self.clock = self.machine.clock
        self.incarnation = incarnation or new_incarnation()
        self.failing = False
        """Step after step raised. Commands are still taken: a good step ends it, and only a probe may bring one."""
        self.tally = Tally()
        self.worker_id = config.worker_id or f"{role_name(role)}-{server.port}"
        self.hub = EventHub(asyncio.get_running_loop(), self._stepped)
        self.leases = LeaseTable(
            engine.info.block_size,
            on_end=self._lease_ended,
            ttl_s=config.lease_ttl_s,
            stall_s=config.stall_s,
        )
        self.imports = ImportTable(on_freed=self._import_freed)
        self.board = LeaseBoard(self.leases, self.clock)
        self._tracer = tracer
        self._phases: list[Phase] = []
        self._tasks = OwnedTasks()
        self._registrations: list[asyncio.Task[None]] = []
        self._departure = Departure()
        self._num_snapshots = 0
        self.transfer = Transfer(
            config,
            engine,
            self.machine,
            self.board,
            self.imports,
            worker_id=self.worker_id,
            incarnation=self.incarnation,
        )
        self.layout = self.transfer.layout
        self.fetcher = self.transfer.fetcher

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, phases: Iterable[Phase]) -> None:
        """Serves the phases, and joins every router until `stop`."""
        self._phases = list(phases)
        self.transfer.register(self.server)
        for phase in self._phases:
            self.server.add(phase.full_name, lambda servicer, server: servicer.register(server), phase)
        self.engine.start(self.hub.on_step)
        await self.server.set_ready(True)
        for target in self.config.router:
            joining = keep_registered(target, self.describe, self.machine.dial)
            self._registrations.append(asyncio.create_task(joining, name=f"register {target}"))
        log.info(
            "%s serves %s on %s, reached at %s; KV transport: %s",
            self.worker_id,
            self.engine.info.model_id,
            self.server.address,
            self.address,
            self.transfer.summary,
        )

    def leave(self, within_s: float, why: str) -> None:
        """Takes nothing new from now on. Routers see it in the snapshots; whoever waits in `left` ends the process."""
        if not self.draining:
            log.info("%s is to leave (%s): %d legs, %g s", self.worker_id, why, self.num_legs, within_s)
        self._departure.ask(within_s)
        self.transfer.leave()
        for task in self._registrations:
            task.cancel()
        self.spawn(self.server.set_ready(False), "health")
        self._flush_sessions()

    async def left(self) -> None:
        """Returns when the worker was asked to leave and every leg is over, or its time."""
        if num_legs := await self._departure.complete(lambda: self.num_legs):
            log.warning("drain deadline: %d legs are given up", num_legs)

    def fail(self, error: BatonError) -> None:
        """This worker can compute no more. Its sessions end with the error, which routers count as a crash."""
        log.critical("%s: %s", self.worker_id, error)
        for phase in self._phases:
            phase.sessions.end_all(error)

    async def stop(self) -> None:
        """Ends every session and frees what they held. Leaves no task, thread, socket or descriptor."""
        for task in self._registrations:
            task.cancel()
        await asyncio.gather(*self._registrations, return_exceptions=True)
        for phase in self._phases:
            phase.sessions.end_all()
        await self.server.stop(_STOP_GRACE_S)
        await self._tasks.close()
        await self.transfer.close()
        self.board.close()
        await asyncio.to_thread(self.engine.stop)
        self.engine.cache.close()

    # -- what phases use -----------------------------------------------------------------------------------------------

    def session_host(
        self, name: str, accept: Callable[[RouterSession, Any], None], respond: Callable[[list[Any]], Any]
    ) -> SessionHost[Any, Any]:
        return SessionHost(
            name,
            self.incarnation,
            self.clock,
            accept=accept,
            respond=respond,
            heartbeat_s=self.config.heartbeat_s,
            silence_s=self.config.silence_s,
        )

    def new_sequence(self, command: commands.Command, mode: Mode) -> Sequence:
        info = self.engine.info
        return commands.sequence_of(
            command,
            seq_id=self.hub.new_seq_id(),
            mode=mode,
            now=self.clock.now(),
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
        )

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """A task that is awaited at `stop` at the latest, and whose failure is never silent."""
        return self._tasks.spawn(work, name)

    def leg_over(self, session: RouterSession, leg: int) -> None:
        """Nothing of the leg is left."""
        session.legs.pop(leg, None)
        self._departure.leg_over()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0.0, delay_s), callback)

    def source(self) -> types_pb2.KVSource:
        """Where this worker's leases are fetched."""
        return types_pb2.KVSource(
            address=self.address,
            incarnation=self.incarnation,
            shm_socket=self.transfer.socket_name,
            layout=layout_to_proto(self.layout),
        )

    def release_blocks(self, block_ids: Iterable[int], holder: Holder) -> None:
        """Drops one reference to each block; sequences that wait for room are looked at again."""
        with self.engine.lock:
            self.engine.pool.release(list(block_ids), holder)
        self.engine.wake()

    def span(
        self,
        command: commands.Command,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        events: Iterable[tuple[str, float, Attributes]] = (),
    ) -> None:
        """A span of the command's request, under the router's span for this leg."""
        self._tracer.span(
            name,
            request_id=command.request_id,
            start_s=start_s,
            end_s=end_s,
            parent=command.traceparent or UNTRACED,  # a router without tracing has no trace for it to belong to
            attributes=attributes,
            events=list(events),
        )

    # -- what shows ----------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """It is to leave, and takes nothing new."""
        return self._departure.asked

    @property
    def address(self) -> str:
        """host:port others dial."""
        return self.config.advertise or self.server.address

    @property
    def num_legs(self) -> int:
        return sum(len(session.legs) for phase in self._phases for session in phase.sessions)

    @property
    def num_sessions(self) -> int:
        return sum(len(phase.sessions) for phase in self._phases)

    def describe(self) -> control_pb2.WorkerDescription:
        return report.describe(self)

    def load_snapshot(self) -> types_pb2.LoadSnapshot:
        self._num_snapshots += 1
        return report.snapshot(self, self._num_snapshots)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _lease_ended(self, lease: Lease) -> None:
        self.tally.leases_ended[lease.state.value] += 1
        lease.note.lease_ended(lease)  # type: ignore[attr-defined]  # a PrefillLeg, which this layer does not know

    def _import_freed(self, import_: Import) -> None:
        self.tally.imports_failed += 1
        self.release_blocks(import_.block_ids, Holder.IMPORT)

    def _stepped(self) -> None:
        failing = self.engine.consecutive_step_failures >= MAX_STEP_FAILURES
        if failing != self.failing:
            self.failing = failing
            log.log(logging.WARNING, "%s: steps %s", self.worker_id, "keep failing" if failing else "succeed again")
            self.spawn(self._tell_health(), "health")
        self._flush_sessions()

    async def _tell_health(self) -> None:
        """Of the phases only: leases can be fetched whatever the steps do."""
        await self.server.set_ready(not (self.failing or self.draining), *(phase.full_name for phase in self._phases))

    def _flush_sessions(self) -> None:
        for phase in self._phases:
            for session in phase.sessions:
                session.flush()


def role_name(role: types_pb2.WorkerRole) -> str:
    return types_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()
