"""Simulates a worker process: the real `WorkerHost` with its phases, on a machine made of simulated parts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from baton.v1 import types_pb2
from services.core.hashing import BlockHash
from services.decode.leg import DecodePhase
from services.engine.config import EngineConfig, EngineInfo
from services.kv.layout import Layout
from services.kv.lease import Lease
from services.kv.regions import BlockMemory
from services.kv.verdicts import Verdicts
from services.kvtransfer.client import FetchOrder, FetchOutcome
from services.kvtransfer.tiers.disk import DiskTier
from services.kvtransfer.tiers.host import HostTier
from services.kvtransfer.tiers.tier import LocalTier, Tier
from services.kvtransfer.transports.nixl import NixlDestination, NixlSource
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.transports.shm_mapping import MappingCache
from services.kvtransfer.transports.staging import StagingArea
from services.kvtransfer.transports.tcp_destination import TcpDestination
from services.kvtransfer.transports.tcp_source import TcpSource
from services.prefill.leg import PrefillPhase
from services.store.engine import StoreEngine
from services.store.leg import StorePhase
from services.worker.config import WorkerConfig
from services.worker.constraints import ConstraintCompiler
from services.worker.host import WorkerHost
from services.worker.machine import Machine
from services.worker.phase import WorkerPhase
from services.worker.session import RouterSession
from services.worker.tier_config import LowerTierConfig
from tests.sim.disk import SimDisk, SimSlotFile
from tests.sim.engine import SimEngine, info_of
from tests.sim.memory import SimMemory, SimStagingArea, staging_of
from tests.sim.node import Node, Thread
from tests.sim.one_sided import SimNixlDestination, SimNixlSource
from tests.sim.rpc_client import SimChannel
from tests.sim.rpc_server import SimServer
from tests.sim.shared_memory import SimMappingCache, SimShmServer
from tests.sim.sockets import SimTcpDestination, SimTcpSource
from tests.sim.strand import AtOnce, StrandThread
from tests.sim.tracing import NullTracer
from tests.sim.turns import watch_intake
from tests.support.scripted_constraint import OneOf

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

PREFILL = {types_pb2.WORKER_ROLE_PREFILL: PrefillPhase}
DECODE = {types_pb2.WORKER_ROLE_DECODE: DecodePhase}
MIXED = {**PREFILL, **DECODE}
_WAITING = ("kv-demote", "kv-tier-read", "kv-tcp", "kv-nixl")
"""Threads that wait in the midst of what they do."""
STORE = {types_pb2.WORKER_ROLE_STORE: lambda host: StorePhase(host, host.engine)}


@dataclass(frozen=True)
class WorkerPlan:
    """Keeps what stays the same over restarts."""

    config: WorkerConfig
    phases: Mapping[types_pb2.WorkerRole, Callable[[WorkerHost], WorkerPhase]]
    """Its roles, and what it does in each."""
    step_s: float
    copy_s: float
    num_slots: int = 0
    """Its pool cannot be mapped, as on a GPU, and hands over through so many staging slots. 0: it can."""
    weights: str = "sim"
    """Workers with different ones never pair."""
    num_host_slots: int = 0
    num_disk_slots: int = 0
    """Blocks that its tiers can hold. 0: it has no such tier."""
    says_token_ms: float = 0.0
    """What a prompt token costs there, as it says from the start, true or not. 0: it finds out."""

    @property
    def name(self) -> str:
        return self.config.worker_id

    @property
    def can_decode(self) -> bool:
        return types_pb2.WORKER_ROLE_DECODE in self.phases

    @property
    def is_store(self) -> bool:
        return types_pb2.WORKER_ROLE_STORE in self.phases

    @property
    def has_tiers(self) -> bool:
        return bool(self.num_host_slots or self.num_disk_slots)

    @property
    def slowest_copy_s(self) -> float:
        return self.copy_s * 4.1


def constraint_text(lists: list[list[int]]) -> str:
    """Returns a grammar, in the language of `SimCompiler`, of outputs that are one of the lists of tokens."""
    return json.dumps(lists)


@dataclass(frozen=True)
class SimCompiled:
    matcher: OneOf
    num_bytes: int = 1000


class SimCompiler:
    """Compiles grammars that are lists of lists of tokens."""

    def load(self) -> None:
        """Nothing is to be loaded."""

    def compile(self, kind: str, text: str) -> SimCompiled:
        assert kind == "grammar"
        return SimCompiled(OneOf(json.loads(text)))

    def interrupt(self) -> None:
        """Compiling takes the thread's time, and no more."""

    def close(self) -> None:
        """Nothing is kept."""


