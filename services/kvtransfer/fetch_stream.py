"""Reads one Fetch call at the destination: announcements in order, then the seal.

While a prompt is computed the source may have nothing to announce for long. It says meanwhile that it is there, since a
connection that has lost its other end looks like a quiet one.

Owns: the stream's reader, and what is a protocol violation or too long a silence. Never: copies, the import, the
Release.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import grpc

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.clock import Clock, timeout_after
from services.core.errors import (
    BatonError,
    Cancelled,
    DeadlineExceeded,
    MalformedMessage,
    NoWorker,
    ProtocolViolation,
    TransferFailed,
)
from services.kv.regions import Buffer
from services.kvtransfer.wire import Announced

FetchCall: TypeAlias = (
    "grpc.aio.StreamStreamCall[kvtransfer_pb2.FetchRequest, tuple[kvtransfer_pb2.FetchResponse, Sequence[Buffer]]]"
)
ErrorOf: TypeAlias = Callable[[grpc.RpcError], BatonError]

# How many messages are read ahead of the copies if they carry the blocks' bytes. Other announcements are small, and all
# are read as they come, so that the time of SEALED is noted when it arrives.
_CARRIED_AHEAD = 4
_REASON_WITHIN_S = 0.2
"""A source that ends a fetch says why about when its bytes end."""


def as_transfer_error(error: grpc.RpcError, error_of: ErrorOf) -> BatonError:
    """Returns what a failed call means: the source's own error if it sent one, else TransferFailed."""
    meaning = error_of(error)
    if type(meaning) in (BatonError, NoWorker, DeadlineExceeded, Cancelled):
        return TransferFailed(str(meaning))
    return meaning


@dataclass(frozen=True, slots=True)
class Seal:
    """Ends the announcements: it brings token 0 and the number of tokens that the lease's KV covers."""

    num_tokens: int
    first_token: types_pb2.SequenceTokens
    other_first_tokens: tuple[types_pb2.SequenceTokens, ...]
    received_s: float

    @property
    def finished(self) -> bool:
        """Says whether token 0 ended the sequence, of several answers each, so that the lease is over and there is
        nothing to take over."""
        return all(tokens.HasField("finish") for tokens in (self.first_token, *self.other_first_tokens))


class FetchStream:
    """Reads one Fetch call. It is a context: call `open` first, then `next` until that returns the seal."""

    def __init__(
        self,
        call: FetchCall,
        clock: Clock,
        error_of: ErrorOf,
        *,
        carried: bool,
        awake: Clock,
        silence_s: float,
    ) -> None:
        """`carried` says that the messages bring the blocks' bytes.

        `silence_s`, measured by `awake`, bounds each answer that the source owes at once, and each time without a
        message.
        """
        self._call = call
        self._clock = clock
        self._error_of = error_of
        self._awake = awake
        self._silence_s = silence_s
        self._inbox: asyncio.Queue[Announced | Seal | Exception]
        self._inbox = asyncio.Queue(_CARRIED_AHEAD if carried else 0)
        self._reader: asyncio.Task[None] | None = None
        self._is_sealed = False
        self._failure: Exception | None = None
        self._carrying_s = 0.0
        self._num_carried = 0
        """How many blocks came in `_carrying_s`, in messages that followed each other at once."""

    @property
    def only_seal_left(self) -> bool:
        """Returns whether the seal is here, and every announcement before it was returned by `next`."""
        return self._is_sealed and self._inbox.qsize() <= 1

    async def __aenter__(self) -> FetchStream:
        return self

    async def __aexit__(self, *_: object) -> None:
        self._call.cancel()
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])

    async def open(self, opened: kvtransfer_pb2.FetchOpen) -> None:
        """Sends the first message, and returns when the source has accepted or refused the fetch.

        After a refusal `next` raises the source's error. Raises TransferFailed if the source does not answer in time.
        The time that the prompt then takes has no bound here, while the source says that it is there.
        """
        try:
            async with timeout_after(self._silence_s, self._awake):
                await self._call.write(kvtransfer_pb2.FetchRequest(open=opened))
                await self._call.initial_metadata()
        except TimeoutError:
            raise TransferFailed("the source does not answer") from None
        except asyncio.InvalidStateError:
            pass  # the call is over already: the reader gets the reason
        except grpc.aio.AioRpcError as error:
            raise as_transfer_error(error, self._error_of) from error
        self._reader = asyncio.create_task(self._read(), name="kv-fetch-reader")

    async def next(self) -> Announced | Seal:
        """Returns the next announcement, or the seal. Raises the error that ended the stream before it."""
        item = await self._inbox.get()
        if isinstance(item, Exception):
            raise item
        return item

    def carrying_s(self, num_blocks: int) -> float:
        """Returns how long messages with that number of blocks take, by those that followed each other at once; 0 if
        none did. The time between others is also the source's, which computes."""
        return num_blocks * self._carrying_s / self._num_carried if self._num_carried else 0.0

    async def raise_reason(self) -> None:
        """Raises the error by which the stream ends, if it does so now: a copy that failed may have failed by what the
        source says here."""
        assert self._reader is not None, "it is open"
        await asyncio.wait([self._reader], timeout=_REASON_WITHIN_S)
        if self._failure is not None:
            raise self._failure

    async def ack(self, copied: int) -> None:
        """Tells the source that all blocks before index `copied` are here."""
        try:
            async with timeout_after(self._silence_s, self._awake):
                await self._call.write(kvtransfer_pb2.FetchRequest(ack=kvtransfer_pb2.FetchAck(copied_blocks=copied)))
        except TimeoutError:
            raise TransferFailed("the source does not take acknowledgements") from None
        except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
            pass  # the stream is over: the reader has the reason, or SEALED came before and the Release decides

    async def _read(self) -> None:
        try:
            follows_s: float | None = None
            while isinstance(item := await self._receive(), Announced):
                now = self._clock.now()
                if follows_s is not None:
                    self._carrying_s += now - follows_s
                    self._num_carried += len(item.data)
                follows_s = now if item.more_follow else None
                await self._inbox.put(item)
            if item.finished:
                self._forget_announced()
            await self._inbox.put(item)
            self._is_sealed = True
        except grpc.aio.AioRpcError as error:
            failure = as_transfer_error(error, self._error_of)
            failure.__cause__ = error
            self._fail(failure)
        except Exception as error:  # `next` raises any error, since it would otherwise wait for ever
            self._fail(error)

    async def _receive(self) -> Announced | Seal:
        while True:
            try:
                async with timeout_after(self._silence_s, self._awake):
                    received: Any = await self._call.read()
            except TimeoutError:
                raise TransferFailed("the source is silent") from None
            if received is grpc.aio.EOF:
                raise TransferFailed("the stream ended before it was sealed")
            if received is None:  # the runtime returns None for bytes that do not parse
                raise MalformedMessage("the bytes received are not an answer of Fetch")
            response, data = received
            match response.WhichOneof("message"):
                case "blocks":
                    return Announced.of(response.blocks, data)
                case "sealed":
                    sealed: kvtransfer_pb2.FetchSealed = response.sealed
                    others = tuple(sealed.other_first_tokens)
                    return Seal(sealed.num_tokens, sealed.first_token, others, self._clock.now())
                case "alive":
                    pass
                case _:
                    raise ProtocolViolation("an empty message in a fetch stream")

    def _fail(self, error: Exception) -> None:
        self._failure = error
        self._forget_announced()
        self._inbox.put_nowait(error)

    def _forget_announced(self) -> None:
        """Drops the announcements not yet returned: they are no longer worth copying."""
        while not self._inbox.empty():
            self._inbox.get_nowait()
