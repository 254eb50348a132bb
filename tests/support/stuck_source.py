"""Has a source whose socket knows the cluster token, and that sends a part of what it is asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from baton.v1 import types_pb2
from services.kvtransfer.transports.tcp import ANSWER, GRANTED, GREETING, INTRODUCTION, MAGIC, REQUEST, Proofs
from tests.support import kv_harness
from tests.support.kv_harness import LAYOUT
from tests.support.trusted import CLUSTER_TOKEN


class Stuck:
    """Answers at a source's address with the right proof, then grants what is asked for and sends only a part of it."""

    def __init__(
        self,
        incarnation: int,
        *,
        token: str = CLUSTER_TOKEN,
        granted: int | None = None,
        sent: int = 100,
        cuts: bool = False,
    ) -> None:
        """With `cuts` it closes the connection then, and else waits for its peer to do that."""
        self._incarnation = incarnation
        self._token = token
        self._granted = granted
        self._sent = sent
        self._cuts = cuts
        self.asked = asyncio.Event()
        self.left = asyncio.Event()
        self.magic = MAGIC

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[types_pb2.KVOffer]:
        tls = kv_harness.TLS
        ssl = tls.server_context() if tls is not None else None
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=ssl)
        async with server:
            address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            yield types_pb2.KVOffer(transport=types_pb2.TRANSPORT_TCP, tcp_address=address, tcp_tls=tls is not None)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(GREETING.pack(self.magic, self._incarnation, b"s" * 32))
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            nonce, _ = INTRODUCTION.unpack(await reader.readexactly(INTRODUCTION.size))
            writer.write(Proofs.of(self._token, self._incarnation, b"s" * 32, nonce).source)
            *_, num_blocks = REQUEST.unpack(await reader.readexactly(REQUEST.size))
            num_bytes = num_blocks * LAYOUT.block_bytes if self._granted is None else self._granted
            writer.write(ANSWER.pack(num_bytes, GRANTED) + bytes(self._sent))
            self.asked.set()
            if not self._cuts:
                await reader.read()
        writer.close()
        self.left.set()
