"""Dials other processes of Baton: the client side of gRPC.

Never: owns a channel; the caller closes what it dialled.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from services.core.addresses import is_address
from services.core.errors import ConfigError
from services.rpc.authentication import credentials, server_name
from services.rpc.certificates import Certificates
from services.rpc.options import channel_options, name_options

Dial = Callable[[str], grpc.aio.Channel]


def dial(
    address: str, token: str | None = None, certificates: Certificates | None = None, *, role: str = ""
) -> grpc.aio.Channel:
    """Returns an aio channel to `host:port` that connects on first use.

    Raises ConfigError if the address has another form.

    With `token`, the cluster token, every call on the channel carries it; this is for Baton's own processes. With
    `certificates` the channel speaks TLS, and who answers must have a certificate of the `role`, or of the host without
    one.
    """
    if not is_address(address):
        raise ConfigError(f"{address!r} is not HOST:PORT")
    if certificates is None:
        channel = grpc.aio.insecure_channel(address, options=channel_options())
        return channel if token is None else _ClusterChannel(lambda: channel, token)
    options = [*channel_options(), *name_options(server_name(role) if role else "")]

    def make() -> grpc.aio.Channel:
        return grpc.aio.secure_channel(address, certificates.channel_credentials(), options=options)

    return _ClusterChannel(make, token, certificates)


@dataclass(slots=True, eq=False)
class _Made:
    """Is a channel that was made by the certificates of one time."""

    channel: grpc.aio.Channel
    num_calls: int = 0
    """Calls under way on it."""


class _ClusterChannel(grpc.aio.Channel):
    """Wraps channels so that calls carry the token, and each is made by the certificates of its time.

    Its calls are the inner channel's own, which an interceptor of gRPC would wrap: nothing stands between a session and
    its messages. A channel of certificates that have been replaced is closed when its last call has ended.
    """

    def __init__(
        self, make: Callable[[], grpc.aio.Channel], token: str | None, certificates: Certificates | None = None
    ) -> None:
        self._make = make
        self._certificates = certificates
        self._made_of = None if certificates is None else certificates.current()
        self._newest = _Made(make())
        self._older: set[_Made] = set()
        self._closing: set[asyncio.Task[None]] = set()
        self._credentials = () if token is None else credentials(token)

    def _current(self) -> _Made:
        if self._certificates is not None and (current := self._certificates.current()) is not self._made_of:
            replaced, self._newest, self._made_of = self._newest, _Made(self._make()), current
            self._older.add(replaced)
            self._close_unused(replaced)
        return self._newest

    def _close_unused(self, made: _Made) -> None:
        if made in self._older and not made.num_calls:
            self._older.discard(made)
            closing = asyncio.get_running_loop().create_task(made.channel.close(), name="close a replaced channel")
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def __aenter__(self) -> _ClusterChannel:
        return self

    async def __aexit__(self, *exception: Any) -> bool | None:
        await self.close()
        return None

    async def close(self, grace: float | None = None) -> None:
        older = list(self._older)
        self._older.clear()
        for made in (*older, self._newest):
            await made.channel.close(grace)
        await asyncio.gather(*self._closing)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._current().channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._current().channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._current().channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._calls("unary_unary", args, options)

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._calls("unary_stream", args, options)

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._calls("stream_unary", args, options)

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._calls("stream_stream", args, options)

    def _calls(self, kind: str, args: Any, options: Any) -> Callable[..., Any]:
        """Returns what makes calls of an RPC."""
        on: _Made | None = None
        calls: Any = None

        def call(*given: Any, metadata: Any = None, **more: Any) -> Any:
            nonlocal on, calls
            if on is not (made := self._current()):
                on, calls = made, getattr(made.channel, kind)(*args, **options)
            started = calls(*given, metadata=(*(metadata or ()), *self._credentials), **more)
            made.num_calls += 1
            started.add_done_callback(lambda _: self._ended(made))
            return started

        return call

    def _ended(self, made: _Made) -> None:
        made.num_calls -= 1
        self._close_unused(made)
