"""Puts a worker together: engine, block pool, leases, transfers, registration.

Owns: the order of start, drain and stop; the handoff's tables; what a router's messages mean; and what phases need of
all that; whether the worker is to leave, and until when. Never: what a phase does with a command, what makes the worker
leave (a signal in `main`, a router in its session), or when its process is to end (`main`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping
from typing import Any

from baton.v1 import control_pb2, types_pb2, worker_pb2, worker_pb2_grpc
from services.core.config import DAY_S, DEFAULT_CONTROL_PORT
from services.core.errors import BatonError, Draining, ProtocolViolation, RoleGone, UnsupportedModel, unforeseen
from services.core.ids import new_incarnation
from services.engine.schedule.sequence import Mode, Sequence
from services.engine.worker_engine import WorkerEngine
from services.kv.imports import Import, ImportTable
from services.kv.index_log import IndexChanges
from services.kv.lease import Lease
from services.kv.lease_table import LeaseTable
from services.kv.pool import Holder
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.endpoint import TRANSFER_SERVICE
from services.kvtransfer.wire import layout_to_proto
from services.rpc.logging import ids
from services.rpc.serving import GrpcServer
from services.rpc.status import to_status
from services.rpc.telemetry import UNTRACED, Attributes, Tracer
from services.worker import commands, report
from services.worker.config import ModelConfig, PeerConfig
from services.worker.constraints import Constraints
from services.worker.machine import Machine
from services.worker.phase import WorkerPhase, phase_name, role_name
from services.worker.prefixes import PrefixLoader
from services.worker.registration import Registrations
from services.worker.session import WORKER_SERVICE, EventHub, RouterSession, SessionHost, WorkerServicer
from services.worker.tally import Tally
from services.worker.tasks import OwnedTasks
from services.worker.tier_config import LowerTierConfig
from services.worker.tiers import WorkerTiers
from services.worker.transfer import Site, endpoint_of, withheld


class Departure:
    """Lets a worker leave: it takes nothing new, finishes the legs it has, and stops at its deadline at the latest.

    It may be asked for any number of times: the earliest deadline counts.

    Make it on the event loop.
    """

    def __init__(self) -> None:
        self._asked = asyncio.Event()
        self._changed = asyncio.Event()
        self._deadline_s = math.inf

    @property
    def asked(self) -> bool:
        return self._asked.is_set()

    def ask(self, within_s: float) -> None:
        self._deadline_s = min(self._deadline_s, asyncio.get_running_loop().time() + min(max(0.0, within_s), DAY_S))
        self._asked.set()
        self._changed.set()

    def leg_over(self) -> None:
        """Notes that a leg ended: there may be nothing left to finish."""
        self._changed.set()

    async def complete(self, num_legs: Callable[[], int]) -> int:
        """Waits until the departure is asked for, and then until no leg is left or the deadline.

        Returns the number of legs left.
        """
        await self._asked.wait()
        while left := num_legs():
            if asyncio.get_running_loop().time() >= self._deadline_s:
                return left
            self._changed.clear()
            try:
                async with asyncio.timeout_at(self._deadline_s):
                    await self._changed.wait()
            except TimeoutError:
                continue  # the deadline has passed, unless the last leg ended in that moment
        return 0


log = logging.getLogger(__name__)

MAX_STEP_FAILURES = 3
"""Number of failed steps in a row after which the worker reports that it does not serve."""
MOST_PARKING = 64
"""The most handoffs that a store takes in at once. How many it keeps, only its memory bounds."""
_INLINE_HASHED_TOKENS = 1024
"""Hashing this many tokens on the event loop takes no longer than handing them to a thread and back."""
_STOP_GRACE_S = 3.0
"""Seconds for answers still under way at the stop, such as that to a Release.

