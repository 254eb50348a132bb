"""Dials other processes of Baton: the client side of gRPC.

Never: owns a channel; the caller closes what it dialled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import grpc

from services.core.addresses import is_address
from services.core.errors import ConfigError
from services.rpc.authentication import credentials
from services.rpc.options import channel_options

Dial = Callable[[str], grpc.aio.Channel]


def dial(address: str, token: str | None = None) -> grpc.aio.Channel:
    """Returns an aio channel to `host:port` that connects on first use.

    Raises ConfigError if the address has another form.

    With `token`, the cluster token, every call on the channel carries it; this is for Baton's own processes.
    """
    if not is_address(address):
        raise ConfigError(f"{address!r} is not HOST:PORT")
    channel = grpc.aio.insecure_channel(address, options=channel_options())
    return channel if token is None else _TokenChannel(channel, token)


class _TokenChannel(grpc.aio.Channel):
    """Wraps a channel so that its calls carry the token.

    Its calls are the inner channel's own, which an interceptor of gRPC would wrap: nothing stands between a session and
    its messages.
    """

    def __init__(self, channel: grpc.aio.Channel, token: str) -> None:
        self._channel = channel
        self._credentials = credentials(token)

    async def __aenter__(self) -> _TokenChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *exception: Any) -> bool | None:
        return await self._channel.__aexit__(*exception)

    async def close(self, grace: float | None = None) -> None:
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    def unary_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_unary(*args, **options))

    def unary_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.unary_stream(*args, **options))

    def stream_unary(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_unary(*args, **options))

    def stream_stream(self, *args: Any, **options: Any) -> Any:
        return self._with_token(self._channel.stream_stream(*args, **options))

    def _with_token(self, calls: Any) -> Callable[..., Any]:
        def call(*args: Any, metadata: Any = None, **options: Any) -> Any:
            return calls(*args, metadata=(*(metadata or ()), *self._credentials), **options)

        return call
