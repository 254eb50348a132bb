"""What a worker takes from the machine it runs on: time, connections, threads, shared memory.

The simulator has a machine of its own, and runs the same worker on it. Never: state of a worker.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

import grpc

from services.core.clock import Clock, MonotonicClock
from services.engine.pinning import pin
from services.kvtransfer.memory import BlockMemory
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.transports.shm_mapping import MappingCache
from services.kvtransfer.transports.staging import StagingArea
from services.rpc.channels import dial


class Machine:
    def __init__(self) -> None:
        self.clock: Clock = MonotonicClock()

    def dial(self, address: str) -> grpc.aio.Channel:
        return dial(address)

    def thread(self, name: str) -> Executor:
        """One thread of its own, for whoever moves KV bytes; they shut it down."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def share(self, memory: BlockMemory, incarnation: int, path: str | None) -> ShmServer:
        return ShmServer(memory, incarnation, path)

    def staging_area(self, num_slots: int, block_bytes: int, device: str) -> StagingArea:
        """Host memory for copies of blocks of a pool on `device`; they close it."""
        area = StagingArea(num_slots, block_bytes)
        if device.startswith("cuda"):
            with area.bytes as memory:
                area.before_close = pin(memory)
        return area

    def mappings(self, block_bytes: int) -> MappingCache:
        return MappingCache(block_bytes)
