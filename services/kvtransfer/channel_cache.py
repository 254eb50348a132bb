"""Keeps a channel for each source address, as long as it works and is used."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc

from services.core.errors import TransferFailed

IDLE_S = 60.0
"""How long an unused channel is kept. Sources come and go, each at its own address, and to dial again costs little."""


@dataclass(slots=True)
class _Cached:
    channel: grpc.aio.Channel
    num_users: int = 0
    closed: bool = False
    expiry: asyncio.TimerHandle | None = None
    """The timer that closes the channel; set while it has no user."""


class ChannelCache:
    """Keeps channels made by `dial`, which sets limits and the keepalive that detects a dead host. Event loop only."""

    def __init__(self, dial: Callable[[str], grpc.aio.Channel], *, idle_s: float = IDLE_S) -> None:
        self._dial = dial
        self._idle_s = idle_s
        self._cached: dict[str, _Cached] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._cached)

    @contextlib.contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """Yields a channel to the address.

        If a user fails, no newcomer gets the channel, since its connection may be lost; it is closed when its last
        user is done. One whose users all succeed is closed after `idle_s` without a user.
        """
        cached = self._cached.get(address) or self._cached.setdefault(address, _Cached(self._dial(address)))
        cached.num_users += 1
        if cached.expiry is not None:
            cached.expiry.cancel()
            cached.expiry = None
        try:
            yield cached.channel
        except TransferFailed:
            if self._cached.get(address) is cached:
                del self._cached[address]
            raise
        finally:
            cached.num_users -= 1
            if cached.num_users == 0:
                self._unused(address, cached)

    def _unused(self, address: str, cached: _Cached) -> None:
        if self._cached.get(address) is cached:
            cached.expiry = asyncio.get_running_loop().call_later(self._idle_s, self._give_up, address)
        elif not cached.closed:  # somebody has failed with it
            self._close(cached)

    def _give_up(self, address: str) -> None:
        cached = self._cached.pop(address)
        if cached.expiry is not None:
            cached.expiry.cancel()
        self._close(cached)

    def _close(self, cached: _Cached) -> None:
        cached.closed = True
        closing = asyncio.ensure_future(cached.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for address in list(self._cached):
            self._give_up(address)
        await asyncio.gather(*self._closing)
