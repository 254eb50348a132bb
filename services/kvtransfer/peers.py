"""Calls the KVTransferService of other workers.

Owns: the channels to them, which error a call that failed stands for, and how long an answer may take. Never: what an
answer means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc

from baton.v1 import kvtransfer_pb2, kvtransfer_pb2_grpc
from services.core.clock import Clock, MonotonicClock, timeout_after
from services.core.errors import MalformedMessage, TransferFailed
from services.kvtransfer.channel_cache import ChannelCache
from services.kvtransfer.fetch_stream import ErrorOf, as_transfer_error
from services.kvtransfer.wire import response_of

_FETCH = "/baton.v1.KVTransferService/Fetch"


class _Calls(kvtransfer_pb2_grpc.KVTransferServiceStub):
    """Has the calls to a peer; a Fetch's answers come as `response_of` returns them."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        super().__init__(channel)  # type: ignore[no-untyped-call]
        self.Fetch: Any = channel.stream_stream(
            _FETCH,
            request_serializer=kvtransfer_pb2.FetchRequest.SerializeToString,
            response_deserializer=response_of,
        )


class Peers:
    """Has the channels to other workers, and bounds their answers.

    `dial(address)` makes channels (rpc.channels.dial); `error_of(call error)` returns the error that a failed call
    stands for (rpc.status.from_call). `silence_s`, measured by `awake`, bounds each answer that a peer owes at once.
    """

    def __init__(
        self,
        dial: Callable[[str], grpc.aio.Channel],
        error_of: ErrorOf,
        *,
        awake: Clock | None = None,
        silence_s: float = 5.0,
    ) -> None:
        self.error_of = error_of
        self.awake = awake or MonotonicClock()
        self.silence_s = silence_s
        self._channels = ChannelCache(dial)

    async def close(self) -> None:
        await self._channels.close()

    @contextlib.contextmanager
    def use(self, address: str) -> Iterator[Any]:
        """Yields the calls to the peer at an address. Its channel is kept for a while."""
        with self._channels.use(address) as channel:
            yield _Calls(channel)

    async def answer(self, call: Awaitable[Any], what: str) -> Any:
        """Returns the answer of a call that the peer owes at once. `what` it does if there is none is for people."""
        try:
            async with timeout_after(self.silence_s, self.awake):
                answer = await call
        except TimeoutError:
            raise TransferFailed(f"the source {what}") from None
        except grpc.aio.AioRpcError as error:
            raise as_transfer_error(error, self.error_of) from error
        if answer is None:
            raise MalformedMessage("the bytes received are not the answer")
        return answer
