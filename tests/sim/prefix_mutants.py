"""Plants deliberate bugs in prefixes that are lent and brought: at the source, and where they are brought to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.core.hashing import BlockHash
from services.engine.engine import Engine
from services.kv import pool_face
from services.kv.lease import Lease
from services.kv.pool import BlockPool, Holder
from services.kv.prefix_blocks import PrefixReservation, keep_prefix
from services.kvtransfer.lending import Lender
from services.worker.prefixes import PrefixLoader
from tests.sim.mutation import Bug, Mutant, replaced

# The source.


def lends_blocks_without_holding_them() -> Bug:
    lend = Lender.lend

    def lend_unheld(self: Lender, hashes: Sequence[BlockHash]) -> Lease | None:
        lease = lend(self, hashes)
        if lease is not None:
            self._give_back(lease.block_ids)
            lease.listener = None
        return lease

    return replaced(Lender, "lend", lend_unheld)


def keeps_what_was_lent() -> Bug:
    def lease_ended(self: Lender, lease: Lease) -> None:
        self.num_lends -= 1
        self._num_leases_of.subtract(lease.block_ids)

    return replaced(Lender, "lease_ended", lease_ended)


def lends_blocks_in_another_order() -> Bug:
    lend = Engine.lend

    def lend_backwards(self: Engine, hashes: Sequence[BlockHash]) -> list[int]:
        return lend(self, hashes)[::-1]

    return replaced(Engine, "lend", lend_backwards)


def lends_what_was_not_asked_for() -> Bug:
    def lend(self: Engine, hashes: Sequence[BlockHash]) -> list[int]:
        with self._lock:
            found = list(self._pool._block_of.values())[: len(hashes)]
            self._pool.acquire(found, Holder.LEASE)
            return found

    return replaced(Engine, "lend", lend)


# Where it is brought to.


def indexes_what_is_brought_by_the_next_hashes() -> Bug:
    def keep_shifted(pool: BlockPool, reservation: PrefixReservation, hashes: Sequence[BlockHash]) -> None:
        keep_prefix(pool, reservation, [*hashes[1:], hashes[0]])

    return replaced(pool_face, "keep_prefix", keep_shifted)


def keeps_the_references_to_what_was_brought() -> Bug:
    def keep(pool: BlockPool, reservation: PrefixReservation, hashes: Sequence[BlockHash]) -> None:
        pool.acquire(reservation.fresh, Holder.IMPORT)
        keep_prefix(pool, reservation, hashes)

    return replaced(pool_face, "keep_prefix", keep)


def indexes_before_anything_has_come() -> Bug:
    async def fetch(
        self: PrefixLoader, bring: Any, reservation: Any, hashes: Sequence[BlockHash], num_before: int, loan: Any
    ) -> Any:
        self._host.engine.keep_prefix(reservation, hashes)
        raise AssertionError("nothing was fetched")

    return replaced(PrefixLoader, "_fetch", fetch)


MUTANTS: list[Mutant] = [
    lends_blocks_without_holding_them,
    keeps_what_was_lent,
    lends_blocks_in_another_order,
    lends_what_was_not_asked_for,
    indexes_what_is_brought_by_the_next_hashes,
    keeps_the_references_to_what_was_brought,
    indexes_before_anything_has_come,
]
