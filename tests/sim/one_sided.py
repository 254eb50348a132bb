"""Simulates NIXL: one-sided reads of another process's pool, for which that process does nothing.

A read takes its bytes as they are in the moment in which they leave, whoever's they are by then, in parts, and writes
them straight into the reader's pool. Now and then one fails, as a fabric does, and ends its agent.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from baton.v1 import types_pb2
from services.core.clock import Clock
from services.core.errors import TransferFailed
from services.kv.regions import Region
from services.kvtransfer.transports import PROBE_BYTES
from services.kvtransfer.transports.nixl import Card, NixlDestination, NixlSource, Peer
from services.kvtransfer.transports.nixl_agent import NixlUnavailable
from tests.sim import strand
from tests.sim.memory import SimMemory
from tests.sim.network import Network
from tests.sim.node import Node

_FAILS = 0.02
"""Of all reads."""


class Fabric:
    """Keeps the pools that can be read, by the incarnations of their owners."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.pools: dict[int, SimNixlSource] = {}
        self.choose = random.Random(f"reads of {network.world.seed}")


class SimNixlSource(NixlSource):
    def __init__(self, fabric: Fabric, node: Node, memory: SimMemory, reader: Executor, incarnation: int) -> None:
        self._memory = memory
        self._reader = reader
        self.node = node
        self.memory = memory
        self._fabric = fabric
        self._incarnation = incarnation
        pool = Region(0, memory.num_blocks * memory.block_bytes, "sim")
        card = Card(incarnation, Region(0, PROBE_BYTES, "cpu"), pool, memory.block_bytes, b"sim")
        self._offer = types_pb2.KVOffer(transport=self.transport, nixl_metadata=card.to_offer())
        fabric.pools[incarnation] = self
        node.on_death.append(self.close)

    def close(self) -> None:
        self._fabric.pools.pop(self._incarnation, None)


class SimNixlDestination(NixlDestination):
    """The real destination's end; only agents are simulated."""

    def __init__(
        self,
        fabric: Fabric,
        node: Node,
        memory: SimMemory,
        thread: Executor,
        clock: Clock,
        part_s: Callable[[], float],
    ) -> None:
        self.silence_s = 5.0
        self.threads = thread
        self._memory = memory
        self._clock = clock
        self._peers = {}
        self._meetings = {}
        self.agents = set()
        self._closed = False
        self._fabric = fabric
        self._node = node
        self._part_s = part_s

    async def probe(self, source: types_pb2.KVSource, offer: types_pb2.KVOffer) -> float:
        return 4e9

    def _greet(self, card: Card) -> Peer:
        assert isinstance(self._memory, SimMemory)
        agent: Any = SimAgent(self._fabric, self._node, self._memory, card.incarnation, self._part_s)
        self.agents.add(agent)
        strand.wait(self._part_s())
        if agent.source is None:
            self._end(agent)
            raise NixlUnavailable("NIXL does not reach the source")
        nothing: Any = None
        return Peer(card, agent, self._node.name, nothing)


class SimAgent:
    """Stands for a `NixlAgent` that reads."""

    def __init__(
        self, fabric: Fabric, node: Node, memory: SimMemory, incarnation: int, part_s: Callable[[], float]
    ) -> None:
        self.closed = False
        self.num_reads = 0
        self._fabric = fabric
        self._node = node
        self._memory = memory
        self._incarnation = incarnation
        self._part_s = part_s

    @property
    def source(self) -> SimNixlSource | None:
        """Returns the end that is read, if it can be reached; a process that is stopped is read all the same."""
        source = self._fabric.pools.get(self._incarnation)
        return None if source is None or self._fabric.network.is_cut(source.node, self._node) else source

    def read(
        self, peer: str, targets: Sequence[Region], sources: Sequence[Region], patience: Callable[[], float]
    ) -> None:
        self.num_reads += 1
        fails_at = self._fabric.choose.randrange(len(targets)) if self._fabric.choose.random() < _FAILS else None
        try:
            for place, (target, source) in enumerate(zip(targets, sources, strict=True)):
                self._move(target, source, fails=place == fails_at)
        except TransferFailed:
            self.close()
            raise
        finally:
            self.num_reads -= 1
            self._memory.require_imported([target.address // self._memory.block_bytes for target in targets])

    def _move(self, target: Region, source: Region, *, fails: bool) -> None:
        half = target.length // 2
        for start, end in ((0, half), (half, target.length)):
            strand.wait(self._part_s())
            if self.closed:
                raise TransferFailed("another read from this source has failed, and ended its agent")
            other = self.source
            if other is None or fails:
                raise TransferFailed("the read failed")
            data = other.memory.bytes[source.address + start : source.address + end]
            self._memory.bytes[target.address + start : target.address + end] = data

    def close(self) -> None:
        self.closed = True
