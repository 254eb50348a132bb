"""Has a connection to the sockets that blocks are read from, which asks for what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

from services.core.addresses import parse
from services.kvtransfer.transports.tcp import (
    ANSWER,
    GRANTED,
    GREETING,
    INTRODUCTION,
    PROOF_BYTES,
    REFUSED,
    REQUEST,
    Proofs,
)
from tests.support import kv_harness
from tests.support.kv_harness import Source
from tests.support.trusted import CLUSTER_TOKEN


class Peer:
    """Is a connection to a source, for what a well-behaved destination would never say."""

    def __init__(self, source: Source) -> None:
        self.incarnation = source.incarnation
        self.socket = socket.create_connection(parse(source.tcp.address), 5.0)
        if kv_harness.TLS is not None:
            context = kv_harness.TLS.peer_context()
            self.socket = context.wrap_socket(self.socket, do_handshake_on_connect=False)  # the first call does it

    async def read(self, num_bytes: int) -> bytes:
        """Returns less if the source ends the connection before."""
        return await asyncio.to_thread(self._read, num_bytes)

    def _read(self, num_bytes: int) -> bytes:
        data = b""
        with contextlib.suppress(ConnectionError):
            while len(data) < num_bytes and (part := self.socket.recv(num_bytes - len(data))):
                data += part
        return data

    async def introduce(self, token: str = CLUSTER_TOKEN) -> bytes:
        """Shows the token; returns what the source answers, and makes sure that it shows it too."""
        _, incarnation, nonce = GREETING.unpack(await self.read(GREETING.size))
        assert incarnation == self.incarnation
        proofs = Proofs.of(token, incarnation, nonce, b"n" * 32)
        self.socket.sendall(INTRODUCTION.pack(b"n" * 32, proofs.destination))
        answer = await self.read(PROOF_BYTES)
        assert answer in (b"", proofs.source)
        return answer

    async def ask(self, lease_id: bytes, leg: int, first_block: int, num_blocks: int) -> bytes | None:
        """Returns the bytes of the blocks, or None if the source refuses."""
        self.socket.sendall(REQUEST.pack(lease_id, leg, first_block, num_blocks))
        num_bytes, status = ANSWER.unpack(await self.read(ANSWER.size))
        assert status in (GRANTED, REFUSED)
        return await self.read(num_bytes) if status == GRANTED else None


@contextlib.asynccontextmanager
async def connected(source: Source) -> AsyncIterator[Peer]:
    peer = await asyncio.to_thread(Peer, source)
    with peer.socket:
        yield peer
