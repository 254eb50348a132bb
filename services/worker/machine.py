"""Gives a worker what it takes from the machine it runs on: time, connections, threads, shared memory.

The simulator has a machine of its own, and runs the same worker on it. Never: state of a worker.
"""

from __future__ import annotations

from concurrent.futures import Executor, ThreadPoolExecutor

import grpc

from services.core.clock import Clock, MonotonicClock
from services.core.timeouts import AwakeClock
from services.kv.regions import BlockMemory
from services.kvtransfer.transports.shm import ShmServer
from services.kvtransfer.transports.shm_mapping import MappingCache
from services.kvtransfer.transports.staging import StagingArea
from services.rpc.channels import dial


class Machine:
    def __init__(self, token: str, clock: Clock | None = None) -> None:
        """`token` is the cluster token, for every connection that this worker dials."""
        self._token = token
        self.clock: Clock = clock or MonotonicClock()
        self.awake = AwakeClock(self.clock)
        """The clock of awake time, by which peers are judged."""

    def dial(self, address: str) -> grpc.aio.Channel:
        return dial(address, self._token)

    def thread(self, name: str) -> Executor:
        """Returns an executor with one thread, for work that would hold up the event loop. The caller shuts it down."""
        return ThreadPoolExecutor(1, thread_name_prefix=name)

    def share(self, memory: BlockMemory, incarnation: int, path: str | None) -> ShmServer:
        return ShmServer(memory, incarnation, path)

    def staging_area(self, num_slots: int, block_bytes: int, device: str) -> StagingArea:
        """Returns host memory for copies of blocks of a pool on `device`. The caller closes it."""
        area = StagingArea(num_slots, block_bytes)
        if device.startswith("cuda"):
            from services.engine.cpu.pinning import pin  # torch: only where there is a GPU

            area.before_close = pin(area.whole)
        return area

    def mappings(self, block_bytes: int) -> MappingCache:
        return MappingCache(block_bytes, clock=self.awake)
