"""Checks what must hold of the book after every input. For tests and the simulator."""

from __future__ import annotations

from collections import Counter

from services.router.coordinator.book import Book
from services.router.coordinator.request import Phase
from services.router.policy import HandoffsInFlight, Role


def check(book: Book) -> None:
    """Raises AssertionError if the book contradicts itself."""
    assert book.num_expected >= 0
    current: dict[int, str] = {}
    for key, request in book.requests.items():
        assert request.key == key
        assert request.open_answers, "a request ends with its last answer"
        assert not (request.phase is Phase.QUEUED and len(request.answers) > 1 and request.num_received), "in parts"
        assert request.phase is not Phase.FINISHED
        assert request.park is None or request.decode is None, "a handoff goes to a store or to a decode worker"
        for leg in (request.prefill, request.decode, request.park):
            if leg is not None:
                current[leg.leg] = leg.worker.worker_id
                assert leg.worker.model_id == request.spec.model, "a worker of another model"
                assert book.legs[leg.leg] is request
                assert book.workers.get(leg.worker.worker_id).legs[leg.leg] == request.key
        legs = (request.prefill, request.decode, request.park)
        assert (request.phase is Phase.QUEUED) == all(leg is None for leg in legs)
    phases = Counter(request.phase for request in book.requests.values())
    assert +book.num_in == phases, f"{book.num_in} instead of {phases}"
    assert book.handoffs_in_flight == HandoffsInFlight(_lengths_in_flight(book))
    book.handoffs_in_flight.check()
    assert book.unoffered_handoffs == HandoffsInFlight(_lengths_in_flight(book, unoffered=True))
    crashed = {request.key for request in book.requests.values() if request.setbacks.crashes}
    assert crashed <= book.crashed <= book.requests.keys()
    parts = {key: part for of_request in book.parts.values() for key, part in of_request.items()}
    assert parts == {key: request for key, request in book.requests.items() if request.is_part}
    assert all(book.parts.values()), "a request lives as long as a part of it"
    assert not book.parts.keys() & book.requests.keys(), "it is whole, or in parts"
    _check_cluster(book)
    num_released = sum(request.released is not None for request in book.requests.values())
    assert len(book.legs) == len(current) + num_released
    assert sum(len(worker.legs) for worker in book.workers.all()) == len(current)
    for worker in book.workers.all():
        assert worker.predictions.keys() <= worker.legs.keys()
    _check_shares(book)
    waiting = [request for request in book.requests.values() if request.phase is Phase.PARKED]
    assert list(book.queue.parked) == sorted(waiting, key=book.queue.parked.order)


def _check_shares(book: Book) -> None:
    """Checks that each queued request stands in its tenant's line, and what tenants hold."""
    queued = [request for request in book.requests.values() if request.phase is Phase.QUEUED]
    assert len(book.queue) == len(queued)
    assert {id(request) for request in book.queue} == {id(request) for request in queued}
    for line in book.queue.lines():
        assert len(line), "an empty line is no line"
        assert list(line) == sorted(line, key=line.order)
        assert all(request.share is line.share for request in line)
    book.shares.check()
    for share in {request.share for request in book.requests.values()}:
        mine = [request for request in book.requests.values() if request.share is share]
        assert share.num_live == len(mine) + share.num_expected
        assert share.num_tokens == sum(request.num_held for request in mine)
    for request in book.requests.values():
        assert book.shares.get(request.spec.tenant) is request.share
        held = 0 if request.phase is Phase.QUEUED else len(request.spec.token_ids) + request.num_received
        assert request.num_held == held


def _lengths_in_flight(book: Book, *, unoffered: bool = False) -> list[int]:
    return [
        len(request.prefill.token_ids)
        for request in book.requests.values()
        if request.prefill is not None
        and request.prefill.worker.roles is not Role.MIXED
        and (unoffered or request.prefill.worker.roles is not Role.STORE)
        and (request.decode is None or (request.decode.admitted_s is None and not unoffered))
    ]


def _check_cluster(book: Book) -> None:
    """Checks that the cluster, which is updated by every change, equals one made from the workers as they are."""
    cluster = book.workers.cluster
    assert cluster.views == {worker.info.worker_id: worker.view() for worker in book.workers.all()}
    cluster.check()


def check_idle(book: Book) -> None:
    check(book)
    assert not book.requests, f"live requests: {sorted(book.requests)}"
    assert not book.parts
    assert not book.num_expected, f"{book.num_expected} requests are expected"
