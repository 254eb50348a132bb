"""Plants deliberate bugs in what becomes of all that a wrong worker has computed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from services.core.hashing import BlockHash, block_hashes
from services.decode.leg import DecodeLeg
from services.engine.schedule.sequence import Resumed, Sequence
from services.kvtransfer.borrowing import Borrower
from services.router.coordinator import wrong_workers
from services.router.coordinator.book import Book
from services.router.coordinator.request import Origin, PlacedDecode, PlacedPrefill, Request
from services.router.policy import Role
from services.router.workers import wire
from services.worker import session
from services.worker.prefixes import PrefixLoader
from tests.sim.mutation import Bug, Mutant, both, replaced

# What is cached: at the worker itself, at those that took it over, behind it, at stores and in tiers.


def _keeps_names(roles: frozenset[Role], *, with_handoff: bool) -> Bug:
    """Has legs of these roles find blocks by the names of before all verdicts; of decode legs, those with a handoff or
    those without."""
    fill = wire._fill

    def fill_in(message: Any, command: Any, traceparent: str) -> None:
        fill(message, command, traceparent)
        if command.phase in roles and (command.handoff is not None) == with_handoff:
            message.cache_salt = command.spec.cache_salt

    return replaced(wire, "_fill", fill_in)


def finds_what_a_wrong_worker_has_computed() -> Bug:
    return replaced(wire, "salt_in", lambda epoch, cache_salt: cache_salt)


def finds_it_where_prompts_are_computed() -> Bug:
    return _keeps_names(frozenset({Role.PREFILL}), with_handoff=False)


def finds_it_where_handoffs_are_taken_over() -> Bug:
    return _keeps_names(frozenset({Role.DECODE}), with_handoff=True)


def finds_it_where_sequences_are_not_split() -> Bug:
    return _keeps_names(frozenset({Role.DECODE}), with_handoff=False)


def borrows_it_by_older_names() -> Bug:
    """Stores, and workers, lend what they have under its name of before all verdicts."""
    named_before: dict[BlockHash, BlockHash] = {}
    bring, borrow = PrefixLoader.bring, Borrower.borrow

    async def brings(self: PrefixLoader, sequence: Sequence, command: Any) -> Any:
        size = self._host.engine.info.block_size
        names = (block_hashes(sequence.token_ids, size, salt) for salt in (command.cache_salt, _unnamed(command)))
        named_before.update(zip(*names, strict=True))
        return await bring(self, sequence, command)

    async def borrows(self: Borrower, source: Any, hashes: Any) -> Any:
        return await borrow(self, source, [named_before.get(hash, hash) for hash in hashes])

    return both(replaced(PrefixLoader, "bring", brings), replaced(Borrower, "borrow", borrows))


def _unnamed(command: Any) -> str:
    return str(command.cache_salt.partition("\x1f")[0])


def keeps_the_names_of_what_waits() -> Bug:
    return replaced(Request, "name_blocks", lambda self, epoch: None)


def uses_what_is_found_by_older_names() -> Bug:
    return replaced(Book, "begin_again", _begin_again_only_in(Book.begin_again, "_carry_out"))


def _begin_again_only_in(begin_again: Any, caller: str) -> Any:
    def only_there(self: Book, request: Request, now: float) -> None:
        if sys._getframe(1).f_code.co_name == caller:
            begin_again(self, request, now)

    return only_there


# What runs.


def lets_output_of_it_go_on() -> Bug:
    class Forgetful(set[Origin]):
        def isdisjoint(self, others: Any) -> bool:
            return True

    return _with_output_from(Forgetful)


def _without(kind: type[Any]) -> Bug:
    """Has the router forget the origins of that kind."""

    class Few(set[Origin]):
        def isdisjoint(self, others: Any) -> bool:
            return super().isdisjoint({each for each in others if not isinstance(each, kind)})

    legs = [_with_origins(leg, Few) for leg in (PlacedPrefill, PlacedDecode)]
    return both(*legs, _with_output_from(Few))


def _with_origins(leg: Any, few: Any) -> Bug:
    initialise = leg.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        self.origins = few(self.origins)

    return replaced(leg, "__init__", init)


def _with_output_from(few: Any) -> Bug:
    initialise = Request.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **kwargs)
        if not isinstance(self.output_from, few):  # else it is a part, and has that of the whole
            self.output_from = few(self.output_from)

    return replaced(Request, "__init__", init)


def forgets_who_has_computed() -> Bug:
    return _without(int)


def forgets_who_has_found_something_cached() -> Bug:
    return _without(str)


def keeps_the_legs_of_requests_without_output() -> Bug:
    return replaced(Book, "begin_again", _begin_again_only_in(Book.begin_again, "_began"))


def forgets_whose_kv_a_handoff_is() -> Bug:
    open_decode = Book.open_decode

    def opened(self: Book, request: Request, at: Any, now: float, choice: Any = None) -> None:
        open_decode(self, request, at, now, choice)
        if request.decode is not None:
            request.decode.origins = {at.info.incarnation}

    return replaced(Book, "open_decode", opened)


def forgets_what_answers_have_that_it_came_apart_from() -> Bug:
    come_apart = Book._come_apart

    def apart(self: Book, request: Request, now: float) -> None:
        come_apart(self, request, now)
        for part in self.parts[request.request_id].values():
            part.output_from = set(part.output_from)

    return replaced(Book, "_come_apart", apart)


def says_nothing_of_what_preempted_sequences_find() -> Bug:
    on_event = DecodeLeg.on_event

    def quiet(self: DecodeLeg, event: Any, report: Any) -> None:
        if not isinstance(event, Resumed):
            on_event(self, event, report)

    return replaced(DecodeLeg, "on_event", quiet)


# Who hears of it.


def routers_tell_of_no_verdict() -> Bug:
    return replaced(wire, "verdicts", lambda num_of: [])


def workers_pass_no_verdict_on() -> Bug:
    return replaced(session, "_as_messages", lambda verdicts: [])


def goes_on_using_what_another_router_has_found_wrong() -> Bug:
    def heard(book: Book, num_of: Mapping[int, int], now: float) -> list[str]:
        book.verdicts.merge(num_of)
        return []

    return replaced(wrong_workers, "heard", heard)


MUTANTS: list[Mutant] = [
    finds_what_a_wrong_worker_has_computed,
    finds_it_where_prompts_are_computed,
    finds_it_where_handoffs_are_taken_over,
    finds_it_where_sequences_are_not_split,
    borrows_it_by_older_names,
    keeps_the_names_of_what_waits,
    uses_what_is_found_by_older_names,
    lets_output_of_it_go_on,
    forgets_who_has_computed,
    forgets_who_has_found_something_cached,
    forgets_whose_kv_a_handoff_is,
    forgets_what_answers_have_that_it_came_apart_from,
    says_nothing_of_what_preempted_sequences_find,
    keeps_the_legs_of_requests_without_output,
    routers_tell_of_no_verdict,
    workers_pass_no_verdict_on,
    goes_on_using_what_another_router_has_found_wrong,
]
