"""Holds both ends of a worker's transfers: what serves its own leases, and what fetches those of other workers.

Owns: which transports there are, the pool's layout, the transfer service and the fetcher, and their order of closing.
Never: how a transport works (`services.kvtransfer.transports`), a rule about leases or imports (`services.kv`), or
whose blocks they are (WorkerHost).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from baton.v1 import kvtransfer_pb2_grpc, types_pb2
from services.core.errors import ConfigError
from services.engine.worker_engine import WorkerEngine
from services.kv.imports import ImportTable
from services.kv.layout import Layout
from services.kv.regions import check_regions
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import BlockFetcher
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import DestinationEnd, SourceEnd, TransportUnavailable
from services.kvtransfer.transports.grpc import GrpcDestination, GrpcSource
from services.kvtransfer.transports.shm_source import ShmSource
from services.kvtransfer.transports.staging import Staging, num_slots_for
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call
from services.worker.config import WorkerConfig
from services.worker.machine import Machine

log = logging.getLogger(__name__)

TRANSFER_SERVICE = "baton.v1.KVTransferService"


@dataclass(frozen=True, slots=True)
class Site:
    """Has what the ends of a worker's transports may need of it."""

    config: WorkerConfig
    engine: WorkerEngine
    machine: Machine
    board: LeaseBoard
    reader: Executor
    """The thread on which the pool is read."""
    worker_id: str
    incarnation: int


def _shm_source(site: Site) -> ShmSource:
    cache, config, machine = site.engine.cache, site.config, site.machine
    area = None
    if cache.fd is None:
        num_slots = num_slots_for(cache, config.staging_mb << 20)
        area = machine.staging_area(num_slots, cache.block_bytes, cache.region(0).device)
    if (area or cache).fd is None:
        # Peers would have to trust this process not to truncate what they have mapped.
        if area is not None:
            area.close()
        raise TransportUnavailable("needs memory that can be sealed, and this kernel cannot seal it (Linux 5.1)")
    staging = Staging(cache, area, site.board, machine.awake) if area is not None else None
    path = os.path.join(config.shm_dir, f"{site.worker_id}.sock") if config.shm_dir else None
    return ShmSource(cache, machine.share(area or cache, site.incarnation, path), site.reader, staging=staging)


TRANSPORTS: dict[str, tuple[Callable[[Site], SourceEnd], Callable[[Site], DestinationEnd]]] = {
    "shm": (_shm_source, lambda site: site.machine.mappings(site.engine.cache.block_bytes)),
    "grpc": (
        lambda site: GrpcSource(site.engine.cache, site.reader),
        lambda site: GrpcDestination(site.engine.cache.block_bytes),
    ),
}
"""The makers of the source's end and the destination's, by the transports' names in `--transport`, the best first."""
_OFFERED_ALWAYS = "grpc"
"""This transport needs nothing but the connection, so a worker offers it even if it pulls by another."""


class Transfer:
    def __init__(
        self,
        config: WorkerConfig,
        engine: WorkerEngine,
        machine: Machine,
        board: LeaseBoard,
        imports: ImportTable,
        *,
        worker_id: str,
        incarnation: int,
    ) -> None:
        self.layout = _layout(engine)
        check_regions(engine.cache, self.layout.block_bytes)
        self._reader = machine.thread("kv-read")
        site = Site(config, engine, machine, board, self._reader, worker_id, incarnation)
        self.sources = list(_offered(site))
        pulls_by = [name for name in TRANSPORTS if config.transport in ("auto", name)]
        self._pulls_by = ", else ".join(pulls_by) if len(pulls_by) > 1 else f"{pulls_by[0]} only"
        self._servicer = KVTransferServicer(
            board,
            self.layout,
            incarnation,
            machine.awake,
            transports=self.sources,
            awake=machine.awake,
        )
        self.fetcher = BlockFetcher(
            engine.cache,
            self.layout,
            imports,
            machine.clock,
            transports=[TRANSPORTS[name][1](site) for name in pulls_by],
            awake=machine.awake,
            dial=machine.dial,
            error_of=from_call,
            copy_threads=machine.thread("kv-copy"),
        )

    @property
    def offers(self) -> list[types_pb2.KVOffer]:
        """Returns the offers of this worker's transports."""
        return [end.offer() for end in self.sources]

    @property
    def summary(self) -> str:
        """Returns how this worker pulls and offers KV, in words for the log."""
        return f"pulls by {self._pulls_by}, offers {' and '.join(end.description for end in self.sources)}"

    def register(self, server: GrpcServer) -> None:
        server.add(TRANSFER_SERVICE, kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, self._servicer)

    def leave(self) -> None:
        """Notes that this worker leaves: fetches of leases that are aborted from now on get Draining as the reason."""
        self._servicer.leave()

    async def close(self) -> None:
        """Closes both ends. Call it after the server has stopped; afterwards nothing reads or writes the pool."""
        await self.fetcher.close()
        self._reader.shutdown()
        for end in self.sources:
            end.close()


def _offered(site: Site) -> Iterator[SourceEnd]:
    wanted = site.config.transport
    for name, (source_end, _) in TRANSPORTS.items():
        if wanted not in ("auto", name) and name != _OFFERED_ALWAYS:
            continue
        try:
            yield source_end(site)
        except TransportUnavailable as error:
            if wanted == name:
                raise ConfigError(f"--transport: {name} {error}") from error
            log.warning("%s is not offered to other workers: it %s", name, error)


def _layout(engine: WorkerEngine) -> Layout:
    info = engine.info
    return Layout(
        model_id=info.model_id,
        weights_digest=info.weights_digest,
        config_digest=info.config_digest,
        dtype=info.dtype,
        num_layers=info.num_layers,
        num_kv_heads=info.num_kv_heads,
        head_dim=info.head_dim,
        block_size=info.block_size,
    )
