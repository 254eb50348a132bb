"""Wraps the sockets that blocks are read from in TLS: both ends show a certificate of a worker or a store.

Owns: the handshake's bounds and errors, whose certificate is let in, and how threads share one connection. Never: where
certificates come from (`services.rpc.certificates`), or what is said on the sockets (`tcp`).
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from services.core.errors import TransferFailed
from services.core.printable import printable
from services.kvtransfer.transports.tcp import Connection, Stranger
from services.rpc.authentication import STORE, WORKER, identity
from services.rpc.certificates import Certificates

T = TypeVar("T")

_PEERS = frozenset(map(identity, (WORKER, STORE)))
"""Who reads KV from each other, as certificates name them."""
_SHOWN_CHARS = 200
"""How much of a refused certificate's names is told."""
_SEND_BYTES = 256 << 10
"""The most bytes encrypted by one call, which must all be sent before the next: whoever is slower than that within the
time for silence counts as silent."""


def require_secret(token: str, tls: Certificates | None) -> None:
    """Raises ValueError if nothing would tell a stranger from a peer."""
    if not token and tls is None:
        raise ValueError("without a cluster token, KV is given inside TLS only")


def accepted_connection(accepted: socket.socket, silence_s: float, tls: Certificates | None) -> Connection:
    """Returns the answering end of a connection, to be established. Raises OSError if the peer has left."""
    if tls is None:
        return Connection(accepted, silence_s)
    wrapped = tls.server_context().wrap_socket(accepted, server_side=True, do_handshake_on_connect=False)
    return TlsConnection(wrapped, silence_s)


def wrap_dialled(tls: Certificates, dialled: socket.socket) -> ssl.SSLSocket:
    """Returns the socket as the dialling end of a connection in TLS, whose handshake is to come."""
    return tls.peer_context().wrap_socket(dialled, do_handshake_on_connect=False)


def require_peer(tls: ssl.SSLSocket) -> None:
    """Raises Stranger unless the other end has shown a certificate of a worker or a store. One with more than one URI
    names no role."""
    try:
        names: Any = (tls.getpeercert() or {}).get("subjectAltName", ())
    except ValueError as error:  # as they need not be text
        raise Stranger("its certificate has names that cannot be read") from error
    shown = [value for kind, value in names if kind == "URI"]
    if len(shown) != 1 or shown[0] not in _PEERS:
        raise Stranger(f"its certificate is of {printable(' and '.join(shown)[:_SHOWN_CHARS]) or 'no role'}")


async def once_ready(connected: socket.socket, act: Callable[[], T]) -> T:
    """Returns what `act` returns, on the event loop, once the socket has what it reads, or room for what TLS writes."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            return act()
        except (BlockingIOError, ssl.SSLWantReadError):
            watch, unwatch = loop.add_reader, loop.remove_reader
        except ssl.SSLWantWriteError:
            watch, unwatch = loop.add_writer, loop.remove_writer
        ready = asyncio.Event()
        watch(connected.fileno(), ready.set)
        try:
            await ready.wait()
        finally:
            unwatch(connected.fileno())


def reason_of(error: OSError) -> str:
    """Returns why a handshake has failed, for people."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    if isinstance(error, ssl.SSLError) and error.reason:
        return error.reason.replace("_", " ").lower()
    return error.strerror or str(error) or "no answer"


class TlsConnection(Connection):
    """Is a connection in TLS. Two threads may use it at once, of which one sends and one receives: a session of OpenSSL
    is one thread's at a time, so each call takes what is there, and waits without holding the session."""

    _socket: ssl.SSLSocket

    def _prepare(self) -> None:
        self._session = threading.Lock()
        self._socket.setblocking(False)

    def establish(self) -> None:
        """Shakes hands, within the time for silence in all, and looks at the other end's role."""
        self._socket.settimeout(self._silence_s)
        try:
            self._socket.do_handshake()
        except (ConnectionError, ssl.SSLEOFError) as error:
            raise TransferFailed("it has left") from error
        except OSError as error:
            raise Stranger(f"it does not shake hands: {reason_of(error)}") from error
        self._socket.settimeout(0.0)
        require_peer(self._socket)

    def is_quiet(self) -> bool:
        return not self._socket.pending() and super().is_quiet()

    def leave_loop(self) -> None:
        """Does nothing: the socket never blocks."""

    def _send_some(self, buffers: Sequence[memoryview]) -> int:
        return self._when_ready(lambda: self._socket.send(buffers[0][:_SEND_BYTES]))

    def _receive_some(self, buffers: Sequence[memoryview]) -> int:
        return self._when_ready(lambda: self._socket.recv_into(buffers[0], buffers[0].nbytes))

    def _when_ready(self, act: Callable[[], T]) -> T:
        while True:
            try:
                with self._session:
                    return act()
            except ssl.SSLWantReadError:
                event = select.POLLIN
            except ssl.SSLWantWriteError:
                event = select.POLLOUT
            ready = select.poll()
            ready.register(self._socket, event)
            if not ready.poll(self._slice_s * 1000):
                raise BlockingIOError
