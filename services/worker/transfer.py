"""Holds both ends of a worker's transfers: what serves its own leases, and what fetches those of other workers.

Owns: which transports there are, the pool's layout, the transfer service and the fetcher, and their order of closing.
Never: how a transport works (`services.kvtransfer.transports`), a rule about leases or imports (`services.kv`), or
whose blocks they are (WorkerHost).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from baton.v1 import kvtransfer_pb2_grpc, types_pb2
from services.core.addresses import is_loopback, parse
from services.core.errors import ConfigError
from services.core.hashing import BlockHash
from services.engine.worker_engine import WorkerEngine
from services.kv.imports import ImportTable
from services.kv.layout import Layout
from services.kv.pool import Holder
from services.kv.regions import check_regions
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.borrowing import Borrower
from services.kvtransfer.client import BlockFetcher
from services.kvtransfer.lending import Lender
from services.kvtransfer.peers import Peers
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import DestinationEnd, SourceEnd, TransportUnavailable
from services.kvtransfer.transports.grpc import GrpcDestination, GrpcSource
from services.kvtransfer.transports.nixl import NixlDestination, NixlSource
from services.kvtransfer.transports.nixl_agent import has_rdma_device, is_installed, ucx_settings
from services.kvtransfer.transports.shm_source import ShmSource
from services.kvtransfer.transports.staging import Staging, num_slots_for
from services.kvtransfer.transports.tcp_source import TcpSource
from services.kvtransfer.wire import whole_shard
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call
from services.worker.config import PeerConfig
from services.worker.machine import Machine
from services.worker.plain_kv import UNENCRYPTED, demand_encryption, must_encrypt

log = logging.getLogger(__name__)

TRANSFER_SERVICE = "baton.v1.KVTransferService"


@dataclass(frozen=True, slots=True)
class Site:
    """Has what the ends of a worker's transports may need of it."""

    config: PeerConfig
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


def _tcp_source(site: Site) -> TcpSource:
    config = site.config
    advertised_host = parse(config.advertise)[0] if config.advertise else ""
    return site.machine.serve_blocks(
        site.engine.cache,
        site.reader,
        site.incarnation,
        host=config.host,
        port=config.kv_port,
        advertised_host=advertised_host,
    )


def _nixl_source(site: Site) -> NixlSource:
    return site.machine.register_blocks(site.engine.cache, site.reader, site.incarnation, ucx=_ucx(site))


def _nixl_destination(site: Site) -> NixlDestination:
    return site.machine.read_registered(site.engine.cache, ucx=_ucx(site))


def _ucx(site: Site) -> dict[str, str]:
    return ucx_settings(on_this_host=is_loopback(site.config.host), asked_for=site.config.transport == "nixl")


def _nixl_helps(site: Site) -> bool:
    """Returns whether NIXL can have a better way than the other transports, and is not only installed."""
    reaches_further = has_rdma_device() and not is_loopback(site.config.host)
    return is_installed() and (reaches_further or site.engine.cache.region(0).device != "cpu")


