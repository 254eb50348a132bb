"""Carries out verdicts: what a worker that computes wrong has computed goes with it. Pure.

From a verdict on, blocks have other names (`services.kv.verdicts`), so no cache gives out what the worker has computed,
or what others have computed behind it. This module judges the requests that are under way. A request ends with
`WrongOutput` if its client may have something from the worker, and is begun again if only its KV may be from there. Any
block that was found in a cache may be: nobody keeps who has computed which.

Owns: what a verdict means for requests. Never: who is wrong (`canaries.py`).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.core.errors import WrongOutput
from services.router.coordinator.book import Book
from services.router.coordinator.request import Origin
from services.router.coordinator.workers import Worker


def found_wrong(book: Book, worker: Worker, reason: str, now: float) -> None:
    """Takes a worker out of use whose answer is wrong. For one that was not used since the last time, it is no new
    verdict."""
    if worker.was_usable:
        book.verdicts.add(worker.info.incarnation)
        _carry_out(book, worker.info.incarnation, worker, reason, now)
    else:
        book.workers.failed(worker.info.worker_id, reason, now, at_once=True)


def heard(book: Book, num_of: Mapping[int, int], now: float) -> list[str]:
    """Takes over the verdicts of other routers, of which workers tell. Returns the ids of those that are known here."""
    found = []
    for incarnation in book.verdicts.merge(num_of):
        worker = next((each for each in book.workers.all() if each.info.incarnation == incarnation), None)
        _carry_out(book, incarnation, worker, "wrong answer: another router has found it", now)
        if worker is not None:
            found.append(worker.info.worker_id)
    return found


def _carry_out(book: Book, incarnation: int, worker: Worker | None, reason: str, now: float) -> None:
    """`worker` is the one of that incarnation; None if this router does not know it, nor what it computes."""
    affected = book.workers.all() if worker is None else [worker]
    origins: set[Origin] = {incarnation, *(each.info.fingerprint.kv for each in affected)}
    if worker is not None:
        book.workers.failed(worker.info.worker_id, reason, now, at_once=True)
        worker.was_usable = False
    for request in book.queue:
        request.name_blocks(book.verdicts.epoch)
    for request in list(book.requests.values()):
        with book.isolated("event", request, now):
            if book.requests.get(request.key) is not request:
                continue  # it has ended with another part of the same request
            if not request.output_from.isdisjoint(origins):
                book.fail(request, WrongOutput("a worker that has computed some of it was found to compute wrong"), now)
            # What a store has, or is given, was sealed: whoever computed it has sent output too.
            elif any(not leg.origins.isdisjoint(origins) for leg in (request.prefill, request.decode) if leg):
                book.begin_again(request, now)
