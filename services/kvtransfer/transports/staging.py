"""Shares a pool that no peer can map, such as one on a GPU: it copies blocks into slots of host memory.

Owns: the slots' memory, and the copies into it. The slots are announced, and a destination maps them as it would map a
pool. Never: which fetch has a slot (`services.kv.slots`), the copies out of the slots, the pool.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from baton.v1 import kvtransfer_pb2
from services.core.clock import Clock
from services.core.sealed_memory import SealedMemory
from services.kv.lease import FetchTicket, Lease
from services.kv.regions import BlockMemory, Buffer, Region
from services.kv.slots import SlotTable
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.checksums import checksums_of
from services.kvtransfer.transports.shm import MESSAGE_BYTES

_FEWEST_SLOTS = 4
_MESSAGES_AT_ONCE = 4
"""The slots are enough for at least this many messages: one is filled while another is copied, and several fetches get
their share."""


def num_slots_for(memory: BlockMemory, num_bytes: int) -> int:
    """Returns how many slots `num_bytes` can hold, but at least `_FEWEST_SLOTS`, and at most as many as `memory` has
    blocks."""
    return min(memory.num_blocks, max(_FEWEST_SLOTS, num_bytes // memory.block_bytes))


class StagingArea:
    """Has a memfd of slots, as a `BlockMemory`. A page takes memory when it is first written."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_blocks = num_slots
        self.block_bytes = block_bytes
        self.before_close: Callable[[], None] = lambda: None
        self._memory = SealedMemory("baton-staging", num_slots * block_bytes)
        self._map = self._memory.map
        self._closed = False
        self.whole = Region(self._memory.address, num_slots * block_bytes, "cpu")
        """The region of all slots."""

    @property
    def fd(self) -> int | None:
        """Returns the memfd; None if it cannot be sealed, and after `close`."""
        return self._memory.fd

    @property
    def bytes(self) -> memoryview:
        """Returns a view of all slots. No view may be left at `close`."""
        return memoryview(self._map)

    def region(self, block_id: int) -> Region:
        return self.whole.part(block_id * self.block_bytes, self.block_bytes)

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self.slot(block_id).toreadonly() for block_id in block_ids]

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            target[:] = self.slot(block_id)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        for block_id, each in zip(block_ids, data, strict=True):
            with self.slot(block_id) as block:
                block[:] = each

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        with contextlib.ExitStack() as views:
            fill([views.enter_context(self.slot(block_id)) for block_id in block_ids])

    def slot(self, number: int) -> memoryview:
        return self.bytes[number * self.block_bytes : (number + 1) * self.block_bytes]

    def close(self) -> None:
        """Frees the memory. To be called when no copy is under way any more; peers keep what they have mapped."""
        if not self._closed:
            self._closed = True
            self.before_close()
            self._map.release()
            self._memory.close()


class Staging:
    """Drives the slot table by the changes of leases, on the event loop."""

    def __init__(self, memory: BlockMemory, area: StagingArea, board: LeaseBoard, clock: Clock) -> None:
        self.slots = SlotTable(area.num_blocks)
        self.slots_per_message = max(1, min(MESSAGE_BYTES // area.block_bytes, area.num_blocks // _MESSAGES_AT_ONCE))
        self._memory = memory
        self.area = area
        self._board = board
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        board.on_change = self._changed

    def announcer(self, ticket: FetchTicket, reader: Executor, *, checksums: bool) -> StagingAnnouncer:
        return StagingAnnouncer(self, ticket, reader, checksums=checksums)

    def take(self, ticket: FetchTicket, first_block: int, num_blocks: int) -> tuple[int, ...]:
        """Takes slots for one message; returns none if the fetch must wait.

        If there are no others, it takes back those of a lease whose fetch is over: that leg is refused from then on.
        """
        num_blocks = min(num_blocks, self.slots_per_message)
        slots = self.slots.take(ticket, first_block, num_blocks)
        if not slots and self.slots.next_in_line() is ticket:
            lease = self.slots.abandoned()
            assert lease is not None, "its turn, and neither a free slot nor one to take back"
            self._board.table.fence(lease, self._clock.now())
            assert self.slots.num_free, "a leg was fenced, and its slots are still kept"
            if ticket.ended is None:  # this fetch may be one of the fenced leg
                slots = self.slots.take(ticket, first_block, num_blocks)
        self._wake_next()
        return slots

    def fill(self, slots: Sequence[int], pool_blocks: Sequence[int], checksums: bool) -> list[int]:
        """Copies blocks into the slots, on the reader's thread. Returns the slots' checksums, if wanted, else []."""
        with contextlib.ExitStack() as views:
            self._memory.copy_blocks(pool_blocks, [views.enter_context(self.area.slot(slot)) for slot in slots])
        return checksums_of(self.area, slots) if checksums else []

    def filled(self, ticket: FetchTicket, slots: Sequence[int]) -> None:
        """Notes that a copy has ended. Called on the reader's thread, or where a copy was cancelled before it began."""
        self._loop.call_soon_threadsafe(self._filled, ticket, slots)

    def _filled(self, ticket: FetchTicket, slots: Sequence[int]) -> None:
        self.slots.written(ticket, slots)
        self._wake_next()

    def _changed(self, lease: Lease) -> None:
        self.slots.settle(lease)
        self._wake_next()

    def _wake_next(self) -> None:
        if (ticket := self.slots.next_in_line()) is not None:
            self._board.wake(ticket.lease)


class StagingAnnouncer:
    def __init__(self, staging: Staging, ticket: FetchTicket, reader: Executor, *, checksums: bool) -> None:
        self._staging = staging
        self._ticket = ticket
        self._reader = reader
        self._checksums = checksums
        self._slots: tuple[int, ...] = ()

    def room(self, first_block: int, num_blocks: int) -> int:
        self._slots = self._staging.take(self._ticket, first_block, num_blocks)
        return len(self._slots)

    async def announce(self, first_block: int, pool_blocks: Sequence[int]) -> kvtransfer_pb2.FetchBlocks:
        ticket, slots = self._ticket, self._slots
        copy = self._reader.submit(self._staging.fill, slots, pool_blocks, self._checksums)
        # Cancelling the wait does not stop the copy: the slots count as being written until the thread is done.
        copy.add_done_callback(lambda _: self._staging.filled(ticket, slots))
        checksums = await asyncio.wrap_future(copy)
        return kvtransfer_pb2.FetchBlocks(first_block=first_block, pool_blocks=slots, checksums=checksums)
