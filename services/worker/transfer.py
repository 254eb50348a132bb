"""Both ends of a worker's transfers: what serves its own leases, and what fetches those of others.

Owns: the pool's layout, the shared-memory server, the staging of a pool that cannot be mapped, the transfer service and
the fetcher, and their order of closing. Never: a rule about leases or imports (`services.kvtransfer`), or whose blocks
they are (WorkerHost).
"""

from __future__ import annotations

import os

from baton.v1 import kvtransfer_pb2_grpc
from services.core.clock import Clock
from services.engine.engine import Engine
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import BlockFetcher
from services.kvtransfer.imports import ImportTable
from services.kvtransfer.layout import Layout
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.transports.staging import Staging, StagingArea, num_slots_for
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call
from services.worker.config import WorkerConfig
from services.worker.machine import Machine

TRANSFER_SERVICE = "baton.v1.KVTransferService"
_PULLS_BY = {"auto": "shm, else grpc", "shm": "shm only", "grpc": "grpc only"}


class Transfer:
    def __init__(
        self,
        config: WorkerConfig,
        engine: Engine,
        machine: Machine,
        board: LeaseBoard,
        imports: ImportTable,
        *,
        worker_id: str,
        incarnation: int,
    ) -> None:
        cache, clock = engine.cache, machine.clock
        self.layout = _layout(engine)
        self._pulls_by = _PULLS_BY[config.transport]
        self.staging: Staging | None = None
        """Of a pool that cannot be mapped."""
        self._area: StagingArea | None = None
        self._shm: ShmServer | None = None
        if config.transport != "grpc":
            if cache.fd is None:
                num_slots = num_slots_for(cache, config.staging_mb << 20)
                self._area = machine.staging_area(num_slots, cache.block_bytes, engine.info.device)
                self.staging = Staging(cache, self._area, board, clock)
            path = os.path.join(config.shm_dir, f"{worker_id}.sock") if config.shm_dir else None
            self._shm = machine.share(self._area or cache, incarnation, path)
        self._servicer = KVTransferServicer(
            board,
            cache,
            self.layout,
            incarnation,
            clock,
            shared=self._shm is not None,
            staging=self.staging,
            reader=machine.thread("kv-read"),
        )
        self.fetcher = _fetcher(engine, machine, self.layout, imports, clock)

    @property
    def socket_name(self) -> str:
        """Unix socket of the pool's memfd, or of its staging's; empty without shared memory."""
        return self._shm.name if self._shm is not None else ""

    @property
    def summary(self) -> str:
        """For people."""
        staged = f", staged: {_mebibytes(self._area)}" if self._area is not None else ""
        offers = f"shm ({self._shm.name}{staged}) and grpc" if self._shm is not None else "grpc"
        return f"pulls by {self._pulls_by}, offers {offers}"

    def register(self, server: GrpcServer) -> None:
        server.add(TRANSFER_SERVICE, kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, self._servicer)

    def leave(self) -> None:
        """Who still fetches here is told why it ends."""
        self._servicer.leave()

    async def close(self) -> None:
        """When the server has stopped. Afterwards nobody reads or writes the pool."""
        await self.fetcher.close()
        self._servicer.close()
        if self._shm is not None:
            self._shm.close()
        if self._area is not None:
            self._area.close()


def _mebibytes(area: StagingArea) -> str:
    return f"{-(-area.num_blocks * area.block_bytes >> 20)} MiB"


def _layout(engine: Engine) -> Layout:
    info = engine.info
    return Layout(
        model_id=info.model_id,
        weights_digest=info.weights_digest,
        dtype=info.dtype,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=info.block_size,
    )


def _fetcher(engine: Engine, machine: Machine, layout: Layout, imports: ImportTable, clock: Clock) -> BlockFetcher:
    return BlockFetcher(
        engine.cache,
        layout,
        imports,
        clock,
        dial=machine.dial,
        error_of=from_call,
        copy_threads=machine.thread("kv-copy"),
        mappings=machine.mappings(engine.cache.block_bytes),
    )
