"""Puts a worker together: engine, block pool, leases, transfer service, registration.

Owns: the order of start, drain and stop; the handoff's tables; and what phases need of all that. Never: what a phase
does with a command.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from baton.v1 import control_pb2, kvtransfer_pb2_grpc, types_pb2
from services.core.errors import BatonError
from services.core.ids import host_id, new_incarnation
from services.engine.block_pool import Holder
from services.engine.engine import Engine
from services.engine.sequence import Mode, Sequence
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import BlockFetcher
from services.kvtransfer.imports import Import, ImportTable
from services.kvtransfer.layout import Layout
from services.kvtransfer.lease import Lease
from services.kvtransfer.lease_table import LeaseTable
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.wire import layout_to_proto
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call
from services.rpc.telemetry import Attributes, Tracer
from services.worker import commands
from services.worker.config import WorkerConfig
from services.worker.hub import EventHub
from services.worker.machine import Machine
from services.worker.registration import keep_registered
from services.worker.session import RouterSession, SessionHost

log = logging.getLogger(__name__)


TRANSFER_SERVICE = "baton.v1.KVTransferService"
MAX_STEP_FAILURES = 3
"""Steps in a row that raise before the worker says that it does not serve."""


class Phase(Protocol):
    """A servicer of one phase."""

    def __init__(self, host: WorkerHost) -> None: ...

    full_name: str
    sessions: SessionHost[Any, Any]

    def register(self, server: Any) -> None: ...


@dataclass(slots=True)
class Tally:
    """Counts of this process that nothing else keeps, for metrics. Transports by name."""

    leases_ended: Counter[str] = field(default_factory=Counter)
    imports: Counter[str] = field(default_factory=Counter)
    transfer_bytes: Counter[str] = field(default_factory=Counter)
    exposed_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    imports_failed: int = 0


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
        self.draining = False
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
        self._tasks: set[asyncio.Task[None]] = set()
        self._registrations: list[asyncio.Task[None]] = []
        self._leg_over = asyncio.Event()
        self._num_snapshots = 0
        self._connect_transfer()

    def _connect_transfer(self) -> None:
        config, cache, info = self.config, self.engine.cache, self.engine.info
        self.layout = Layout(
            model_id=info.model_id,
            weights_digest=info.weights_digest,
            dtype=info.dtype,
            num_layers=info.num_layers,
            num_kv_heads=info.num_kv_heads,
            head_dim=info.head_dim,
            block_size=info.block_size,
        )
        self._shm: ShmServer | None = None
        if cache.fd is not None and config.transport != "grpc":
            path = os.path.join(config.shm_dir, f"{self.worker_id}.sock") if config.shm_dir else None
            self._shm = self.machine.share(cache, self.incarnation, path)
        self._transfer = KVTransferServicer(
            self.board,
            cache,
            self.layout,
            self.incarnation,
            self.clock,
            shared=self._shm is not None,
            reader=self.machine.thread("kv-read"),
        )
        self.fetcher = BlockFetcher(
            cache,
            self.layout,
            self.imports,
            self.clock,
            dial=self.machine.dial,
            error_of=from_call,
            copy_threads=self.machine.thread("kv-copy"),
            mappings=self.machine.mappings(cache.block_bytes),
        )

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self, phases: Iterable[Phase]) -> None:
        """Serves the phases, and joins every router until `stop`."""
        self._phases = list(phases)
        self.server.add(TRANSFER_SERVICE, kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, self._transfer)
        for phase in self._phases:
            self.server.add(phase.full_name, lambda servicer, server: servicer.register(server), phase)
        self.engine.start(self.hub.on_step)
        await self.server.set_ready(True)
        for target in self.config.router:
            joining = keep_registered(target, self.describe, self.machine.dial)
            self._registrations.append(asyncio.create_task(joining, name=f"register {target}"))
        transports = "shm, grpc" if self._shm is not None else "grpc"
        log.info(
            "%s serves %s on %s; transports offered: %s",
            self.worker_id,
            self.engine.info.model_id,
            self.server.address,
            transports,
        )

    async def drain(self, deadline_s: float) -> None:
        """Takes nothing new; waits until every leg is over, at most `deadline_s`. Routers see it in the snapshots."""
        self.draining = True
        await self.server.set_ready(False)
        self._flush_sessions()
        try:
            async with asyncio.timeout(deadline_s):
                while self.num_legs:
                    self._leg_over.clear()
                    await self._leg_over.wait()
        except TimeoutError:
            log.warning("drain deadline: %d legs are given up", self.num_legs)

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
        await self.server.stop(grace_s=1.0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.fetcher.close()
        self._transfer.close()
        self.board.close()
        if self._shm is not None:
            self._shm.close()
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
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)
        return task

    def leg_over(self, session: RouterSession, leg: int) -> None:
        """Nothing of the leg is left."""
        session.legs.pop(leg, None)
        self._leg_over.set()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(max(0.0, delay_s), callback)

    def source(self) -> types_pb2.KVSource:
        """Where this worker's leases are fetched."""
        return types_pb2.KVSource(
            address=self.address,
            incarnation=self.incarnation,
            shm_socket=self._shm.name if self._shm is not None else "",
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
            parent=command.traceparent,
            attributes=attributes,
            events=list(events),
        )

    # -- what shows ----------------------------------------------------------------------------------------------------

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
        info = self.engine.info
        return control_pb2.WorkerDescription(
            worker_id=self.worker_id,
            role=self.role,
            address=self.address,
            incarnation=self.incarnation,
            pid=os.getpid(),
            layout=layout_to_proto(self.layout),
            num_blocks=info.num_blocks,
            max_model_len=info.max_model_len,
            max_num_seqs=self.config.max_num_seqs,
            shm_socket=self._shm.name if self._shm is not None else "",
            host_id=host_id(),
            vocab_size=info.vocab_size,
            device=str(info.device),
        )

    def load_snapshot(self) -> types_pb2.LoadSnapshot:
        stats = self.engine.stats()
        self._num_snapshots += 1
        return types_pb2.LoadSnapshot(
            sequence_number=self._num_snapshots,
            blocks_importing=stats.ledger.importing,
            blocks_leased=stats.ledger.leased,
            blocks_active=stats.ledger.active,
            blocks_cached=stats.ledger.cached,
            blocks_free=stats.ledger.free,
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            queued_prefill_tokens=stats.queued_prefill_tokens,
            num_importing=len(self.imports),
            num_leases=len(self.leases),
            num_preemptions=stats.num_preemptions,
            ms_per_prefill_token=stats.ms_per_prefill_token,
            ms_per_decode_step=stats.ms_per_decode_step,
            current_step_ms=stats.current_step_ms,
            prefix_tokens_queried=stats.prefix_tokens_queried,
            prefix_tokens_hit=stats.prefix_tokens_hit,
            draining=self.draining,
            consecutive_step_failures=stats.consecutive_step_failures,
        )

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

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("%s failed", task.get_name(), exc_info=error)


def role_name(role: types_pb2.WorkerRole) -> str:
    return types_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()
