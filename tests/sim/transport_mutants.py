"""Plants deliberate bugs in tcp, at the source and where what it sends is written, and in NIXL's one-sided reads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Any

from services.core.errors import TransferFailed
from services.kv.imports import Import
from services.kv.regions import Region
from services.kvtransfer.client import BlockFetcher
from services.kvtransfer.transports.nixl import Card, NixlCopier
from services.kvtransfer.transports.tcp_source import TcpAnnouncer, TcpSource
from tests.sim.mutation import Bug, Mutant, replaced

# The source.


def answers_for_another_fetch() -> Bug:
    def find(self: TcpSource, lease_id: bytes, leg: int) -> TcpAnnouncer | None:
        return next(reversed(self._fetches.values()), None)

    return replaced(TcpSource, "_find", find)


def counts_blocks_from_the_prompts_first() -> Bug:
    def blocks(self: TcpAnnouncer, first_block: int, num_blocks: int) -> list[int] | None:
        return self._announced[first_block : first_block + num_blocks]

    return replaced(TcpAnnouncer, "blocks", blocks)


def serves_a_fetch_that_is_over() -> Bug:
    return replaced(TcpAnnouncer, "over", property(lambda self: False))


# The destination.


def frees_blocks_that_a_socket_still_fills() -> Bug:
    """Whoever waits for a copy is told that it is over when he gives it up, and not when its thread is done."""

    def copy(
        self: BlockFetcher, import_: Import, copier: Any, message: Any, targets: Sequence[int]
    ) -> asyncio.Future[None]:
        self._imports.copy_started(import_)
        copier.pin()
        threads = copier.threads or self._copy_threads
        future = asyncio.wrap_future(threads.submit(self._write, copier, message, targets))
        future.add_done_callback(lambda _: self._copy_ended(import_, copier))
        return future

    return replaced(BlockFetcher, "_copy", copy)


# One-sided reads.


def reads_the_block_after_the_announced_one() -> Bug:
    def block(self: Card, block_id: int) -> Region:
        return self.pool.part((block_id + 1) % self.num_blocks * self.block_bytes, self.block_bytes)

    return replaced(Card, "block", block)


def takes_a_read_that_failed_for_whole() -> Bug:
    copy = NixlCopier.copy

    def copy_or_not(self: NixlCopier, *arguments: Any) -> None:
        with contextlib.suppress(TransferFailed):
            copy(self, *arguments)

    return replaced(NixlCopier, "copy", copy_or_not)


def goes_on_before_a_read_is_over() -> Bug:
    copy = NixlCopier.copy

    def begin(self: NixlCopier, *arguments: Any) -> None:
        self.threads.submit(copy, self, *arguments)

    return replaced(NixlCopier, "copy", begin)


OF_SOCKETS: list[Mutant] = [
    answers_for_another_fetch,
    counts_blocks_from_the_prompts_first,
    serves_a_fetch_that_is_over,
    frees_blocks_that_a_socket_still_fills,
]
OF_ONE_SIDED_READS: list[Mutant] = [
    reads_the_block_after_the_announced_one,
    takes_a_read_that_failed_for_whole,
    goes_on_before_a_read_is_over,
]
MUTANTS = [*OF_SOCKETS, *OF_ONE_SIDED_READS]
