"""Holds blocks in memory of this host, as a worker's pool does, and lets tests stop its writers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Sequence

from services.core.sealed_memory import SealedMemory
from services.kv.regions import Buffer, Region
from tests.support.patience import HANG_S


class Gate:
    """Stops writers until it is opened."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._open = threading.Event()

    def enter(self) -> None:
        self._entered.set()
        assert self._open.wait(HANG_S)

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, HANG_S)

    def open(self) -> None:
        self._open.set()


class MemfdMemory:
    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        self._memory = SealedMemory("baton-test", num_blocks * block_bytes)
        self.fd = self._memory.fd
        self.num_blocks = num_blocks
        self.block_bytes = block_bytes
        self._map = self._memory.map
        self._region = Region(self._memory.address, num_blocks * block_bytes, "cpu")
        self.gate: Gate | None = None
        self.corrupts = False

    def region(self, block_id: int) -> Region:
        return self._region.part(block_id * self.block_bytes, self.block_bytes)

    def block(self, block_id: int) -> memoryview:
        return memoryview(self._map)[block_id * self.block_bytes : (block_id + 1) * self.block_bytes]

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self.block(block_id) for block_id in block_ids]

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            with self.block(block_id) as block:
                target[:] = block

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        if self.gate is not None:
            self.gate.enter()
        for block_id, each in zip(block_ids, data, strict=True):
            with self.block(block_id) as block:
                block[:] = each
                if self.corrupts:
                    block[self.block_bytes // 2] ^= 1

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        with contextlib.ExitStack() as views:
            blocks = [views.enter_context(self.block(block_id)) for block_id in block_ids]
            fill(blocks)
            if self.gate is not None:
                self.gate.enter()
            if self.corrupts:
                for block in blocks:
                    block[self.block_bytes // 2] ^= 1

    def fill(self, block_id: int, seed: int) -> None:
        with self.block(block_id) as block:
            block[:] = content(seed, self.block_bytes)

    def close(self) -> None:
        self._map.release()
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class DeviceMemory(MemfdMemory):
    """Stands for a pool on a GPU: no peer can map it."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        super().__init__(num_blocks, block_bytes)
        assert self.fd is not None
        os.close(self.fd)
        self.fd = None
        self.read_gate: Gate | None = None

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        if self.read_gate is not None:
            self.read_gate.enter()
        super().copy_blocks(block_ids, targets)


def content(seed: int, num_bytes: int) -> bytes:
    return (seed.to_bytes(4, "big") * (num_bytes // 4 + 1))[:num_bytes]
