"""Plants deliberate bugs in parking: in a store's legs, and in what the router makes of them."""

from __future__ import annotations

from typing import Any

from services.kv.imports import Import
from services.kv.pool import Holder
from services.kvtransfer.client import FetchOutcome
from services.router.coordinator.book import Book
from services.router.coordinator.events import Parked
from services.router.coordinator.request import Request
from services.store.engine import StoreEngine
from services.store.leg import ParkLeg
from tests.sim.model import VOCAB_SIZE
from tests.sim.mutation import Bug, Mutant, replaced

# The store.


def leases_out_what_it_still_imports() -> Bug:
    return replaced(StoreEngine, "lease", lambda self, block_ids: None)


def keeps_the_lease_of_a_leg_that_was_given_up() -> Bug:
    def cancel(self: ParkLeg) -> None:
        self._over = True
        if self._task is not None:
            self._task.cancel()
        elif self._lease is None:
            self._close()

    return replaced(ParkLeg, "cancel", cancel)


def keeps_the_import_of_a_leg_that_was_given_up() -> Bug:
    close = ParkLeg._close

    def close_without_it(self: ParkLeg) -> None:
        self._import = None
        close(self)

    return replaced(ParkLeg, "_close", close_without_it)


def frees_an_import_under_its_copies() -> Bug:
    close = ParkLeg._close

    def close_at_once(self: ParkLeg) -> None:
        given_up, self._import = self._import, None
        if given_up is not None and given_up in self._host.imports._imports:
            del self._host.imports._imports[given_up]
            self._engine.release(given_up.block_ids, Holder.IMPORT)
            given_up.num_copies += 1 << 30  # so it is not freed again
        close(self)

    return replaced(ParkLeg, "_close", close_at_once)


def leases_blocks_out_in_another_order() -> Bug:
    lease_out = ParkLeg._lease_out

    def mixed_up(self: ParkLeg, import_: Import, outcome: FetchOutcome) -> None:
        import_.block_ids = import_.block_ids[::-1]
        lease_out(self, import_, outcome)

    return replaced(ParkLeg, "_lease_out", mixed_up)


def says_another_first_token() -> Bug:
    lease_out = ParkLeg._lease_out

    def wrong(self: ParkLeg, import_: Import, outcome: FetchOutcome) -> None:
        outcome.first_token.token_ids[0] = (outcome.first_token.token_ids[0] + 1) % VOCAB_SIZE
        lease_out(self, import_, outcome)

    return replaced(ParkLeg, "_lease_out", wrong)


# The router.


def forgets_the_leg_that_a_store_relieves() -> Bug:
    take_parked = Book.take_parked

    def forget(self: Book, request: Request, event: Parked, now: float) -> None:
        request.prefill = None
        take_parked(self, request, event, now)

    return replaced(Book, "take_parked", forget)


def forgets_what_a_lost_store_was_to_take() -> Bug:
    end_park = Book.end_park

    def end(self: Book, request: Request, now: float, outcome: str, **how: Any) -> None:
        if outcome == "lost":
            request.park = None
        else:
            end_park(self, request, now, outcome, **how)

    return replaced(Book, "end_park", end)


MUTANTS: list[Mutant] = [
    leases_out_what_it_still_imports,
    keeps_the_lease_of_a_leg_that_was_given_up,
    keeps_the_import_of_a_leg_that_was_given_up,
    frees_an_import_under_its_copies,
    leases_blocks_out_in_another_order,
    forgets_the_leg_that_a_store_relieves,
    forgets_what_a_lost_store_was_to_take,
    says_another_first_token,
]
