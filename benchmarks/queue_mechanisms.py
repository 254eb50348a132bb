"""Lists the mechanisms of the router's queue, each as a context in which it is replaced by nothing.

See `docs/adr/0030-what-the-queue-is-made-of.md`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from services.router import policy
from services.router.coordinator import admission, handoff, placement, queue
from services.router.coordinator.book import Book
from services.router.coordinator.coordinator import Coordinator
from services.router.coordinator.queue import Queue, TenantLine, handoff_order
from services.router.coordinator.request import Phase, Request, Setbacks
from services.router.policy import cluster as policy_cluster
from services.router.policy.shares import Share, Shares

Without = contextlib.AbstractContextManager[Any]


def _replaced(owner: Any, name: str, new: Any) -> Callable[[], Without]:
    return lambda: mock.patch.object(owner, name, new)


def _ordered(key: Callable[[int, int, int], tuple[int, int, int]]) -> Callable[[], Without]:
    return _replaced(queue, "order_of", lambda priority, tokens, number: key(-priority, tokens.bit_length(), number))


def _no_pause() -> Without:
    count = handoff._count

    def counted(book: Book, request: Request, *others: Any) -> None:
        count(book, request, *others)
        request.setbacks.not_before_s = 0.0

    return mock.patch.object(handoff, "_count", counted)


def _unbounded_walk() -> Without:
    init = Coordinator.__init__

    def patient(self: Coordinator, config: Any) -> None:
        init(self, dataclasses.replace(config, max_overtaken=1 << 30))

    return mock.patch.object(Coordinator, "__init__", patient)


def _line_without_turns(self: Queue, line: TenantLine, now: float) -> Iterator[Request]:
    return (each for each in line if each.phase is Phase.QUEUED)


def _handoffs_by_priority(self: Queue, now: float) -> Iterator[Request]:
    return (each for each in sorted(self.parked, key=lambda each: not each.goes_ahead) if each.phase is Phase.PARKED)


def _claims_of_handoffs_only() -> Without:
    claim = Queue.claim

    def claimed(self: Queue, worker_id: str, request: Request) -> None:
        if request.phase is Phase.PARKED:
            claim(self, worker_id, request)

    return mock.patch.object(Queue, "claim", claimed)


def _kept_from(*, those_of_the_queue: bool) -> Callable[[], Without]:
    def kept_from(self: Queue, handoff: Request, source_id: str, able: object) -> list[set[str]]:
        kept = self.for_handoffs.keys() - {source_id}
        order = handoff_order(handoff)
        older = {name for name, each in self.claims.items() if handoff_order(each) < order}
        return [kept | older if those_of_the_queue else kept]

    return _replaced(Queue, "kept_from", kept_from)


def _kept_off_for_ever() -> Without:
    beside = placement._beside_shorter

    def never(book: Book, request: Request, now: float) -> Any:
        with mock.patch.object(Queue, "has_waited_long", return_value=False):
            return beside(book, request, now)

    return mock.patch.object(placement, "_beside_shorter", never)


def _nobody_is_too_old_to_lose() -> Without:
    victims = admission._victims

    def all_victims(book: Book, arrival: Any, crowd: Any, line: Any, total: int, expected: int) -> list[Request]:
        found = victims(book, arrival, crowd, line, total, expected)
        queued = [each for each in line if not each.output and not each.is_part and each not in found]
        spared = [each for each in queued if crowd is not None or each.spec.priority < arrival.priority]
        return found + spared

    return mock.patch.object(admission, "_victims", all_victims)


def _one_tenant() -> Without:
    enter = Shares.enter
    return mock.patch.object(Shares, "enter", lambda self, tenant, weight, now: enter(self, "all", 1.0, now))


MECHANISMS: dict[str, Callable[[], Without]] = {
    "priority": _ordered(lambda priority, bits, number: (0, bits, number)),
    "expected output": _ordered(lambda priority, bits, number: (priority, 0, number)),
    "arrival": _ordered(lambda priority, bits, number: (priority, bits, number * 2654435761 % (1 << 32))),
    "back-off": _replaced(Setbacks, "may_ask", lambda *_: True),
    "pause before the last chance": _no_pause,
    "claims of aged requests": _claims_of_handoffs_only,
    "claims of aged handoffs": _replaced(placement, "_claim", lambda *_: None),
    "handoffs keep off claimed workers": _kept_from(those_of_the_queue=False),
    "unless their source is claimed": _kept_from(those_of_the_queue=True),
    "a claim lasts until the offer is answered": _replaced(queue, "_is_asked", lambda *_: False),
    "asked again by any snapshot": _replaced(Queue, "is_news", lambda *_: False),
    "turns": _replaced(Queue, "_in_turn", _line_without_turns),
    "turns go round the priorities": _replaced(
        TenantLine, "turn_order", lambda self, request: (0, request.waiting_since_s, request.number)
    ),
    "aged handoffs go first": _replaced(Queue, "handoffs", _handoffs_by_priority),
    "bound on overtaking at a worker": _replaced(Queue, "note_sent", lambda *_: None),
    "count of what is passed": _unbounded_walk,
    "out of reach": _replaced(Queue, "_passes_over", lambda self, request, now: now < request.setbacks.not_before_s),
    "long prompts keep off": _replaced(
        placement, "_beside_shorter", lambda book, request, now: placement._beside_others(request, request.next_job())
    ),
    "until they have waited long": _kept_off_for_ever,
    "room for handoffs in flight": _replaced(policy_cluster, "_no_decode_room", lambda *_: lambda worker, takers: None),
    "unsplit beside handoffs": _replaced(
        policy, "beside_handoffs", lambda job, workers, handoffs, tokens: list(workers)
    ),
    "victims": _replaced(admission, "_victims", lambda *_: []),
    "the oldest keeps its place": _nobody_is_too_old_to_lose,
    "shares": _one_tenant,
    "who is behind goes ahead": _replaced(Share, "is_behind", False),
    "headroom": _replaced(Share, "headroom", 0.0),
}
