"""How blocks travel. A transport has two ends: the source makes `FetchBlocks` messages, the destination turns each into
bytes of its own pool. Both run on copy threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from baton.v1 import kvtransfer_pb2, types_pb2
from services.kvtransfer.memory import BlockMemory


class Announcer(Protocol):
    """Source end, of one fetch."""

    blocks_per_message: int
    """Bounds a message, and with it what one copy at the destination takes."""
    reads_memory: bool
    """Whether `announce` must be kept off the event loop."""

    def announce(self, first_block: int, pool_blocks: Sequence[int]) -> kvtransfer_pb2.FetchBlocks:
        """`first_block`: index in the sequence of the first of `pool_blocks`."""
        ...


class Copier(Protocol):
    """Destination end, of one fetch."""

    transport: types_pb2.Transport

    def count(self, message: kvtransfer_pb2.FetchBlocks) -> int:
        """How many blocks it brings. ProtocolViolation unless they can be copied."""
        ...

    def copy(self, message: kvtransfer_pb2.FetchBlocks, memory: BlockMemory, targets: Sequence[int]) -> None:
        """Writes the message's blocks to `targets`, one each. Reads and writes nothing after it has returned."""
        ...

    def pin(self) -> None:
        """Keeps what the copies read from in place, until as many `unpin`. Event loop only."""
        ...

    def unpin(self) -> None: ...
