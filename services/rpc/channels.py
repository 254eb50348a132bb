"""Client side of gRPC: how any process of Baton dials another. Owns no channel; the caller closes what it dialled."""

from __future__ import annotations

import grpc

from services.core.errors import ConfigError
from services.rpc.options import channel_options


def dial(address: str) -> grpc.aio.Channel:
    """An aio channel to `host:port` that connects on first use. ConfigError unless the address has that form."""
    host, separator, port = address.rpartition(":")
    if not separator or not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError(f"{address!r} is not HOST:PORT")
    return grpc.aio.insecure_channel(address, options=channel_options())
