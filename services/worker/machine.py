"""Gives a worker what it takes from the machine it runs on: time, connections, threads, shared memory.

The simulator has a machine of its own, and runs the same worker on it. Never: state of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from pathlib import Path

import grpc

from services.core.clock import AwakeClock, Clock, MonotonicClock
from services.core.daemon_threads import DaemonThreads
from services.core.run_delay import RunDelay
from services.engine.config import EngineInfo
from services.kv.layout import Layout
from services.kv.regions import BlockMemory
from services.kv.verdicts import Verdicts
from services.kvtransfer.tiers.tier import Tier
from services.kvtransfer.transports.nixl import NixlDestination, NixlSource
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.transports.shm_mapping import MappingCache
from services.kvtransfer.transports.staging import StagingArea
from services.kvtransfer.transports.tcp_destination import TcpDestination
from services.kvtransfer.transports.tcp_source import TcpSource
from services.rpc.authentication import ROUTER, WORKER
from services.rpc.certificates import Certificates
from services.rpc.channels import dial
from services.worker.constraints import ConstraintCompiler
from services.worker.kept_verdicts import KeptVerdicts
from services.worker.tier_config import LowerTierConfig
from services.worker.tier_setup import tiers_of


class Machine:
    def __init__(
        self, token: str | None, clock: Clock | None = None, *, certificates: Certificates | None = None
    ) -> None:
        """`token` is the cluster token, for every connection that this worker dials. With `certificates` all that goes
        to other hosts goes inside TLS."""
        self._token = token or ""
        self.certificates = certificates
        self.clock: Clock = clock or MonotonicClock()
        self.awake = AwakeClock(self.clock, RunDelay().since_last if clock is None else None)
        """The clock of awake time, by which peers are judged."""

    def dial(self, address: str) -> grpc.aio.Channel:
        """Returns a channel to another worker or a store."""
        return dial(address, self._token or None, self.certificates, role=WORKER)

    def dial_router(self, address: str) -> grpc.aio.Channel:
        """Returns a channel to a router's control port."""
        return dial(address, self._token or None, self.certificates, role=ROUTER)

    def thread(self, name: str) -> Executor:
        """Returns an executor with one thread, for work that would hold up the event loop. The caller shuts it down.
        Work that never returns does not keep the process from ending."""
        return DaemonThreads(1, name)

    def threads(self, name: str) -> Executor:
        """Returns an executor with a thread for each piece of work that is under way; otherwise as `thread`."""
        return DaemonThreads(None, name)

    def compiler(self, model: str, info: EngineInfo) -> ConstraintCompiler:
        """Returns what compiles constraints over the vocabulary of the model in the folder `model`."""
        from services.worker.grammar_process import GrammarCompiler  # llguidance: only where something is computed

        return GrammarCompiler(Path(model), info.vocab_size, info.eos_token_ids)

    def share(self, memory: BlockMemory, incarnation: int, path: str | None) -> ShmServer:
        return ShmServer(memory, incarnation, path)

    def serve_blocks(
        self, memory: BlockMemory, reader: Executor, incarnation: int, *, host: str, port: int, advertised_host: str
    ) -> TcpSource:
        return TcpSource(
            memory,
            reader,
            incarnation,
            self._token,
            host=host,
            port=port,
            advertised_host=advertised_host,
            tls=self.certificates,
        )

    def read_blocks(self) -> TcpDestination:
        return TcpDestination(self._token, clock=self.awake, tls=self.certificates)

    def register_blocks(
        self, memory: BlockMemory, reader: Executor, incarnation: int, *, ucx: Mapping[str, str]
    ) -> NixlSource:
        return NixlSource(memory, reader, incarnation, ucx=ucx)

    def read_registered(self, memory: BlockMemory, *, ucx: Mapping[str, str]) -> NixlDestination:
        return NixlDestination(memory, ucx=ucx, clock=self.awake)

    def staging_area(self, num_slots: int, block_bytes: int, device: str) -> StagingArea:
        """Returns host memory for copies of blocks of a pool on `device`. The caller closes it."""
        area = StagingArea(num_slots, block_bytes)
        if device.startswith("cuda"):
            from services.engine.cpu.pinning import pin  # torch: only where there is a GPU

            area.before_close = pin(area.whole)
        return area

    def tiers(self, config: LowerTierConfig, layout: Layout, worker_id: str) -> list[Tier]:
        """Returns what the worker has below its pool, the fastest first. Raises ConfigError."""
        return tiers_of(config, layout, worker_id)

    def verdicts(self, config: object, worker_id: str) -> Verdicts:
        """Returns the verdicts on workers that this one is to pass on."""
        if isinstance(config, LowerTierConfig) and config.kv_disk:
            return KeptVerdicts(Path(config.kv_disk) / f"{worker_id}.verdicts")
        return Verdicts()

    def mappings(self, block_bytes: int) -> MappingCache:
        return MappingCache(block_bytes, clock=self.awake)
