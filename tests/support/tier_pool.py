"""Makes a pool with tiers below it, whose copies and whose disk wait as they are told."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

from services.engine.config import EngineInfo
from services.kv.handoff_admission import EngineRoom
from services.kvtransfer.tiers.host import HostTier
from services.kvtransfer.transports.staging import StagingArea
from services.store.engine import StoreEngine
from services.worker.machine import Machine
from services.worker.tiers import WorkerTiers
from tests.support.tiers import BLOCK_BYTES, blocks_of, faulty_disk, hashes_of
from tests.support.workers import until

NUM_BLOCKS = 16


class HeldArea(StagingArea):
    """Is a pool's memory whose copies out wait until they may go on."""

    def __init__(self) -> None:
        super().__init__(NUM_BLOCKS, BLOCK_BYTES)
        self.copying = threading.Event()
        self.may_copy = threading.Event()
        self.may_copy.set()

    def copy_blocks(self, block_ids: Sequence[int], targets: Sequence[memoryview]) -> None:
        self.copying.set()
        assert self.may_copy.wait(20)
        super().copy_blocks(block_ids, targets)


class Pool:
    """Has a pool over a host tier of eight blocks and a disk tier of sixty-four."""

    def __init__(self, folder: Path) -> None:
        info = EngineInfo(
            model_id="m",
            weights_digest="w",
            config_digest="c",
            numerics="n",
            dtype="float32",
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            block_size=16,
            num_blocks=NUM_BLOCKS,
            max_model_len=256,
            vocab_size=10,
            eos_token_ids=(),
            device="cpu",
        )
        self.memory = HeldArea()
        self.engine = StoreEngine(info, self.memory)
        self.host = HostTier(BLOCK_BYTES, 8 * BLOCK_BYTES)
        self.disk, self.file = faulty_disk(folder / "a.kv", 64)
        self.defects: list[Exception] = []
        self.tiers = WorkerTiers(
            [self.host, self.disk],
            self.engine,
            Machine(""),
            asyncio.get_running_loop().call_later,
            self.defects.append,
        )

    def cache(self, *numbers: int) -> None:
        """Puts these blocks into the pool's prefix cache, each as a prefix of its own."""
        for number in numbers:
            reservation = self.engine.reserve_prefix(hashes_of([number]), any_room)
            self.memory.write_blocks(reservation.fresh, blocks_of([number])[: len(reservation.fresh)])
            self.engine.keep_prefix(reservation, hashes_of([number]))

    async def demoted(self) -> None:
        """Waits until there is nothing more to copy."""
        self.tiers.demoter.stepped()
        await until(lambda: self.tiers.demoter.idle, "the copies have ended")

    def in_tiers(self) -> set[bytes]:
        return {*self.host.held(), *self.disk.held()}


def any_room(num_fresh: int, room: EngineRoom) -> None:
    pass