class SimMachine(Machine):
    def __init__(self, node: Node, cluster: Cluster, plan: WorkerPlan) -> None:
        super().__init__("", node)
        self._node = node
        self._cluster = cluster
        self._copy_s = plan.copy_s
        self._num_slots = plan.num_slots
        self._plan = plan

    def _random(self) -> float:
        return self._node.world.random.random()

    def dial(self, address: str) -> Any:
        return SimChannel(self._node, self._cluster.network, address)

    dial_router = dial

    def thread(self, name: str) -> Executor:
        if name in _WAITING:
            return StrandThread(self._node)
        return Thread(self._node, lambda: self._copy_s * (0.1 + 4 * self._node.world.random.random() ** 4))

    threads = thread

    def compiler(self, model: str, info: EngineInfo) -> ConstraintCompiler:
        return SimCompiler()

    def share(self, memory: BlockMemory, incarnation: int, path: str | None) -> ShmServer:
        assert isinstance(memory, SimMemory | SimStagingArea)
        server: Any = SimShmServer(self._cluster.shared_memory, self._node, memory, incarnation)
        return server  # type: ignore[no-any-return]

    def serve_blocks(
        self, memory: BlockMemory, reader: Executor, incarnation: int, *, host: str, port: int, advertised_host: str
    ) -> TcpSource:
        assert isinstance(memory, SimMemory)
        return SimTcpSource(self._cluster.sockets, self._node, memory, reader, incarnation, advertised_host)

    def read_blocks(self) -> TcpDestination:
        return SimTcpDestination(
            self._cluster.sockets, self._node, self.thread("kv-tcp"), lambda: self._copy_s * self._random() ** 4
        )

    def register_blocks(
        self, memory: BlockMemory, reader: Executor, incarnation: int, *, ucx: Mapping[str, str]
    ) -> NixlSource:
        assert isinstance(memory, SimMemory)
        return SimNixlSource(self._cluster.fabric, self._node, memory, reader, incarnation)

    def read_registered(self, memory: BlockMemory, *, ucx: Mapping[str, str]) -> NixlDestination:
        assert isinstance(memory, SimMemory)
        thread = self.thread("kv-nixl")
        return SimNixlDestination(
            self._cluster.fabric, self._node, memory, thread, self.awake, lambda: self._copy_s * self._random() ** 4
        )

    def staging_area(self, num_slots: int, block_bytes: int, device: str) -> StagingArea:
        return SimStagingArea(min(num_slots, self._num_slots or num_slots), block_bytes)

    def tiers(self, config: LowerTierConfig, layout: Layout, worker_id: str) -> list[Tier]:
        plan, tiers = self._plan, list[Tier]()
        if plan.num_host_slots:
            tiers.append(HostTier(layout.block_bytes, plan.num_host_slots * layout.block_bytes))
        if plan.num_disk_slots:
            file = SimSlotFile(self._cluster.disk(plan.name, layout.block_bytes), self._node)
            num_bytes = plan.num_disk_slots * file.slot_bytes
            tiers.append(DiskTier(file, layout.fingerprint, layout.block_bytes, num_bytes, readers=AtOnce()))
        return tiers

    def verdicts(self, config: object, worker_id: str) -> Verdicts:
        if not self._plan.num_disk_slots:
            return Verdicts()
        return _VerdictsOnDisk(self._cluster.kept_verdicts.setdefault(worker_id, {}))

    def mappings(self, block_bytes: int) -> MappingCache:
        return SimMappingCache(self._cluster.shared_memory, block_bytes)


class _VerdictsOnDisk(Verdicts):
    """Stands for `KeptVerdicts`."""

    def __init__(self, kept: dict[int, int]) -> None:
        super().__init__()
        self._kept = kept
        super().merge(kept)

    def merge(self, num_of: Mapping[int, int]) -> list[int]:
        news = super().merge(num_of)
        self._kept.update(self.num_of)
        return news


