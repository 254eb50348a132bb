"""Plants deliberate bugs in what becomes of all that a wrong worker has computed."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from services.router.coordinator.book import Book
from services.router.coordinator.canaries import Canaries
from services.router.coordinator.request import Origin, PlacedDecode, PlacedPrefill, Request
from services.router.policy import Role
from services.router.workers import wire
from services.worker import session
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


def keeps_the_names_of_what_waits() -> Bug:
    return replaced(Request, "name_blocks", lambda self, epoch: None)


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


def keeps_the_legs_of_requests_without_output() -> Bug:
    return replaced(Book, "begin_again", _begin_again_only_in(Book.begin_again, "_began"))


# Who hears of it.


def routers_tell_of_no_verdict() -> Bug:
    return replaced(wire, "verdicts", lambda num_of: [])


def workers_pass_no_verdict_on() -> Bug:
    return replaced(session, "_as_messages", lambda verdicts: [])


def goes_on_using_what_another_router_has_found_wrong() -> Bug:
    def heard(canaries: Canaries, num_of: Mapping[int, int], now: float) -> None:
        canaries._book.verdicts.merge(num_of)

    return replaced(Canaries, "heard", heard)


MUTANTS: list[Mutant] = [
    finds_what_a_wrong_worker_has_computed,
    finds_it_where_prompts_are_computed,
    finds_it_where_handoffs_are_taken_over,
    finds_it_where_sequences_are_not_split,
    keeps_the_names_of_what_waits,
    lets_output_of_it_go_on,
    forgets_who_has_computed,
    keeps_the_legs_of_requests_without_output,
    routers_tell_of_no_verdict,
    workers_pass_no_verdict_on,
    goes_on_using_what_another_router_has_found_wrong,
]
