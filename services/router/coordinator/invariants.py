"""What must hold of the book after every input. For tests and the simulator."""

from __future__ import annotations

from services.router.coordinator.book import Book
from services.router.coordinator.requests import Phase


def check(book: Book) -> None:
    """Raises AssertionError if the book contradicts itbook. For tests and the simulator."""
    current: dict[int, str] = {}
    for request in book.requests.values():
        assert request.phase is not Phase.FINISHED
        for leg in (request.prefill, request.decode):
            if leg is not None:
                current[leg.leg] = leg.worker.worker_id
                assert book.legs[leg.leg] is request
                assert book.workers.get(leg.worker.worker_id).legs[leg.leg] == request.request_id
        assert (request.phase is Phase.QUEUED) == (request.prefill is None and request.decode is None)
    num_released = sum(request.released_leg is not None for request in book.requests.values())
    assert len(book.legs) == len(current) + num_released
    assert sum(len(worker.legs) for worker in book.workers.all()) == len(current)
    for worker in book.workers.all():
        assert worker.predictions.keys() <= worker.legs.keys()
    for phase, waiting in ((Phase.QUEUED, book.queue), (Phase.PARKED, book.parked)):
        assert list(waiting) == sorted(
            (request for request in book.requests.values() if request.phase is phase), key=lambda r: r.order
        )


def check_idle(book: Book) -> None:
    check(book)
    assert not book.requests, f"live requests: {sorted(book.requests)}"