The stop does not wait for anything else.
"""


class WorkerHost:
    """Has the parts of a worker: an engine with its pool, and the phases, sessions and transfers around it.

    Make it on the event loop with a loaded engine; `start` serves and registers, `leave` and `stop` end it.
    """

    def __init__(
        self,
        config: PeerConfig,
        phases: Mapping[types_pb2.WorkerRole, Callable[[WorkerHost], WorkerPhase]],
        engine: WorkerEngine,
        server: GrpcServer,
        tracer: Tracer,
        machine: Machine,
        incarnation: int | None = None,
    ) -> None:
        """`phases` makes the worker's phases; their keys are its roles. With a config that has no model, as a store's,
        the worker computes nothing."""
        self.config = config
        self._model = config if isinstance(config, ModelConfig) else None
        self.engine = engine
        self.server = server
        self.machine = machine
        self.clock = self.machine.clock
        self.awake = self.machine.awake
        self._step_age = report.StepAge()
        self.incarnation = incarnation or new_incarnation()
        self.failing = False
        """Whether the last steps failed in a row, at least MAX_STEP_FAILURES of them.

        Commands are still taken: one good step clears it, and it may be that only a probe runs one.
        """
        self.tally = Tally()
        self.worker_id = config.worker_id or f"{role_name(phases)}-{server.port}"
        self.hub = EventHub(asyncio.get_running_loop(), self._stepped, engine.abort, self.defect)
        self.leases = LeaseTable(
            engine.info.block_size,
            on_end=self._lease_ended,
            ttl_s=config.lease_ttl_s,
            stall_s=config.stall_s,
        )
        self.imports = ImportTable(on_freed=self._import_freed)
        self.board = LeaseBoard(self.leases, self.awake)
        self.verdicts = self.machine.verdicts(config, self.worker_id)
        self.sessions = SessionHost(
            self.incarnation,
            self.awake,
            accept=self._accept,
            load=self.load_snapshot,
            describe=self.describe,
            index_changes=self._index_changes,
            verdicts=self.verdicts,
            heartbeat_s=config.heartbeat_s,
            silence_s=config.silence_s,
        )
        self._tracer = tracer
        self._tasks = OwnedTasks()
        self._hashing = machine.thread("hash")
        self._constraints = self._new_constraints()
        self._routers = Registrations(self.worker_id, self._registration, machine.dial_router, self._routers_changed)
        self._registrations: list[asyncio.Task[None]] = []
        self._departure = Departure()
        self._num_snapshots = 0
        self._num_constraining = 0
        """Legs whose constraints are being compiled."""
        reader = machine.thread("kv-read")
        site = Site(config, engine.cache, machine, self.board, reader, self.worker_id, self.incarnation)
        self.withheld = withheld(site)
        self.transfer = endpoint_of(
            site,
            engine.info,
            self.imports,
            lend=engine.lend,
            give_back=lambda block_ids: engine.release(block_ids, Holder.LEASE),
        )
        self.layout = self.transfer.layout
        self.fetcher = self.transfer.fetcher
        self.borrower = self.transfer.borrower
        self.tiers = self._new_tiers()
        self.prefixes = PrefixLoader(self)
        if types_pb2.WORKER_ROLE_STORE in phases:
            self.transfer.keep_for_others(self.prefixes.keep)
        if self.tiers is not None:
            self.transfer.recall_before_lending(self.prefixes.recall)
        self.phases = {role: make(self) for role, make in phases.items()}

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Serves routers and other workers, and joins every router until `leave` or `stop`."""
        self.spawn(self.awake.tick_forever(), "awake clock")
        if self._constraints is not None:
            self._constraints.load()
        self.transfer.register(self.server)
        servicer = WorkerServicer(self.sessions, self._model.model if self._model is not None else None)
        self.server.add(WORKER_SERVICE, worker_pb2_grpc.add_WorkerServiceServicer_to_server, servicer)
        self.engine.start(self.hub.on_step)
        await self._set_health()
        for target in self.config.router:
            joining = self._routers.join(target)
            self._registrations.append(asyncio.create_task(joining, name=f"register {target}"))
        log.info(
            "%s serves %s (fingerprint %s; %s; %s) on %s, reached at %s; KV transport: %s",
            self.worker_id,
            self.engine.info.model_id,
            self.layout.fingerprint[:8],
            self.layout.engine,
            self.engine.info.numerics,
            self.server.address,
            self.address,
            self.transfer.summary,
        )
        if not self.config.router:
            log.warning(
                "%s knows no router, so nothing will ever be placed on it: start it with --router HOST:PORT of a "
                "router's control port (on this machine 127.0.0.1:%d unless changed)",
                self.worker_id,
                DEFAULT_CONTROL_PORT,
            )

    def leave(self, within_s: float, why: str) -> None:
        """Takes no new legs from now on, and gives those it has `within_s` seconds. Routers see it in the snapshots.

        It does not end the process: whoever awaits `left` does.
        """
        if not self.draining:
            log.info("%s is to leave (%s): %d legs, %g s", self.worker_id, why, self.num_legs, within_s)
        self._departure.ask(within_s)
        self.transfer.leave()
        for task in self._registrations:
            task.cancel()
        self.spawn(self.server.set_ready(False), "health")
        self._flush_sessions()

    async def left(self) -> None:
        """Waits until the worker was asked to leave, and then until every leg has ended or the time is up."""
        if num_legs := await self._departure.complete(lambda: self.num_legs):
            log.warning("drain deadline: %d legs are given up", num_legs)

    def fail(self, error: BatonError) -> None:
        """Ends all sessions with the error, which routers count as a crash.

        Call it when this worker can compute no more.
        """
        log.critical("%s: %s", self.worker_id, error)
        self.sessions.end_all(error)

    async def stop(self) -> None:
        """Ends every session and frees what they held. Leaves no task, thread, socket or descriptor."""
        for task in self._registrations:
            task.cancel()
        await asyncio.gather(*self._registrations, return_exceptions=True)
        self.sessions.end_all()
        await self.server.stop(_STOP_GRACE_S)
        await self._tasks.close()
        if self._constraints is not None:
            await self._constraints.close()
        self._hashing.shutdown()
        await self.transfer.close()
        self.board.close()
        if self.tiers is not None:
            await self.tiers.close()
        await asyncio.to_thread(self.engine.stop)
        await self._tasks.close()  # the report of its last step may have started another
        self.engine.close()

    # -- what phases use -----------------------------------------------------------------------------------------------

    def new_sequences(self, command: commands.Command, mode: Mode) -> list[Sequence]:
        """Returns a sequence for each answer that the command asks for."""
        info = self.engine.info
        first = commands.sequence_of(
            command,
            seq_id=self.hub.new_seq_id(),
            mode=mode,
            now=self.clock.now(),
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            eos_token_ids=frozenset(info.eos_token_ids),
        )
        num_answers = commands.num_answers_of(command)
        return [first, *commands.further_of(first, num_answers, self.hub.new_seq_id)]

    def has_to_prepare(self, command: commands.Command) -> bool:
        """Returns whether `prepare` has anything to do before the command's sequence is given to the engine."""
        return command.HasField("constraint") or self.prefixes.has_use_for(command)

    async def prepare(
        self, session: RouterSession, sequences: list[Sequence], command: commands.Command
    ) -> BatonError | None:
        """Compiles the constraint of a command that computes its prompt here, and brings the prompt's prefix meanwhile.
        The session is told what came of that. Returns why the sequences cannot have the constraint, else None."""
        async with asyncio.TaskGroup() as both:
            bringing = both.create_task(self.prefixes.bring(sequences[0], command), name=f"bring leg {command.leg}")
            error = await self.constrain(sequences, command) if command.HasField("constraint") else None
            if error is not None:
                bringing.cancel()
        if error is None and (brought := bringing.result()) is not None:
            session.emit(worker_pb2.LegEvent(prefix_brought=brought))
        return error

    async def constrain(self, sequences: Iterable[Sequence], command: commands.Command) -> BatonError | None:
        """Gives each sequence its command's constraint, once that is compiled; returns why it cannot, else None."""
        if self._constraints is None:
            return UnsupportedModel(f"--engine {self.engine.info.engine} has no masks, which constrained output needs")
        self._num_constraining += 1
        try:
            for sequence in sequences:
                sequence.constraint = await self._constraints.make(
                    command.constraint, commands.output_of(command), command.cache_salt
                )
        except BatonError as error:
            return error
        except Exception as error:
            self.defect(error)
            return unforeseen(error)
        finally:
            self._num_constraining -= 1
        return None

    async def hash_prompt(self, sequence: Sequence) -> None:
        """Hashes the sequence's blocks: a long prompt's on another thread, since the event loop would stand still."""
        if len(sequence.token_ids) <= _INLINE_HASHED_TOKENS:
            self.engine.hash_prompt(sequence)
        else:
            await asyncio.wrap_future(self._hashing.submit(self.engine.hash_prompt, sequence))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Starts a task that is awaited at `stop` at the latest. If it fails, the failure is logged."""
        return self._tasks.spawn(work, name)

    def defect(self, error: Exception) -> None:
        """Counts and logs an unforeseen exception; its caller ends the one leg that it happened to."""
        self.tally.internal_errors += 1
        log.error("internal error (leg)", exc_info=error)

    def leg_over(self, session: RouterSession, leg: int) -> None:
        """Removes a leg from its session once nothing of it is left."""
        session.legs.pop(leg, None)
        self._departure.leg_over()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(min(max(0.0, delay_s), DAY_S), callback)

    def source(self) -> types_pb2.KVSource:
        """Returns where destinations fetch this worker's leases."""
        return types_pb2.KVSource(
            address=self.address,
            incarnation=self.incarnation,
            offers=self.transfer.offers,
            layout=layout_to_proto(self.layout),
        )

    def span(
        self,
        command: commands.AnyCommand,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes,
        events: Iterable[tuple[str, float, Attributes]] = (),
    ) -> None:
        """Records a span of the command's request, below the router's span for this leg."""
        self._tracer.span(
            name,
            request_id=command.request_id,
            start_s=start_s,
            end_s=end_s,
            parent=command.traceparent or UNTRACED,  # without tracing at the router there is no trace for it
            attributes=attributes,
            events=list(events),
        )

    # -- what shows ----------------------------------------------------------------------------------------------------

    @property
    def draining(self) -> bool:
        """Returns whether the worker was asked to leave and takes nothing new."""
        return self._departure.asked

    @property
    def roles(self) -> frozenset[types_pb2.WorkerRole]:
        """Returns the phases that the worker takes commands for. Routers learn of a change in their sessions."""
        return frozenset(self.phases)

    @property
    def address(self) -> str:
        """Returns the host:port that others dial."""
        return self.config.advertise or self.server.address

    @property
    def num_legs(self) -> int:
        return sum(len(session.legs) for session in self.sessions)

    @property
    def num_sessions(self) -> int:
        return len(self.sessions)

    def describe(self) -> control_pb2.WorkerDescription:
        return report.describe(
            self.engine.info,
            self.layout,
            worker_id=self.worker_id,
            roles=self.roles,
            address=self.address,
            incarnation=self.incarnation,
            max_num_seqs=self._model.max_num_seqs if self._model is not None else MOST_PARKING,
            capacity=self._model.capacity if self._model is not None else 1.0,
            num_tier_blocks=self.tiers.num_slots if self.tiers is not None else 0,
            withheld=self.withheld,
        )

    def _registration(self) -> control_pb2.RegisterRequest:
        return control_pb2.RegisterRequest(worker=self.describe())

    def load_snapshot(self) -> types_pb2.LoadSnapshot:
        self._num_snapshots += 1
        stats = self.engine.stats()
        return report.snapshot(
            stats,
            current_step_ms=self._step_age.ms(stats.num_steps, stats.current_step_ms, self.awake.missed_s()),
            number=self._num_snapshots,
            num_preparing=self._num_constraining + self.prefixes.num_bringing,
            preparing_tokens=self.prefixes.waiting_tokens,
            num_importing=len(self.imports),
            num_leases=len(self.leases),
            draining=self.draining,
        )

    # -- what routers say ----------------------------------------------------------------------------------------------

    def _accept(self, session: RouterSession, request: worker_pb2.SessionRequest) -> None:
        match request.WhichOneof("message"):
            case "prefill":
                self._begin(types_pb2.WORKER_ROLE_PREFILL, session, request.prefill)
            case "decode":
                self._begin(types_pb2.WORKER_ROLE_DECODE, session, request.decode)
            case "park":
                self._begin(types_pb2.WORKER_ROLE_STORE, session, request.park)
            case "cancel":
                cancel = request.cancel
                session.cancel(cancel.leg, cancel.index if cancel.HasField("index") else None)
            case "heartbeat":
                self.leases.hold(session, request.heartbeat.held_leases, self.awake.now())
                self.verdicts.merge({each.incarnation: each.number for each in request.heartbeat.verdicts})
            case "leave":
                self.leave(request.leave.remaining_ms / 1000, "a router asks for it")

    def _begin(self, role: types_pb2.WorkerRole, session: RouterSession, command: commands.AnyCommand) -> None:
        session.newest_leg = max(session.newest_leg, command.leg)
        if command.leg in session.legs:
            raise ProtocolViolation(f"leg {command.leg} is in use")
        try:
            if self.draining:
                raise Draining("this worker is draining")
            if role not in self.phases:
                raise RoleGone(f"this worker takes no {phase_name(role)} commands")
            self.phases[role].begin(session, command)
        except Exception as error:  # whatever went wrong, the router must learn of it, and no other leg is affected
            if not isinstance(error, BatonError):
                self.defect(error)
            session.cancel(command.leg)
            about = ids(command.request_id, command.traceparent)
            log.warning("leg %d refused: %s", command.leg, error, extra=about)
            failed = worker_pb2.LegFailed(leg=command.leg, status=to_status(error))
            session.emit(worker_pb2.LegEvent(failed=failed))
            session.flush()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _new_constraints(self) -> Constraints | None:
        if self._model is None or not self.engine.info.has_masks:
            return None
        machine, compiler = self.machine, self.machine.compiler(self._model.model, self.engine.info)
        return Constraints(compiler, machine.thread("constraints"), machine.thread("matchers"))

    def _new_tiers(self) -> WorkerTiers | None:
        if not isinstance(self.config, LowerTierConfig):
            return None
        tiers = self.machine.tiers(self.config, self.layout, self.worker_id)
        return WorkerTiers(tiers, self.engine, self.machine, self.call_later, self.defect) if tiers else None

    def _index_changes(self, after: int | None) -> IndexChanges | None:
        """Returns how has changed what can be had without computing it: what the pool has, and the tiers."""
        return (self.engine if self.tiers is None else self.tiers).index_changes(after)

    def _lease_ended(self, lease: Lease) -> None:
        self.tally.leases_ended[lease.state.value] += 1
        try:
            if lease.listener is not None:
                lease.listener.lease_ended(lease)
        except Exception as error:  # other leases may be ending in the same moment
            self.defect(error)

    def _import_freed(self, import_: Import) -> None:
        self.tally.imports_failed += 1
        self.engine.release(import_.block_ids, Holder.IMPORT)

    def _stepped(self) -> None:
        failing = self.engine.consecutive_step_failures >= MAX_STEP_FAILURES
        if failing != self.failing:
            self.failing = failing
            log.log(logging.WARNING, "%s: steps %s", self.worker_id, "keep failing" if failing else "succeed again")
            self.spawn(self._set_health(), "health")
        if self.tiers is not None:
            self.tiers.demoter.stepped()
        self._flush_sessions()

    def _routers_changed(self) -> None:
        if not self.draining:
            self.spawn(self._set_health(), "health")

    async def _set_health(self) -> None:
        """Sets the health of the services.

        A worker that no router has registered serves nothing. Failing steps concern commands only: leases can still be
        fetched.
        """
        serving = not self.draining and (self._routers.num_joined > 0 or not self.config.router)
        await self.server.set_ready(serving, TRANSFER_SERVICE)
        await self.server.set_ready(serving and not self.failing, WORKER_SERVICE)

    def _flush_sessions(self) -> None:
        for session in self.sessions:
            session.flush()