class SimWorker:
    """Is one incarnation of a simulated worker, made with its node's loop entered."""

    def __init__(self, cluster: Cluster, plan: WorkerPlan) -> None:
        self.plan = plan
        self.sessions_seen: WeakSet[RouterSession] = WeakSet()
        """Those that `Watch` has seen, which may have ended: their legs end a turn later."""
        self.node = node = Node(cluster.world, plan.name, plan.config.advertise)
        node.inhabitant = self
        self._cluster = cluster
        self.rotten_host_slots: set[tuple[int, int]] = set()
        """Slots of its host tier that were harmed, each with the checksum of the block that was in it."""
        node.loop.enter(lambda: self._build(plan))

    def _build(self, plan: WorkerPlan) -> None:
        config, cluster, node = plan.config, self._cluster, self.node
        self.memory = SimMemory(
            node, config.kv_blocks, config.block_size, cluster.truth, plan.weights, mappable=not plan.num_slots
        )
        self.engine = self._new_engine(node, plan)
        self.memory.watch(self.engine._pool, tells=plan.has_tiers)
        server: Any = SimServer(node, cluster.network)
        self.host = WorkerHost(
            config, plan.phases, self.engine, server, NullTracer(), machine=SimMachine(node, cluster, plan)
        )
        self.host.fetcher.fetch = self._watched(self.host.fetcher.fetch)  # type: ignore[method-assign]
        cluster.watch(self.host, plan.name)
        leases: Any = self.host.leases
        leases._on_end = self._ending(leases._on_end)
        decode = self.host.phases.get(types_pb2.WORKER_ROLE_DECODE)
        if isinstance(decode, DecodePhase):
            assert isinstance(self.engine, SimEngine)
            watch_intake(node, decode._intake, self.engine._scheduler)
        node.loop.create_task(self._live(server), name="life")

    def _new_engine(self, node: Node, plan: WorkerPlan) -> SimEngine | StoreEngine:
        if not plan.is_store:
            return SimEngine(
                node,
                _engine_config(plan),
                self.memory,
                plan.step_s,
                plan.weights,
                self._cluster.truth,
                says_token_ms=plan.says_token_ms,
            )
        # It says the same of itself as those that compute, but for its length: nothing is computed there.
        info = dataclasses.replace(info_of(_engine_config(plan), plan.weights), max_model_len=1 << 20)
        return StoreEngine(info, self.memory)

    async def _live(self, server: SimServer) -> None:
        """Runs as the process's main does: until a signal or a router says that it is to leave."""
        await server.start()
        await self.host.start()
        self._cluster.world.note("up", self.plan.name, self.host.incarnation)
        await self.host.left()
        await self.host.stop()
        self._cluster.exited(self)

    @property
    def local_tiers(self) -> list[LocalTier]:
        return [] if self.host.tiers is None else self.host.tiers.stack.local

    @property
    def disk(self) -> SimDisk | None:
        return self._cluster.disks.get(self.plan.name)

    def may_hold(self, hash: BlockHash, block: bytes) -> bool:
        """Returns whether a block that it keeps under that name may hold this."""
        return self._cluster.truth.may_hold(self.plan.weights, hash, block)

    def left_over(self) -> list[str]:
        """Returns what a stopped worker should not have."""
        tasks = [task.get_name() for task in self.node.loop.tasks if not task.done()]
        return [name for name in tasks if name != "life"] + ([] if self.idle else ["references"])

    @property
    def idle(self) -> bool:
        """Nothing is held: no leg, lease, import, sequence, block reference or staging slot."""
        host, engine = self.host, self.engine
        has_work = isinstance(engine, SimEngine) and engine._scheduler.has_work
        staging = staging_of(host)
        if staging is not None and staging.slots.num_free < staging.slots.num_slots:
            return False
        return not (host.num_legs or len(host.leases) or len(host.imports) or len(host.hub) or has_work) and (
            self.engine._pool.ledger().idle
        )

    def _ending(self, on_end: Any) -> Any:
        def ending(lease: Lease) -> None:
            self._cluster.on_lease_end(self, lease)
            on_end(lease)

        return ending

    def _watched(self, fetch: Any) -> Any:
        async def watched(order: FetchOrder) -> FetchOutcome:
            outcome: FetchOutcome = await fetch(order)
            if outcome.ready and self.node.alive:
                released_by = self._cluster.released_by.get(order.lease_id)
                self._cluster.world.require(
                    released_by == order.leg,
                    f"{self.plan.name}: leg {order.leg} uses a lease that was released by {released_by}",
                )
            return outcome

        return watched


def _engine_config(plan: WorkerPlan) -> EngineConfig:
    config = plan.config
    return EngineConfig(
        model_path="sim",
        model_id="sim",
        block_size=config.block_size,
        num_blocks=config.kv_blocks,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        max_num_batched_tokens=config.max_num_batched_tokens,
        limit_leased_blocks=len(plan.phases) > 1,
    )
