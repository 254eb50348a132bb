"""Keeps a worker's KV memory: every slot remembers what it was computed from, and every write of a
live node is checked against the pool.

Owns: the bytes. Never: references; it asks the pool who may write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from services.core.hashing import BlockHash
from services.engine.schedule.sequence import BlockCopy
from services.kv.pool import BlockPool, Holder, IndexListener
from services.kv.regions import Buffer, Region
from services.kvtransfer.transports.shm_source import ShmSource
from services.kvtransfer.transports.staging import Staging, StagingArea
from services.worker.host import WorkerHost
from tests.sim import strand
from tests.sim.model import SLOT_BYTES, Truth, digest_in
from tests.sim.node import Node

_SLOWEST_COPY_S = 0.1
"""Of half of a block, to a tier."""


def _ignore(hash: BlockHash, block_id: int) -> None:
    pass


class SimStagingArea(StagingArea):
    """Slots in memory that every node can see."""

    def __init__(self, num_slots: int, block_bytes: int) -> None:
        self.num_blocks = num_slots
        self.block_bytes = block_bytes
        self.store = bytearray(num_slots * block_bytes)
        self.whole = Region(0, len(self.store), "sim")

    @property
    def fd(self) -> int | None:
        """0 is "can be mapped"."""
        return 0

    @property
    def bytes(self) -> memoryview:
        return memoryview(self.store)

    def close(self) -> None:
        pass


def staging_of(host: WorkerHost) -> Staging | None:
    """Returns the staging of a pool that cannot be mapped; None for any other."""
    return next((end.staging for end in host.transfer.sources if isinstance(end, ShmSource)), None)


class SimMemory:
    """Stands for `KVCache`; a `BlockMemory`. Its bytes outlive the process, as a mapped memfd does."""

    def __init__(
        self, node: Node, num_blocks: int, block_size: int, truth: Truth, weights: str, *, mappable: bool = True
    ) -> None:
        self.fd: int | None = 0 if mappable else None
        """0 is "can be mapped": `SimMachine.share` does the rest."""
        self.num_blocks = num_blocks
        self.block_bytes = block_size * SLOT_BYTES
        self.bytes = bytearray(num_blocks * self.block_bytes)
        self._block_size = block_size
        self._node = node
        self._truth = truth
        self._weights = weights
        self._pool: BlockPool
        self._tell: IndexListener
        self._copied: Counter[int] = Counter()
        """How often the running step has copied each block."""
        self.num_bits_to_flip = 0
        """In so many copies, on their way into this memory."""

    def watch(self, pool: BlockPool, *, tells: bool = False) -> None:
        """Checks what is indexed. Only with `tells` do routers hear of single blocks, and not just of all at once."""
        self._pool = pool
        self._tell = pool._on_index if tells else _ignore
        pool._on_index = self._indexed

    @property
    def pool(self) -> BlockPool:
        return self._pool

    def close(self) -> None:
        pass

    # As BlockMemory: copies.

    def region(self, block_id: int) -> Region:
        """Returns where the block lies, in a machine whose memory this is."""
        return Region(block_id * self.block_bytes, self.block_bytes, "sim")

    def read_blocks(self, block_ids: Sequence[int]) -> list[memoryview]:
        return [self._view(block_id) for block_id in block_ids]

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        for block_id, target in zip(block_ids, targets, strict=True):
            if not strand.is_on_strand():
                target[:] = self._view(block_id)
                continue
            for half in (slice(self.block_bytes // 2), slice(self.block_bytes // 2, None)):  # steps go on meanwhile
                target[half] = self._view(block_id)[half]
                strand.wait(self._node.world.random.random() ** 3 * _SLOWEST_COPY_S)

    def write_blocks(self, block_ids: Sequence[int], data: Sequence[Buffer]) -> None:
        for block_id, each in zip(block_ids, data, strict=True):
            self._write_block(block_id, each)

    def fill_blocks(self, block_ids: Sequence[int], fill: Callable[[Sequence[memoryview]], None]) -> None:
        if not strand.is_on_strand():
            arrived = [bytearray(self.block_bytes) for _ in block_ids]
            fill([memoryview(block) for block in arrived])
            self.write_blocks(block_ids, arrived)
            return
        try:
            fill([self._view(block_id) for block_id in block_ids])  # steps go on meanwhile
        finally:
            self.require_imported(block_ids)
        self._flip_bits(block_ids)

    def _write_block(self, block_id: int, data: Buffer) -> None:
        self._require_writable(block_id, Holder.IMPORT)
        self._view(block_id)[:] = data
        self._flip_bits([block_id])

    def _flip_bits(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids[: self.num_bits_to_flip]:
            self.num_bits_to_flip -= 1
            self._node.world.note("bit flipped", self._node.name, block_id)
            self._view(block_id)[self._node.world.random.randrange(self.block_bytes)] ^= 1

    # As the model sees it: steps.

    def duplicate(self, copies: Sequence[BlockCopy]) -> None:
        """Copies blocks within the pool, before a step computes. Nobody else may write the targets, or have freed the
        sources."""
        self._copied = Counter(copy.source for copy in copies)
        for copy in copies:
            held = self._pool.references(Holder.SEQUENCE, copy.source) >= self._copied[copy.source]
            self._node.world.require(held or not self._node.alive, f"{self._node.name}: {copy} of a block nobody holds")
            self._require_writable(copy.target, Holder.SEQUENCE)
            self._view(copy.target)[:] = self._view(copy.source)

    def read_slots(self, block_ids: Sequence[int], num_tokens: int) -> bytes:
        kv = b"".join([self._view(block_id) for block_id in block_ids])
        return kv[: num_tokens * SLOT_BYTES]

    def digest_at(self, block_ids: Sequence[int], position: int) -> int:
        start = block_ids[position // self._block_size] * self.block_bytes + self._offset(position)
        return digest_in(self.bytes[start : start + SLOT_BYTES])

    def write_slots(self, block_ids: Sequence[int], start: int, kv: bytes) -> None:
        """Writes the KV of the tokens at positions start, start + 1 and so on."""
        num_tokens = len(kv) // SLOT_BYTES
        for block_id in block_ids[start // self._block_size :]:
            self._require_writable(block_id, Holder.SEQUENCE)
        for at in range(num_tokens):
            position = start + at
            target = block_ids[position // self._block_size] * self.block_bytes + self._offset(position)
            self.bytes[target : target + SLOT_BYTES] = kv[at * SLOT_BYTES : (at + 1) * SLOT_BYTES]

    # Checks.

    def require_imported(self, block_ids: Sequence[int]) -> None:
        """Requires that an import alone holds the blocks: something has written to them until now."""
        for block_id in block_ids:
            self._require_writable(block_id, Holder.IMPORT)

    def _require_writable(self, block_id: int, writer: Holder) -> None:
        """Requires that a block has one holder of the writer's kind and nobody else; a prompt's block is leased too
        while it is computed."""
        pool, world = self._pool, self._node.world
        if not self._node.alive:
            return
        holders = [pool.references(holder, block_id) for holder in Holder]
        most = [0, 1, 0] if writer is Holder.SEQUENCE else [0, 0, 0]
        if writer is Holder.SEQUENCE:  # beside its own, those held for copies that the step has made before
            holders[writer] -= self._copied[block_id]
        most[writer] = 1
        lawful = holders[writer] == 1 and all(have <= may for have, may in zip(holders, most, strict=True))
        world.require(lawful, f"{self._node.name}: {writer.name} writes block {block_id} held by {holders}")
        world.require(
            pool._hash_of[block_id] is None, f"{self._node.name}: {writer.name} writes indexed block {block_id}"
        )

    def _indexed(self, hash: BlockHash, block_id: int) -> None:
        self._tell(hash, block_id)
        right = self._truth.may_hold(self._weights, hash, self._view(block_id))
        self._node.world.require(right or not self._node.alive, f"{self._node.name}: block {block_id} indexed wrongly")

    def _view(self, block_id: int) -> memoryview:
        start = block_id * self.block_bytes
        return memoryview(self.bytes)[start : start + self.block_bytes]

    def _offset(self, position: int) -> int:
        return position % self._block_size * SLOT_BYTES
