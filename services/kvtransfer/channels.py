"""Channels to the workers that blocks are fetched from: one per address, kept while it works."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import grpc

from services.core.errors import TransferFailed


class ChannelCache:
    """Dials with `dial`: limits and keepalive, which is what notices a dead host, are set there. Event loop only."""

    def __init__(self, dial: Callable[[str], grpc.aio.Channel]) -> None:
        self._dial = dial
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._num_users: dict[str, int] = {}
        self._closing: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._channels)

    @contextlib.contextmanager
    def use(self, address: str) -> Iterator[grpc.aio.Channel]:
        """A channel to the address. If its last user fails it is given up, so that addresses which went away do not
        pile up."""
        channel = self._channels.get(address) or self._channels.setdefault(address, self._dial(address))
        self._num_users[address] = self._num_users.get(address, 0) + 1
        try:
            yield channel
        except TransferFailed:
            if self._num_users[address] == 1:
                self._give_up(address)
            raise
        finally:
            self._num_users[address] -= 1
            if self._num_users[address] == 0:
                del self._num_users[address]

    def _give_up(self, address: str) -> None:
        closing = asyncio.ensure_future(self._channels.pop(address).close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        for address in list(self._channels):
            self._give_up(address)
        await asyncio.gather(*self._closing)