TRANSPORTS: dict[str, tuple[Callable[[Site], SourceEnd], Callable[[Site], DestinationEnd]]] = {
    "shm": (_shm_source, lambda site: site.machine.mappings(site.engine.cache.block_bytes)),
    "nixl": (_nixl_source, _nixl_destination),
    "tcp": (_tcp_source, lambda site: site.machine.read_blocks()),
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
        config: PeerConfig,
        engine: WorkerEngine,
        machine: Machine,
        board: LeaseBoard,
        imports: ImportTable,
        *,
        worker_id: str,
        incarnation: int,
    ) -> None:
        demand_encryption(config, has_tls=machine.certificates is not None)
        self.layout = _layout(engine)
        check_regions(engine.cache, self.layout.block_bytes)
        self._reader = machine.thread("kv-read")
        site = Site(config, engine, machine, board, self._reader, worker_id, incarnation)
        self.sources = list(_offered(site))
        pulls_by = _pulled(site)
        self.withheld = f"nixl: {UNENCRYPTED}" if _nixl_is_withheld(site) else ""
        """What would help to move KV and is not taken, and why; in words for people."""
        if self.withheld:
            log.warning("KV is not moved by %s", self.withheld)
        self._pulls_by = ", else ".join(pulls_by) if len(pulls_by) > 1 else f"{pulls_by[0]} only"
        self.lender = Lender(
            board.table,
            machine.awake,
            lend=engine.lend,
            give_back=lambda block_ids: engine.release(block_ids, Holder.LEASE),
            block_size=self.layout.block_size,
            num_blocks=engine.info.num_blocks,
        )
        self._servicer = KVTransferServicer(
            board,
            self.layout,
            incarnation,
            machine.awake,
            transports=self.sources,
            lender=self.lender,
            awake=machine.awake,
        )
        self._peers = Peers(machine.dial, from_call, awake=machine.awake)
        self.borrower = Borrower(self._peers, self.layout)
        self.fetcher = BlockFetcher(
            engine.cache,
            self.layout,
            imports,
            machine.clock,
            transports=[TRANSPORTS[name][1](site) for name in pulls_by],
            peers=self._peers,
            copy_threads=machine.threads("kv-copy"),
        )

    @property
    def offers(self) -> list[types_pb2.KVOffer]:
        """Returns the offers of this worker's transports."""
        shards = types_pb2.KVOffer(shards=[whole_shard(self.layout)])
        offers = []
        for end in self.sources:  # an end may return the same object again and again
            offer = types_pb2.KVOffer()
            offer.CopyFrom(end.offer())
            offer.MergeFrom(shards)
            offers.append(offer)
        return offers

    @property
    def summary(self) -> str:
        """Returns how this worker pulls and offers KV, in words for the log."""
        return f"pulls by {self._pulls_by}, offers {' and '.join(end.description for end in self.sources)}"

    def register(self, server: GrpcServer) -> None:
        server.add(TRANSFER_SERVICE, kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, self._servicer)

    def keep_for_others(self, keep: Callable[[types_pb2.KVSource, list[BlockHash]], int]) -> None:
        """Has blocks that other workers offer kept here: `keep(source, hashes)` returns how many are wanted."""
        self._servicer.keep = keep

    def recall_before_lending(self, recall: Callable[[list[BlockHash]], Awaitable[None]]) -> None:
        """Has `recall(hashes)` awaited before blocks are lent, which brings those to the pool that are below it."""
        self._servicer.recall = recall

    def leave(self) -> None:
        """Notes that this worker leaves: fetches of leases that are aborted from now on get Draining as the reason."""
        self._servicer.leave()

    async def close(self) -> None:
        """Closes both ends. Call it after the server has stopped; afterwards nothing reads or writes the pool."""
        self.lender.close()
        await self.borrower.close()
        await self.fetcher.close()
        await self._peers.close()
        self._reader.shutdown()
        for end in self.sources:
            end.close()


def _pulled(site: Site) -> list[str]:
    """Returns the names of the transports that this worker pulls by."""
    if site.config.transport != "auto":
        return [site.config.transport]
    has_nixl = _nixl_helps(site) and not _nixl_is_withheld(site)
    return [name for name in TRANSPORTS if name != "nixl" or has_nixl]


def _nixl_is_withheld(site: Site) -> bool:
    has_tls = site.machine.certificates is not None
    return site.config.transport == "auto" and _nixl_helps(site) and must_encrypt(site.config, has_tls=has_tls)


def _offered(site: Site) -> Iterator[SourceEnd]:
    wanted, pulled = site.config.transport, _pulled(site)
    for name, (source_end, _) in TRANSPORTS.items():
        if name not in pulled and name != _OFFERED_ALWAYS:
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
        engine=info.engine,
    )
