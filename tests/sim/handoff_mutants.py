"""Plants deliberate bugs in the handoff: in leases at the source, and in imports at the destination."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from baton.v1 import kvtransfer_pb2, types_pb2, worker_pb2
from services.core.errors import LeaseInvalid
from services.core.hashing import block_hashes, num_blocks_for
from services.decode.import_intake import Held, ImportIntake
from services.engine.schedule.sequence import Admitted, Sequence
from services.kv.imports import Import, ImportState, ImportTable
from services.kv.layout import TORCH, Layout
from services.kv.lease import FetchEnd, FetchTicket, Lease, LeaseState
from services.kv.lease_table import LeaseTable, ReleaseAnswer
from services.kv.pool import Holder
from services.kv.slots import _Staged
from services.kvtransfer.board import LeaseBoard
from services.kvtransfer.client import BlockFetcher, FetchOrder
from services.kvtransfer.transports.shm_mapping import Mapping, MappingCache
from services.prefill.leg import PrefillLeg
from services.worker import transfer
from services.worker.host import WorkerHost
from tests.sim.mutation import Bug, Mutant, both, replaced

# The lease.


def uses_blocks_without_a_valid_release() -> Bug:
    async def release(self: BlockFetcher, order: FetchOrder, stub: Any) -> None:
        with contextlib.suppress(Exception):
            request = kvtransfer_pb2.ReleaseRequest(lease_id=order.lease_id, leg=order.leg)
            await stub.release(request, timeout=self._peers.silence_s)

    return replaced(BlockFetcher, "_release", release)


def frees_a_lease_twice() -> Bug:
    leave = LeaseTable._leave

    def leave_twice(self: LeaseTable, lease: Lease, to: LeaseState, why: FetchEnd, now: float) -> None:
        leave(self, lease, to, why, now)
        self._on_end(lease)

    return replaced(LeaseTable, "_leave", leave_twice)


def forgets_expiry_when_idle() -> Bug:
    return replaced(LeaseBoard, "_arm", lambda self, deadline_s: None)


def hands_a_lease_to_an_old_leg() -> Bug:
    """The leg is looked at neither by fetch nor by release, and one fetch goes on beside the other."""

    def open_fetch(self: LeaseTable, lease_id: bytes, leg: int, first_block: int, now: float) -> FetchTicket:
        lease = self._leases.get(lease_id)
        if lease is None:
            raise LeaseInvalid("unknown")
        lease.fetch = FetchTicket(lease, leg, first_block)
        self._changed(lease, now)
        return lease.fetch

    def release(self: LeaseTable, lease_id: bytes, leg: int, now: float) -> ReleaseAnswer:
        lease = self._leases.get(lease_id) or self._ended.get(lease_id)
        if lease is None or lease.state not in (LeaseState.SEALED, LeaseState.RELEASED):
            return ReleaseAnswer(False, "unknown")
        if lease.state is LeaseState.SEALED:
            lease.fetch = None  # whoever else fetches goes on
            self._leave(lease, LeaseState.RELEASED, FetchEnd.RELEASED, now)
        return ReleaseAnswer(True)

    return both(replaced(LeaseTable, "open_fetch", open_fetch), replaced(LeaseTable, "release", release))


def announces_blocks_before_they_are_computed() -> Bug:
    admitted = PrefillLeg._admitted

    def announce(self: PrefillLeg, event: Admitted) -> None:
        admitted(self, event)
        if self._lease is not None:
            self._host.leases.publish(self._lease.lease_id, self._lease.num_tokens, self._host.clock.now())

    return replaced(PrefillLeg, "_admitted", announce)


def announces_a_partial_block() -> Bug:
    def publish(self: LeaseTable, lease_id: bytes, num_computed_tokens: int, now: float) -> bool:
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.num_published = num_blocks_for(num_computed_tokens, self._block_size)
            self._changed(lease, now)
        return lease is not None

    return replaced(LeaseTable, "publish", publish)


def takes_every_block_for_one_of_four_tokens() -> Bug:
    """It is found only by clusters with other blocks."""

    def publish(self: LeaseTable, lease_id: bytes, num_computed_tokens: int, now: float) -> bool:
        lease = self._leases.get(lease_id)
        if lease is not None:
            lease.num_published = min(len(lease.block_ids), max(lease.num_published, num_computed_tokens // 4))
            self._changed(lease, now)
        return lease is not None

    return replaced(LeaseTable, "publish", publish)


def pairs_workers_with_other_blocks() -> Bug:
    """It is found only by clusters in which workers have different blocks."""
    fingerprint: Any = Layout.fingerprint
    return replaced(
        Layout, "fingerprint", property(lambda self: fingerprint.fget(dataclasses.replace(self, block_size=1)))
    )


def pairs_workers_of_other_engines() -> Bug:
    """It is found only by clusters of two engines whose digests are equal."""
    layout_of = transfer._layout
    return replaced(transfer, "_layout", lambda info: dataclasses.replace(layout_of(info), engine=TORCH))


# Staging slots.


def frees_slots_when_the_stream_ends() -> Bug:
    def needed(staged: _Staged) -> bool:
        return staged.writing or (staged.ticket.ended is None and staged.ticket.copied <= staged.block)

    return replaced(_Staged, "needed", property(needed))


def frees_slots_once_they_are_announced() -> Bug:
    def needed(staged: _Staged) -> bool:
        return staged.writing or (staged.ticket.releasable and staged.ticket.announced <= staged.block)

    return replaced(_Staged, "needed", property(needed))


def takes_slots_back_from_a_leg_that_may_release() -> Bug:
    def fence(self: LeaseTable, lease: Lease, now: float) -> None:
        lease.fenced = True
        self._changed(lease, now)
        lease.fenced = False

    return replaced(LeaseTable, "fence", fence)


# The import.


def frees_blocks_under_a_copy() -> Bug:
    def drain(self: ImportTable, import_: Import, now: float) -> bool:
        if import_.given_up or import_.state is ImportState.READY:
            return False
        import_.advance(ImportState.DRAINING, now)
        import_.advance(ImportState.FREED, now)
        del self._imports[import_]
        self._on_freed(import_)
        return True

    return replaced(ImportTable, "drain", drain)


def frees_an_import_twice() -> Bug:
    free = ImportTable._free_if_quiet

    def free_twice(self: ImportTable, import_: Import, now: float) -> None:
        free(self, import_, now)
        if import_.state is ImportState.FREED:
            self._on_freed(import_)

    return replaced(ImportTable, "_free_if_quiet", free_twice)


def indexes_an_import_before_it_is_valid() -> Bug:
    reserve = ImportIntake.reserve

    def reserve_and_index(self: ImportIntake, command: worker_pb2.DecodeCommand, sequence: Sequence) -> Held:
        held = reserve(self, command, sequence)
        engine: Any = self._host.engine
        pool = engine._pool
        hashes = block_hashes(command.token_ids, pool.block_size, command.cache_salt)[len(held.prefix) :]
        for block_id, hash in zip(held.block_ids, hashes, strict=False):
            pool.acquire([block_id], Holder.SEQUENCE)
            pool.index(block_id, hash)
            pool.release([block_id], Holder.SEQUENCE)
        return held

    return replaced(ImportIntake, "reserve", reserve_and_index)


def keeps_a_mapping_over_a_restart() -> Bug:
    get = MappingCache.get

    async def get_by_address(self: MappingCache, source: types_pb2.KVSource, name: str) -> Mapping:
        kept: dict[str, Mapping] = self.__dict__.setdefault("kept", {})
        if source.address not in kept:
            kept[source.address] = await get(self, source, name)
        return kept[source.address]

    return both(
        replaced(MappingCache, "get", get_by_address), replaced(MappingCache, "_drop", lambda self, incarnation: None)
    )


def leaks_an_import_that_fails() -> Bug:
    return replaced(WorkerHost, "_import_freed", lambda self, import_: None)


MUTANTS: tuple[Mutant, ...] = (
    uses_blocks_without_a_valid_release,
    frees_a_lease_twice,
    forgets_expiry_when_idle,
    hands_a_lease_to_an_old_leg,
    announces_blocks_before_they_are_computed,
    announces_a_partial_block,
    takes_every_block_for_one_of_four_tokens,
    pairs_workers_with_other_blocks,
    pairs_workers_of_other_engines,
    frees_slots_when_the_stream_ends,
    frees_slots_once_they_are_announced,
    takes_slots_back_from_a_leg_that_may_release,
    frees_blocks_under_a_copy,
    frees_an_import_twice,
    indexes_an_import_before_it_is_valid,
    keeps_a_mapping_over_a_restart,
    leaks_an_import_that_fails,
)
