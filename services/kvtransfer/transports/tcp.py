"""Defines what is said on the sockets that blocks are read from, and a connection's two ends have in common.

The Fetch stream says which blocks are final; the destination then asks for them here, by lease and leg, and the source
answers with their bytes. Whoever connects shows first that it has the cluster token, and so does who answers: by HMACs
over what both have drawn by lot, so that the token itself is never sent. With certificates all of this goes through TLS
(`tcp_tls`); without, what follows is neither encrypted nor protected against whoever can change packets on the way.

Owns: the forms of the messages, the proofs, and how sockets are made and used. Never: who may have which blocks.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from services.core.errors import TransferFailed
from services.kv.regions import Buffer

GREETING = struct.Struct("<8sQ32s")
"""The source's first message: magic, incarnation, nonce."""
INTRODUCTION = struct.Struct("<32s32s")
"""The destination's answer: nonce, proof."""
PROOF_BYTES = 32
"""The source's answer to that: its proof."""
REQUEST = struct.Struct("<16sQII")
"""What the destination then asks for, again and again: lease id, leg, index in the sequence of the first block, number
of blocks."""
ANSWER = struct.Struct("<QI")
"""What comes before the blocks' bytes: how many bytes there are, and whether there are any (a `Refusal` if not)."""
GRANTED, REFUSED = 0, 1
PROBE = bytes(16)
"""The lease id of a request for bytes that are no block's: as many KiB as there would be blocks."""
MAGIC = b"batonkv1"
NONCE_BYTES = 32

NUM_CONNECTIONS = max(1, min(4, len(os.sched_getaffinity(0)) // 2))
"""How many connections a fetch has: each needs a thread at both ends."""

_MOST_BUFFERS = 1000
"""Buffers in one system call; the kernel takes 1024 (IOV_MAX)."""
SLICE_S = 0.5
"""How long a system call waits at the most: a process that was stopped finds one slice used up, not its patience."""
_DEAD_AFTER_MS = 10_000
"""How long sent data may stay unacknowledged before the connection is ended: the other host is gone."""


class Silent(TransferFailed):
    """Says that the other end of a connection neither sends nor reads."""


class Stranger(TransferFailed):
    """Says why the other end of a connection is not taken for one of the cluster's."""


@dataclass(frozen=True, slots=True)
class Proofs:
    """Knows what both ends of a connection must say to show that they have the token."""

    source: bytes
    destination: bytes

    @classmethod
    def of(cls, token: str, incarnation: int, source_nonce: bytes, destination_nonce: bytes) -> Proofs:
        said = incarnation.to_bytes(8, "little") + source_nonce + destination_nonce
        return cls(_proof(token, b"baton kv source" + said), _proof(token, b"baton kv destination" + said))


def _proof(token: str, said: bytes) -> bytes:
    return hmac.digest(token.encode(), said, "sha256")


def is_right(proof: bytes, expected: bytes) -> bool:
    """Returns whether a proof is the expected one. How long it takes does not tell how much of it is right."""
    return hmac.compare_digest(proof, expected)


def new_nonce() -> bytes:
    return secrets.token_bytes(NONCE_BYTES)


def prepare(connection: socket.socket) -> None:
    """Sets what every socket of this transport needs."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _DEAD_AFTER_MS)


class Connection:
    """Sends and receives on one connected socket, for one thread at a time; `interrupt` may come from another.

    The calls block in the kernel, without the interpreter's lock. Each raises TransferFailed if the other end is gone,
    or Silent if it does nothing for `silence_s` seconds of this process's running.
    """

    def __init__(self, connected: socket.socket, silence_s: float) -> None:
        self._socket = connected
        self._silence_s = silence_s
        self._slice_s = min(SLICE_S, silence_s)
        self._prepare()

    def _prepare(self) -> None:
        self._socket.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            self._socket.setsockopt(socket.SOL_SOCKET, option, _timeval(self._slice_s))

    def fileno(self) -> int:
        return self._socket.fileno()

    def establish(self) -> None:
        """Does what comes before the first message. Raises Stranger if the other end is not let in."""

    def send(self, buffers: Sequence[Buffer]) -> None:
        left = [memoryview(buffer) for buffer in buffers]
        waited_s = 0.0
        while left:
            try:
                num_bytes = self._send_some(left)
            except BlockingIOError:
                waited_s = self._waited(waited_s)
            except OSError as error:
                raise TransferFailed(f"the connection broke: {error.strerror or error}") from error
            else:
                waited_s = 0.0
                _advance(left, num_bytes)

    def receive_into(self, buffers: Sequence[memoryview], *, patience_s: float | None = None) -> bool:
        """Fills the buffers. Returns False if the other end has closed the connection before the first byte."""
        left, begun, waited_s = list(buffers), False, 0.0
        try:
            while left:
                try:
                    num_bytes = self._receive_some(left)
                except BlockingIOError:
                    waited_s = self._waited(waited_s, None if begun else patience_s)
                    continue
                except OSError as error:
                    raise TransferFailed(f"the connection broke: {error.strerror or error}") from error
                if not num_bytes and begun:
                    raise TransferFailed("the connection ended within a message")
                if not num_bytes:
                    return False
                begun, waited_s = True, 0.0
                _advance(left, num_bytes)
            return True
        finally:
            left.clear()  # an error's traceback would keep views of the memory

    def receive(self, num_bytes: int, *, patience_s: float | None = None) -> bytes | None:
        """Returns the next bytes; None if the other end has closed the connection. `patience_s` is for the first."""
        data = bytearray(num_bytes)
        with memoryview(data) as view:
            return bytes(data) if self.receive_into([view], patience_s=patience_s) else None

    def interrupt(self) -> None:
        """Ends what another thread does with the connection, and what comes after it."""
        with contextlib.suppress(OSError):  # it is over already
            # That of TLS sockets would end the session under the other thread, and send what follows in the clear.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def is_quiet(self) -> bool:
        """Returns whether the connection is open, and nothing has come that nobody asked for."""
        try:
            socket.socket.recv(self._socket, 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def leave_loop(self) -> None:
        """Makes the calls block again after an event loop has watched the socket: uvloop makes it non-blocking."""
        self._socket.setblocking(True)

    def close(self) -> None:
        self._socket.close()

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        """Sends the beginning of the buffers; returns how many bytes. Raises BlockingIOError if a slice was not
        enough."""
        return self._socket.sendmsg(buffers[:_MOST_BUFFERS])

    def _receive_some(self, buffers: Sequence[memoryview]) -> int:
        """Fills the beginning of the buffers; returns how many bytes, 0 at the connection's end. Raises as
        `_send_some`."""
        return self._socket.recvmsg_into(buffers[:_MOST_BUFFERS], 0, socket.MSG_WAITALL)[0]

    def _waited(self, waited_s: float, patience_s: float | None = None) -> float:
        silence_s = self._silence_s if patience_s is None else patience_s
        waited_s += self._slice_s
        if waited_s >= silence_s:
            raise Silent("the other end is silent")
        return waited_s


def _advance(left: list[memoryview], num_bytes: int) -> None:
    """Removes the first `num_bytes` bytes from the buffers."""
    whole = 0
    while whole < len(left) and num_bytes >= left[whole].nbytes:
        num_bytes -= left[whole].nbytes
        whole += 1
    del left[:whole]
    if num_bytes:
        left[0] = left[0][num_bytes:]


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), max(1, int(seconds % 1 * 1e6)))
