"""Stands for a worker's local disk, with one file of slots that outlives the process.

A slot is written in parts, in any order, and read in parts: what is killed in the midst leaves some of each. Owns: the
bytes, and how long they take. Never: what goes wrong when (`tier_faults`).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable

from services.kvtransfer.tiers.slot_file import PAGE_BYTES
from tests.sim import strand
from tests.sim.node import Node
from tests.sim.world import World

_SLOWEST_S = 0.02


class SimDisk:
    def __init__(self, world: World, name: str, block_bytes: int) -> None:
        self.world = world
        self.name = name
        self.slots: dict[int, bytearray] = {}
        self.doubtful: set[int] = set()
        """Slots that may hold anything: of which a write was begun and has not ended, and those that were harmed."""
        self.num_harms = 0
        self.on_write: Callable[[str], None] = lambda name: None
        """Called before each part of a slot is written."""
        self.is_full = False
        self.fails = False
        self.silent_until_s = 0.0
        self.num_astray = 0
        """So many reads of blocks get those of another slot, whole and with their labels."""
        half = PAGE_BYTES + block_bytes // 2
        self.parts = [(0, PAGE_BYTES), (PAGE_BYTES, half), (half, PAGE_BYTES + block_bytes)]
        """Those that matter: the label, and a block's halves."""

    def harm(self, slots: Iterable[int]) -> None:
        """Says that these slots were changed by no write. One that is under way does not mend them."""
        self.doubtful.update(slots)
        self.num_harms += 1

    def heal(self) -> None:
        """Works well from now on. What was harmed stays as it is."""
        self.is_full = self.fails = False
        self.silent_until_s = 0.0
        self.num_astray = 0
        self.on_write = lambda name: None

    def label(self, slot: int) -> bytes:
        return bytes(self.slots[slot][:PAGE_BYTES])

    def block(self, slot: int) -> bytes:
        return bytes(self.slots[slot][PAGE_BYTES : self.parts[-1][1]])

    def put(self, slot: int, label: bytes, block: bytes) -> None:
        """Has the slot hold that, as if it had been written long ago."""
        self.slots[slot] = bytearray(2 * PAGE_BYTES)
        self.slots[slot][: len(label)] = label
        self.slots[slot][PAGE_BYTES : PAGE_BYTES + len(block)] = block

    def read_from(self, slot: int) -> int:
        """Returns the slot that a read of a block gets."""
        others = [other for other in sorted(self.slots) if other != slot]
        if not self.num_astray or not others:
            return slot
        self.num_astray -= 1
        self.world.note("read astray", self.name, slot)
        return others[slot % len(others)]

    def take_time(self) -> None:
        if strand.is_on_strand():
            taken_s = self.world.random.random() ** 3 * _SLOWEST_S
            strand.wait(max(taken_s, self.silent_until_s - self.world.now_s))


class SimSlotFile:
    """Is a `SlotFile` on the disk, as one process has opened it."""

    def __init__(self, disk: SimDisk, node: Node) -> None:
        self.slot_bytes = 2 * PAGE_BYTES
        self._disk = disk
        self._node = node
        self._closed = False

    def cut(self, num_slots: int) -> int:
        self._use()
        self._disk.slots = {slot: data for slot, data in self._disk.slots.items() if slot < num_slots}
        return max(self._disk.slots, default=-1) + 1

    def read(self, slot: int, buffer: memoryview) -> int:
        disk = self._disk
        self._use()
        if slot not in disk.slots:
            return self.slot_bytes if slot < max(disk.slots, default=-1) else 0
        slot = disk.read_from(slot) if len(buffer) > PAGE_BYTES else slot
        for start, end in disk.parts:
            if start < len(buffer):
                buffer[start:end] = disk.slots[slot][start:end]
                self._use()
        return len(buffer)

    def write(self, slot: int, buffer: memoryview) -> None:
        disk = self._disk
        num_harms = disk.num_harms
        parts = disk.world.random.sample(disk.parts, len(disk.parts))
        held = disk.slots.setdefault(slot, bytearray(self.slot_bytes))
        for start, end in parts:
            disk.on_write(disk.name)
            self._use()
            if disk.is_full:
                raise OSError(errno.ENOSPC, "full")
            disk.doubtful.add(slot)
            held[start:end] = buffer[start:end]
        if disk.num_harms == num_harms:
            disk.doubtful.discard(slot)

    def close(self) -> None:
        self._closed = True

    def _use(self) -> None:
        self._disk.take_time()
        self._disk.world.require(not self._closed, f"{self._node.name}: its file is used after it was closed")
        if self._disk.fails:
            raise OSError(errno.EIO, "injected")


def inverted(block: bytes) -> bytes:
    """Returns what no block with that hash holds."""
    return bytes(byte ^ 0xFF for byte in block)
