"""Places what waits: parked handoffs first, then the queue, each in order. Pure.

Owns: who is tried when, and that nobody starves. Never: how good a worker is (`services.router.policy`).

No one starves: a handoff that has waited longer than `overtake_limit_s` claims the worker nearest to having room, and
younger ones leave that worker alone. It is offered there again and again: its age tells the worker to keep room for it,
and the worker knows better than its snapshot.
"""

from __future__ import annotations

from services.router import policy
from services.router.coordinator.book import Book
from services.router.coordinator.requests import PrefillLeg, Request
from services.router.policy import Role, Source, WorkerView


def dispatch(book: Book, now: float) -> None:
    if not len(book.parked) and not len(book.queue):
        return
    claimed: set[str] = set()
    for request in book.parked:
        _bind(book, request, claimed, now)
    _start_queued(book, claimed, now)


def can_be_served(book: Book, request: Request) -> bool:
    """Whether some ready worker could take what waits, were it idle."""
    views = book.workers.views()
    leg = request.prefill
    if leg is None:
        return any(policy.can_decode(request.next_job(), view) for view in views)
    return policy.nearest_to_room(request.job(len(leg.token_ids)), _source(leg), views) is not None


def give_up_stranded(book: Book, now: float) -> None:
    """Ends the leases that no ready worker could fetch, of requests that could begin again elsewhere: to wait for the
    source's sake would end them. (The lease of one that could not is kept: its workers may come back.)"""
    views = book.workers.views()
    for request in book.parked:
        job = request.next_job()
        again = policy.can_hand_over(job, views) or any(policy.can_decode(job, view) for view in views)
        if again and not can_be_served(book, request):
            book.end_prefill(request, now, "stranded")
            book.settle(request, now)


def _source(leg: PrefillLeg) -> Source:
    return Source(leg.worker.worker_id, leg.worker.host_id, leg.worker.layout)


def _bind(book: Book, request: Request, claimed: set[str], now: float) -> None:
    leg = request.prefill
    assert leg is not None
    if now < request.not_before_s:
        return
    source = _source(leg)
    job = request.job(len(leg.token_ids))
    # Adoption in place takes no room from whoever claimed the worker; it may even be what makes room.
    unclaimed = [view for view in book.workers.views() if view.worker_id not in claimed - {source.worker_id}]
    askable = [view for view in unclaimed if _may_ask(request, view, now)]
    worker_id = policy.place_decode(job, source, askable, now, book.config.policy)
    if worker_id is None and now - request.waiting_since_s >= book.config.overtake_limit_s:
        worker_id = _claim(request, job, source, unclaimed, claimed, now)
    if worker_id is not None:
        book.open_decode(request, book.workers.get(worker_id), now)


def _claim(
    request: Request,
    job: policy.Job,
    source: Source | None,
    views: list[WorkerView],
    claimed: set[str],
    now: float,
) -> str | None:
    nearest = policy.nearest_to_room(job, source, views)
    if nearest is None:
        return None
    claimed.add(nearest)
    view = next(view for view in views if view.worker_id == nearest)
    return nearest if _may_ask(request, view, now) else None


def _start_queued(book: Book, claimed: set[str], now: float) -> None:
    """In order; a short way past a head that does not fit, unless that head is aged."""
    num_passed = 0
    in_flight = _handoffs_in_flight(book)
    for request in book.queue:
        if now < request.not_before_s or _start(book, request, in_flight, claimed, now):
            continue
        num_passed += 1
        aged = now - request.waiting_since_s >= book.config.overtake_limit_s
        if aged or num_passed > book.config.max_overtaken:
            return


def _start(book: Book, request: Request, in_flight: list[int], claimed: set[str], now: float) -> bool:
    job = request.next_job()
    views = book.workers.views()
    worker_id = policy.place_prefill(job, views, in_flight, now, book.config.policy)
    if worker_id is not None:
        worker = book.workers.get(worker_id)
        if worker.info.role is not Role.MIXED:
            in_flight.append(job.num_tokens)
        book.open_prefill(request, worker, now)
        return True
    if policy.can_hand_over(job, views):
        return False
    # No prefill worker is there, or the sequence has outgrown them all: the whole of it runs on a decode worker.
    askable = [view for view in views if view.worker_id not in claimed and _may_ask(request, view, now)]
    worker_id = policy.place_decode(job, None, askable, now, book.config.policy)
    if worker_id is None:
        return False
    book.open_decode(request, book.workers.get(worker_id), now)
    return True


def _handoffs_in_flight(book: Book) -> list[int]:
    """Tokens of each handoff that still needs room on a decode worker. A mixed source can adopt its own lease."""
    return [
        len(request.prefill.token_ids)
        for request in book.requests.values()
        if request.prefill is not None
        and request.prefill.worker.role is not Role.MIXED
        and (request.decode is None or request.decode.admitted_s is None)
    ]


def _may_ask(request: Request, view: WorkerView, now: float) -> bool:
    refusal = request.refusals.get(view.worker_id)
    return refusal is None or (view.load.sequence_number > refusal.load_number and now >= refusal.retry_at_s)
