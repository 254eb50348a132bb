"""Keeps blocks in one file of fixed slots, which outlives the process.

Each slot has a label in its first page and the block behind it. The index is in memory only and made anew by reading
the labels; whether a block is whole is found when it is read, by its checksum.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor

from services.core.daemon_threads import DaemonThreads
from services.core.hashing import BlockHash
from services.kv.eviction import EvictionOrder
from services.kv.regions import Buffer
from services.kv.s3_fifo import S3Fifo
from services.kv.tier_index import TierIndex
from services.kvtransfer.tiers.entry import LABEL_BYTES, Label, fingerprint_bytes, unpack_label
from services.kvtransfer.tiers.slot_file import PAGE_BYTES, SlotFile, page_aligned, pages
from services.kvtransfer.tiers.tier import BlockTarget, TierFailed, TierFull

log = logging.getLogger(__name__)

_NUM_READERS = 4
"""Reads at once: a disk is faster with some, and one block is checked and copied while another is read."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def slot_bytes_for(block_bytes: int) -> int:
    """Returns the bytes of a slot: a page for the label, and the block in whole pages."""
    return PAGE_BYTES + pages(block_bytes)


class DiskTier:
    """Keeps blocks in a `SlotFile`. Nothing that a slot says is believed without its checksums.

    A slot that is being written is in the index under no hash. Reads hold no lock: a slot may be overwritten while it
    is read, and is then found to hold another block, or none.
    """

    name = "disk"

    def __init__(
        self,
        file: SlotFile,
        fingerprint: str,
        block_bytes: int,
        num_bytes: int,
        order: EvictionOrder | None = None,
        readers: Executor | None = None,
    ) -> None:
        """Makes the tier over a file of the layout's slots, of which it uses as many as `num_bytes` hold. It closes the
        file. What the file holds is found by `load`. `readers` has the threads of single blocks, and is shut down with
        this; by default they are a few."""
        assert file.slot_bytes == slot_bytes_for(block_bytes), "a file of slots for this layout"
        self._file = file
        self._fingerprint = fingerprint_bytes(fingerprint)
        self._block_bytes = block_bytes
        self._index = TierIndex(num_bytes // file.slot_bytes, order if order is not None else S3Fifo())
        self._lock = threading.Lock()
        """Guards the index and the number, never I/O."""
        self._number = 0
        """The number of the newest label."""
        self._loading = True
        self._closed = False
        self._readers = readers or DaemonThreads(_NUM_READERS, "kv-disk")
        self._buffers = threading.local()
        self.num_corrupt = 0
        """Blocks that were not what their labels said."""

    @property
    def num_slots(self) -> int:
        return self._index.num_slots

    @property
    def num_bytes(self) -> int:
        return len(self._index) * self._file.slot_bytes

    def load(self) -> None:
        """Makes the index of what the file holds, and cuts off what it must not hold. Call it once, on a thread of its
        own. Before it has ended, no block is found or written. Raises TierFailed."""
        found: list[tuple[int, int, BlockHash]] = []
        page = page_aligned(PAGE_BYTES)
        try:
            for slot in range(self._file.cut(self._index.num_slots)):
                if self._closed:
                    return
                label = unpack_label(page) if self._file.read(slot, page) == PAGE_BYTES else None
                if label is None or (label.fingerprint, label.num_bytes) != (self._fingerprint, self._block_bytes):
                    continue
                found.append((label.number, slot, label.hash))
        except OSError as error:
            raise TierFailed(f"its file cannot be read: {error}") from error
        newest = {hash: (number, slot) for number, slot, hash in sorted(found)}  # of two with one block, the later
        with self._lock:
            num_blocks = self._index.restore((slot, hash) for hash, (_, slot) in newest.items())
            self._number = max((number for number, _, _ in found), default=0)
            self._loading = False
        log.info("the disk tier has %d blocks of an earlier run", num_blocks)

    def follow(self, on_store: Callable[[BlockHash], None], on_remove: Callable[[BlockHash], None]) -> None:
        with self._lock:
            self._index.follow(on_store, on_remove)

    def held(self) -> Iterator[BlockHash]:
        with self._lock:
            return iter(list(self._index.held()))

    def num_held(self, hashes: Sequence[BlockHash]) -> int:
        if self._loading:
            return 0  # without the lock: it is held while the index of a large file is made, and the event loop asks
        with self._lock:
            return self._index.num_held(hashes)

    def read(self, hashes: Sequence[BlockHash], memory: BlockTarget, targets: Sequence[int]) -> int:
        # All reads are awaited before any is judged: none may write to the memory afterwards.
        stop = threading.Event()
        reads = [
            self._readers.submit(self._read, hash, memory, target, stop)
            for hash, target in zip(hashes, targets, strict=True)
        ]
        errors = [read.exception() for read in reads]
        for number, error in enumerate(errors):
            if isinstance(error, OSError):
                raise TierFailed(f"it cannot be read: {error}") from error
            if error is not None:
                raise error
            if not reads[number].result():
                return number
        return len(reads)

    def write(self, hashes: Sequence[BlockHash], blocks: Sequence[Buffer]) -> None:
        buffer = self._buffer()
        for hash, block in zip(hashes, blocks, strict=True):
            assert memoryview(block).nbytes == self._block_bytes, "a block of this layout"
            with self._lock:
                if self._loading or hash in self._index or (slot := self._index.take()) is None:
                    continue
                self._number += 1
                number = self._number
            try:
                data = buffer[PAGE_BYTES : PAGE_BYTES + self._block_bytes]
                data[:] = memoryview(block).cast("B")
                buffer[:LABEL_BYTES] = Label.of(self._fingerprint, hash, data, number).pack()
                self._file.write(slot, buffer)
            except OSError as error:
                with self._lock:
                    self._index.give_back(slot)
                kind = TierFull if error.errno in _FULL else TierFailed
                raise kind(f"it cannot be written: {error}") from error
            with self._lock:
                self._index.put(slot, hash)

    def close(self) -> None:
        """Closes the file once no read is under way."""
        self._closed = True
        self._readers.shutdown()
        self._file.close()

    def _read(self, hash: BlockHash, memory: BlockTarget, target: int, stop: threading.Event) -> bool:
        """Reads one block; returns whether it is in place. Once a block before it failed, it is not tried."""
        if stop.is_set():
            return False
        with self._lock:
            slot = self._index.find(hash)
        if slot is None:
            stop.set()
            return False
        try:
            buffer = self._buffer()
            whole = self._file.read(slot, buffer) == len(buffer)
            block = buffer[PAGE_BYTES : PAGE_BYTES + self._block_bytes]
            label = unpack_label(buffer) if whole else None
            if label is None or not label.fits(self._fingerprint, hash, block):
                self._drop(slot, hash)
                stop.set()
                return False
            memory.write_blocks([target], [block])
        except BaseException:
            stop.set()
            raise
        return True

    def _drop(self, slot: int, hash: BlockHash) -> None:
        """Removes a block that was not found in its slot, unless the slot was given to another meanwhile."""
        with self._lock:
            if self._index.is_in(slot, hash):
                self.num_corrupt += 1
                self._index.drop(slot, hash)

    def _buffer(self) -> memoryview:
        """Returns this thread's memory of one slot."""
        buffer: memoryview | None = getattr(self._buffers, "slot", None)
        if buffer is None:
            buffer = self._buffers.slot = page_aligned(self._file.slot_bytes)
        return buffer
