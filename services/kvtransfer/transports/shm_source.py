"""Offers this worker's blocks by shared memory: the source's end of the transport.

Owns: the server that hands the memory out and, for a pool that no peer can map, the staging. Never: the pool.
"""

from __future__ import annotations

from concurrent.futures import Executor

from baton.v1 import types_pb2
from services.kv.lease import FetchTicket
from services.kv.regions import BlockMemory
from services.kvtransfer.transports import Announcer
from services.kvtransfer.transports.shm import PoolAnnouncer, ShmServer
from services.kvtransfer.transports.staging import Staging


class ShmSource:
    """Implements `SourceEnd`. `server` hands out `memory` itself or, with `staging`, the staging area."""

    transport = types_pb2.TRANSPORT_SHM

    def __init__(
        self, memory: BlockMemory, server: ShmServer, reader: Executor, *, staging: Staging | None = None
    ) -> None:
        self.staging = staging
        self._memory = memory
        self._server = server
        self._reader = reader

    @property
    def description(self) -> str:
        staged = f", staged: {_mebibytes(self.staging.area)}" if self.staging is not None else ""
        return f"shm ({self._server.name}{staged})"

    def offer(self) -> types_pb2.KVOffer:
        return types_pb2.KVOffer(transport=self.transport, shm_socket=self._server.name)

    def announcer(self, ticket: FetchTicket, *, checksums: bool) -> Announcer:
        if self.staging is not None:
            return self.staging.announcer(ticket, self._reader, checksums=checksums)
        return PoolAnnouncer(self._memory, self._reader, checksums=checksums)

    def close(self) -> None:
        """Closes the server and the staging area. To be called when no copy is under way any more."""
        self._server.close()
        if self.staging is not None:
            self.staging.area.close()


def _mebibytes(memory: BlockMemory) -> str:
    return f"{-(-memory.num_blocks * memory.block_bytes >> 20)} MiB"
