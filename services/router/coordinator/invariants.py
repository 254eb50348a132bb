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
    for request in book.requests.values():
        assert request.phase is not Phase.FINISHED
        for leg in (request.prefill, request.decode):
            if leg is not None:
                current[leg.leg] = leg.worker.worker_id
                assert leg.worker.model_id == request.spec.model, "a worker of another model"
                assert book.legs[leg.leg] is request
                assert book.workers.get(leg.worker.worker_id).legs[leg.leg] == request.request_id
        assert (request.phase is Phase.QUEUED) == (request.prefill is None and request.decode is None)
    phases = Counter(request.phase for request in book.requests.values())
    assert +book.num_in == phases, f"{book.num_in} instead of {phases}"
    assert book.handoffs_in_flight == HandoffsInFlight(_lengths_in_flight(book))
    book.handoffs_in_flight.check()
    crashed = {request.request_id for request in book.requests.values() if request.setbacks.crashes}
    assert crashed <= book.crashed <= book.requests.keys()
    _check_cluster(book)
    num_released = sum(request.released is not None for request in book.requests.values())
    assert len(book.legs) == len(current) + num_released
    assert sum(len(worker.legs) for worker in book.workers.all()) == len(current)
    for worker in book.workers.all():
        assert worker.predictions.keys() <= worker.legs.keys()
    for phase, waiting in ((Phase.QUEUED, book.queue), (Phase.PARKED, book.parked)):
        assert list(waiting) == sorted(
            (request for request in book.requests.values() if request.phase is phase), key=waiting.order
        )


def _lengths_in_flight(book: Book) -> list[int]:
    return [
        len(request.prefill.token_ids)
        for request in book.requests.values()
        if request.prefill is not None
        and request.prefill.worker.roles is not Role.MIXED
        and (request.decode is None or request.decode.admitted_s is None)
    ]


def _check_cluster(book: Book) -> None:
    """Checks that the cluster, which is updated by every change, equals one made from the workers as they are."""
    cluster = book.workers.cluster
    assert cluster.views == {worker.info.worker_id: worker.view() for worker in book.workers.all()}
    cluster.check()


def check_idle(book: Book) -> None:
    check(book)
    assert not book.requests, f"live requests: {sorted(book.requests)}"
    assert not book.num_expected, f"{book.num_expected} requests are expected"
