"""Copies blocks between a pool on a GPU and host memory, many at a time, beside the steps.

Copies need no synchronisation with steps: a block is announced only after the step that wrote it has completed on the
device, and no step reads an imported block before its copy has ended.
Owns: the streams of the copies, and page-locked memory through which blocks arrive. Never: which blocks may be written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from services.kv.regions import Buffer

_BATCH_BYTES = 4 << 20
"""Bytes that cross at once on their way into the pool. While one batch crosses, the next is put together."""
_NUM_STAGINGS = 2


class CopyStream(Protocol):
    """Is a queue of work of a device, which runs beside that of other streams."""

    def queueing(self) -> AbstractContextManager[object]:
        """Returns a context in which this thread's work for the device goes to this stream."""
        ...

    def mark(self) -> Callable[[], None]:
        """Records an event behind all that was queued, and returns a function that waits until it has happened."""
        ...


class CudaStream:
    """Implements `CopyStream`."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def queueing(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def mark(self) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(self._stream)
        return event.synchronize


@dataclass(frozen=True, slots=True)
class _Staging:
    """Has the memory of one batch on its way into the pool: [blocks of a batch, elements of a block] twice, and the
    batch's block ids, [blocks of a batch], twice."""

    host: Tensor
    device: Tensor
    host_ids: Tensor
    device_ids: Tensor


class DeviceCopies:
    """Copies blocks of one pool. Any thread may call it."""

    def __init__(self, blocks: Tensor, make_stream: Callable[[torch.device], CopyStream] = CudaStream) -> None:
        """Allocates the stagings. `blocks` is the pool: [num_blocks, block_bytes] uint8."""
        self._blocks = blocks
        num_blocks, block_bytes = blocks.shape
        self._block_bytes = block_bytes
        # Kernels that move elements of eight bytes are faster than those that move single bytes.
        self._elements = blocks.view(torch.int64) if block_bytes % 8 == 0 else blocks
        self._batch = min(num_blocks, max(1, _BATCH_BYTES // block_bytes))
        self._on_device = blocks.device.type != "cpu"
        self._outward, self._inward = make_stream(blocks.device), make_stream(blocks.device)
        self._writing = threading.Lock()
        """Held by the thread whose blocks are in the stagings."""
        self._stagings = [self._make_staging() for _ in range(_NUM_STAGINGS)]

    def _make_staging(self) -> _Staging:
        size, dtype = (self._batch, self._elements.shape[1]), self._elements.dtype
        return _Staging(
            host=torch.empty(size, dtype=dtype, pin_memory=self._on_device),
            device=torch.empty(size, dtype=dtype, device=self._blocks.device),
            host_ids=torch.empty(self._batch, dtype=torch.int64, pin_memory=self._on_device),
            device_ids=torch.empty(self._batch, dtype=torch.int64, device=self._blocks.device),
        )

    def read(self, block_ids: Sequence[int]) -> list[memoryview]:
        """Returns the bytes of the blocks, in page-locked memory."""
        size = (len(block_ids), self._block_bytes)
        rows = torch.empty(size, dtype=torch.uint8, pin_memory=self._on_device).numpy()
        self.copy(block_ids, [row.data for row in rows])
        return [row.data.toreadonly() for row in rows]

    def copy(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        """Copies the bytes of each block to one of the targets, and returns when all are there.

        All are queued at once where the targets are page-locked. They go there directly, since blocks and targets need
        not lie side by side, and to gather them first would be one copy more.
        """
        try:
            with self._outward.queueing():
                for block_id, target in zip(block_ids, targets, strict=True):
                    torch.frombuffer(target, dtype=torch.uint8).copy_(self._blocks[block_id], non_blocking=True)
        finally:
            self._outward.mark()()

    def write(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        """Replaces the bytes of the blocks, and returns when they are in the pool; also when it raises, nothing writes
        to the pool any more."""
        assert len(block_ids) == len(data), "one source for each block"
        with self._writing:
            waits: list[Callable[[], None]] = [_nothing] * _NUM_STAGINGS
            try:
                for number, start in enumerate(range(0, len(block_ids), self._batch)):
                    place, batch = number % _NUM_STAGINGS, slice(start, start + self._batch)
                    waits[place]()  # an earlier batch may still leave this memory
                    waits[place] = self._send(block_ids[batch], data[batch], self._stagings[place])
            finally:
                for wait in waits:
                    wait()

    def _send(self, block_ids: Sequence[int], data: Sequence[Buffer], staging: _Staging) -> Callable[[], None]:
        """Queues the copies of one batch, and returns a function that waits for their end."""
        count = len(block_ids)
        rows = staging.host.view(torch.uint8).numpy()
        for row, block in zip(rows, data, strict=False):
            row[:] = np.frombuffer(block, np.uint8)
        staging.host_ids.numpy()[:count] = block_ids
        try:
            with self._inward.queueing():
                staging.device_ids[:count].copy_(staging.host_ids[:count], non_blocking=True)
                staging.device[:count].copy_(staging.host[:count], non_blocking=True)
                self._elements.index_copy_(0, staging.device_ids[:count], staging.device[:count])
        except BaseException:
            self._inward.mark()()
            raise
        return self._inward.mark()


def _nothing() -> None:
    """Waits for nothing: no batch was sent."""
