"""Runs the source of transfers in a process of its own: a pool with all its transports, and the bare ways beside."""

from __future__ import annotations

import asyncio
import multiprocessing
import pathlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch
import uvloop

from baton.v1 import kvtransfer_pb2_grpc, types_pb2
from benchmarks.transfer_bare import BareAddresses, serve_bare
from services.cli.certs import make_certificates
from services.core.clock import MonotonicClock
from services.core.ids import new_incarnation, new_lease_id
from services.engine.model.kv_cache import KVCache, KVShape
from services.kv.layout import Layout
from services.kv.lease_table import LeaseTable
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import SourceEnd, TransportUnavailable
from services.kvtransfer.wire import layout_to_proto
from services.rpc.certificates import Certificates
from services.rpc.serving import GrpcServer
from services.worker.config import WorkerConfig
from services.worker.machine import Machine
from services.worker.transfer import TRANSPORTS, Site

TOKEN = "a-token-for-the-benchmark"
_PATIENCE_S = 120.0


def new_pool(layout: Layout, num_blocks: int) -> KVCache:
    """Returns a pool of the engine's, every page of which was written."""
    shape = KVShape(layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.block_size, torch.bfloat16)
    pool = KVCache(shape, num_blocks, torch.device("cpu"))
    for block_id in range(num_blocks):
        pool.write_blocks([block_id], [bytes([block_id % 256]) * pool.block_bytes])
    return pool


def site_of(pool: KVCache, machine: Machine, board: Any = None, reader: Any = None, incarnation: int = 0) -> Site:
    """Returns what the makers of transports are given in a worker."""
    return Site(WorkerConfig(), pool, machine, board, reader, "bench", incarnation)


class RemoteSource:
    """Is the other process, as an async context."""

    def __init__(self, layout: Layout, num_blocks: int, certified: pathlib.Path | None = None) -> None:
        """Makes the process, which starts as the context is entered. With a folder of certificates it has but sockets,
        in TLS."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, layout, num_blocks, certified), daemon=True)
        self.where: types_pb2.KVSource
        self.bare: BareAddresses

    async def __aenter__(self) -> RemoteSource:
        self._process.start()
        described, self.bare = await self._received()
        self.where = types_pb2.KVSource.FromString(described)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._pipe.send("end")
        await asyncio.to_thread(self._process.join, 10)
        self._process.terminate()
        self._pipe.close()

    async def next_lease(self) -> bytes:
        """Returns the id of a sealed lease of all blocks."""
        self._pipe.send("lease")
        lease_id: bytes = await self._received()
        return lease_id

    def processor_s(self) -> float:
        """Returns the processor time that the process has used, in seconds."""
        assert self._process.pid is not None
        return time.clock_gettime(~self._process.pid << 3 | 2)  # clock_getcpuclockid(3), which Python does not have

    async def _received(self) -> Any:
        assert await asyncio.to_thread(self._pipe.poll, _PATIENCE_S), "the source does not answer"
        return self._pipe.recv()


def certificates_in(folder: pathlib.Path | None) -> Certificates | None:
    """Returns those of a worker; they are made if there is nothing in the folder."""
    if folder is None:
        return None
    if not (folder / "ca.pem").exists():
        for name, data in make_certificates().items():
            (folder / name).write_bytes(data)
            (folder / name).chmod(0o600)
    return Certificates(*(str(folder / name) for name in ("worker.pem", "worker.key", "ca.pem")))


def _run(pipe: Connection, layout: Layout, num_blocks: int, certified: pathlib.Path | None) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_source(pipe, layout, num_blocks, certificates_in(certified)))


async def _source(pipe: Connection, layout: Layout, num_blocks: int, certificates: Certificates | None) -> None:
    pool, clock, incarnation = new_pool(layout, num_blocks), MonotonicClock(), new_incarnation()
    table = LeaseTable(layout.block_size, on_end=lambda lease: None, ttl_s=60.0)
    board = LeaseBoard(table, clock)
    reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
    site = site_of(pool, Machine(TOKEN, certificates=certificates), board, reader, incarnation)
    ends = _ends(site, TRANSPORTS if certificates is None else ("tcp",))
    servicer = KVTransferServicer(board, layout, incarnation, clock, transports=ends)
    server = GrpcServer(token=TOKEN, certificates=certificates)
    server.add("baton.v1.KVTransferService", kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, servicer)
    await server.start()
    offers = [end.offer() for end in ends]
    where = types_pb2.KVSource(
        address=server.address, incarnation=incarnation, offers=offers, layout=layout_to_proto(layout)
    )
    async with serve_bare(pool, certificates) as bare:
        pipe.send((where.SerializeToString(), bare))
        while await asyncio.to_thread(pipe.recv) != "end":
            lease_id, num_tokens = new_lease_id(), num_blocks * layout.block_size
            table.open(lease_id, owner="bench", block_ids=range(num_blocks), num_tokens=num_tokens, now=clock.now())
            table.publish(lease_id, num_tokens, clock.now())
            table.seal(lease_id, types_pb2.SequenceTokens(token_ids=[1]), clock.now())
            pipe.send(lease_id)
    await server.stop()
    reader.shutdown()
    board.close()
    for end in ends:
        end.close()


def _ends(site: Site, names: Iterable[str]) -> list[SourceEnd]:
    ends = []
    for name in names:
        try:
            ends.append(TRANSPORTS[name][0](site))
        except TransportUnavailable as error:
            print(f"{name} is not measured: it {error}")
    return ends
