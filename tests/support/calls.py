"""Makes calls of any RPC by its name, as a stranger would."""

from __future__ import annotations

from collections.abc import Sequence

import grpc

_WRITE_FAILED = "Internal error from Core"
_MOST_TRIES = 100


async def ask_on(
    channel: grpc.aio.Channel, method: str, metadata: Sequence[tuple[str, str]] = (), data: bytes = b""
) -> grpc.aio.AioRpcError | None:
    """Returns how a call with one request ends; None if all is well. On the wire all four kinds of RPC are the same.

    A request that meets the end of its call makes grpc.aio lose the call's status: then it is asked again.
    """
    for _ in range(_MOST_TRIES):
        call = channel.stream_stream(method)(iter([data]), metadata=metadata, timeout=10.0)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            if error.details() != _WRITE_FAILED:
                return error
        else:
            return None
    raise AssertionError(f"{method}: no status in {_MOST_TRIES} tries")
