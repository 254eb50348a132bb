"""Measures block transfer alone: two processes on this host, a pool each, one lease at a time."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import Connection

from baton.v1 import kvtransfer_pb2_grpc, types_pb2
from benchmarks.figure import Figure, Findings, ratio
from services.core.clock import MonotonicClock
from services.core.ids import new_incarnation, new_lease_id
from services.core.sealed_memory import SealedMemory
from services.kv.imports import ImportTable
from services.kv.layout import Layout
from services.kv.lease_table import LeaseTable
from services.kv.regions import Buffer
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import BlockFetcher, FetchOrder
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.transports import DestinationEnd, SourceEnd
from services.kvtransfer.transports.grpc import GrpcDestination, GrpcSource
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.transports.shm_mapping import MappingCache
from services.kvtransfer.transports.shm_source import ShmSource
from services.kvtransfer.wire import layout_to_proto
from services.rpc.channels import dial
from services.rpc.serving import GrpcServer
from services.rpc.status import from_call

# SmolLM2-135M in bfloat16: 2048 tokens are 128 blocks, 47 MB.
_TOKEN = "a-token-for-the-benchmark"
_LAYOUT = Layout("bench", "0", "0", "bfloat16", num_layers=30, num_kv_heads=3, head_dim=64, block_size=16)
_NUM_BLOCKS = 128


class _Pool:
    """Holds host memory behind a memfd, as the engine's is."""

    def __init__(self) -> None:
        self.block_bytes, self.num_blocks = _LAYOUT.block_bytes, _NUM_BLOCKS
        self._memory = SealedMemory("bench", self.block_bytes * self.num_blocks)
        self.fd, self._map = self._memory.fd, self._memory.map
        self._view = memoryview(self._map)
        for block_id in range(self.num_blocks):
            self.write_blocks([block_id], [bytes([block_id]) * self.block_bytes])

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self._view[each * self.block_bytes : (each + 1) * self.block_bytes] for each in block_ids]

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        for target, source in zip(self.read_blocks(block_ids), data, strict=True):
            target[:] = source


def measure(repeats: int) -> Findings:
    """Takes samples of each transport and of a plain copy in memory, which is what a transport can reach, in turns."""
    samples: dict[str, list[float]] = {"a copy in memory": [], "shm": [], "grpc": []}
    for _ in range(repeats):
        samples["a copy in memory"].append(_copy_gb_s())
        for transport in ("shm", "grpc"):
            samples[transport] += asyncio.run(_measure(transport, 1))
    what = "transfer: 2048 tokens (47 MB)"
    return [
        *(Figure(f"{what}, {name}", "GB/s", tuple(each)) for name, each in samples.items()),
        ratio("  shm, of a copy in memory", samples["shm"], samples["a copy in memory"]),
        ratio("  grpc, of shm", samples["grpc"], samples["shm"]),
    ]


def _copy_gb_s() -> float:
    """Returns the rate of copying all blocks of one pool to another, block by block, as a transport does; the second
    pass is timed, when pages exist."""
    source, target = _Pool(), _Pool()
    for _ in range(2):
        started = time.perf_counter()
        target.write_blocks(range(_NUM_BLOCKS), source.read_blocks(range(_NUM_BLOCKS)))
        seconds = time.perf_counter() - started
    return _NUM_BLOCKS * _LAYOUT.block_bytes / seconds / 1e9


async def _measure(transport: str, repeats: int) -> list[float]:
    """Returns the GB/s of `repeats` leases after one that warms up."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    source = context.Process(target=_run_source, args=(theirs, repeats + 1), daemon=True)
    source.start()
    try:
        described, lease_ids = await asyncio.to_thread(ours.recv)
        samples = await _fetch_all(types_pb2.KVSource.FromString(described), lease_ids, transport)
        ours.send("done")
    finally:
        await asyncio.to_thread(source.join, 10)
        source.terminate()
    return samples[1:]


async def _fetch_all(source: types_pb2.KVSource, lease_ids: list[bytes], transport: str) -> list[float]:
    pool, clock = _Pool(), MonotonicClock()
    imports = ImportTable(on_freed=lambda import_: None)
    end: DestinationEnd = {"shm": MappingCache, "grpc": GrpcDestination}[transport](_LAYOUT.block_bytes)
    fetcher = BlockFetcher(
        pool, _LAYOUT, imports, clock, transports=[end], dial=partial(dial, token=_TOKEN), error_of=from_call
    )
    samples = []
    for leg, lease_id in enumerate(lease_ids, start=1):
        blocks = tuple(range(_NUM_BLOCKS))
        import_ = imports.reserve(blocks, clock.now())
        started = time.perf_counter()
        order = FetchOrder(source, lease_id, leg, import_, 0, blocks)
        outcome = await fetcher.fetch(order)
        samples.append(outcome.num_bytes / (time.perf_counter() - started) / 1e9)
    await fetcher.close()
    return samples


def _run_source(pipe: Connection, num_leases: int) -> None:
    asyncio.run(_source(pipe, num_leases))


async def _source(pipe: Connection, num_leases: int) -> None:
    pool, clock, incarnation = _Pool(), MonotonicClock(), new_incarnation()
    table = LeaseTable(_LAYOUT.block_size, on_end=lambda lease: None, ttl_s=60.0)
    board = LeaseBoard(table, clock)
    reader = ThreadPoolExecutor(1, thread_name_prefix="kv-read")
    ends: list[SourceEnd] = [ShmSource(pool, ShmServer(pool, incarnation), reader), GrpcSource(pool, reader)]
    servicer = KVTransferServicer(board, _LAYOUT, incarnation, clock, transports=ends)
    server = GrpcServer(token=_TOKEN)
    server.add("baton.v1.KVTransferService", kvtransfer_pb2_grpc.add_KVTransferServiceServicer_to_server, servicer)
    await server.start()
    lease_ids = [new_lease_id() for _ in range(num_leases)]
    num_tokens = _NUM_BLOCKS * _LAYOUT.block_size
    for lease_id in lease_ids:
        table.open(lease_id, owner="bench", block_ids=range(_NUM_BLOCKS), num_tokens=num_tokens, now=clock.now())
        table.publish(lease_id, num_tokens, clock.now())
        table.seal(lease_id, types_pb2.SequenceTokens(token_ids=[1]), clock.now())
    offers = [end.offer() for end in ends]
    source = types_pb2.KVSource(
        address=server.address, incarnation=incarnation, offers=offers, layout=layout_to_proto(_LAYOUT)
    )
    pipe.send((source.SerializeToString(), lease_ids))
    await asyncio.to_thread(pipe.recv)
    await server.stop()
    reader.shutdown()
    board.close()
    for end in ends:
        end.close()
