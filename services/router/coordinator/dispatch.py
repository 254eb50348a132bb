"""Places what waits: parked handoffs first, then the queue, each in order. Pure.

Owns: who is tried when, and that nobody starves and nobody stands in the way of whom others could serve. Never: how
good a worker is (`services.router.policy`).

No one starves: a handoff that has waited longer than `overtake_limit_s` claims the worker nearest to having room, and
younger ones leave that worker alone. It is offered there again and again: its age tells the worker to keep room for it,
and the worker knows better than its snapshot.

A queued request that old claims the decode worker nearest to room and, once that could take it, the prefill worker
nearest to room. Younger ones begin nowhere where that worker would be needed, so its room only grows until the claimant
begins; the rest of the line moves. Handoffs go before the queue, since they hold blocks that it may wait for: they
avoid a worker claimed by an older request as long as there is another that could ever take them, unless their source is
claimed too: then the claimant waits for them.

A request that no ready worker could serve, were it idle, is passed by: it neither ages nor holds up the line.
"""

from __future__ import annotations

from dataclasses import replace

from services.router import policy
from services.router.coordinator.book import Book
from services.router.coordinator.request import PlacedPrefill, Request
from services.router.policy import Fingerprint, Part, Source, WorkerView


def dispatch(book: Book, now: float) -> None:
    if not len(book.parked) and not len(book.queue):
        book.claims = {}
        return
    claimed: set[str] = set()
    for request in book.parked:
        with book.isolated("placement", request, now):
            _bind(book, request, claimed, now)
    _start_queued(book, claimed, now)


def can_be_served(book: Book, request: Request) -> bool:
    """Whether some ready worker could take what waits, were it idle."""
    whole, leg = book.workers.cluster.whole, request.prefill
    if leg is None:
        return whole.fit(request.next_job()).can_begin
    return bool(whole.able(request.job(len(leg.token_ids)), _source(leg)))


def why_unserved(book: Book, request: Request) -> str:
    """For the client, of a request that cannot be served."""
    bound = request.next_job().fingerprint
    unbound = replace(request.next_job(), fingerprint=None)
    others = [view for view in book.workers.views() if view.fingerprint != bound]
    able = sorted({_named(view.fingerprint) for view in others if policy.can_decode(unbound, view)})
    if bound is None or not able:
        return "no worker that could serve this is ready"
    return (
        f"the stream began on workers of fingerprint {_named(bound)}, and none that could go on with it is ready; "
        f"those that are compute differently: {', '.join(able)}"
    )


def _named(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.short} ({fingerprint.numerics})"


def give_up_stranded(book: Book, now: float) -> None:
    """Ends the leases that no ready worker could fetch, of requests that could begin again elsewhere: to wait for the
    source's sake would end them. (The lease of one that could not is kept: its workers may come back.)"""
    for request in book.parked:
        with book.isolated("tick", request, now):
            can_begin = book.workers.cluster.whole.fit(request.next_job()).can_begin
            if can_begin and not can_be_served(book, request):
                book.end_prefill(request, now, "stranded")
                book.settle(request, now)


def _source(leg: PlacedPrefill) -> Source:
    return Source(leg.worker.worker_id, leg.worker.host_id, leg.worker.fingerprint)


def _bind(book: Book, request: Request, claimed: set[str], now: float) -> None:
    leg = request.prefill
    assert leg is not None
    if now < request.setbacks.not_before_s:
        return
    source = _source(leg)
    job = request.job(len(leg.token_ids))
    able = book.workers.cluster.whole.able(job, source)
    # Adoption in place takes no room from whoever claimed the worker; it may even be what makes room.
    unclaimed = [view for view in able if view.worker_id not in claimed or view.worker_id == source.worker_id]
    ways = _ways_past_claims(book, request, source, unclaimed)
    askable = [[view for view in views if _may_ask(request, view, now)] for views in ways]
    placed = (policy.place_decode(job, source, views, now, book.config.policy) for views in askable)
    worker_id = next(filter(None, placed), None)
    if worker_id is None and now - request.waiting_since_s >= book.config.overtake_limit_s:
        worker_id = _claim(request, job, source, ways[-1], claimed, now)
    if worker_id is not None:
        book.open_decode(request, book.workers.get(worker_id), now)


def _ways_past_claims(book: Book, request: Request, source: Source, able: list[WorkerView]) -> list[list[WorkerView]]:
    """Where a handoff may go beside older requests of the queue that have claimed workers: at best it avoids them all.
    But if the claimant of its source waits for the blocks that the handoff holds there, it may go to any in the end:
    else each of the two would wait for the other."""
    older = {worker_id for worker_id, order in book.claims.items() if order < request.order}
    elsewhere = [view for view in able if view.worker_id not in older]
    if not elsewhere:
        return [able]
    return [elsewhere, able] if source.worker_id in older else [elsewhere]


def _claim(
    request: Request,
    job: policy.Job,
    source: Source | None,
    able: list[WorkerView],
    claimed: set[str],
    now: float,
) -> str | None:
    nearest = policy.nearest_to_room(job, source, able)
    if nearest is None:
        return None
    claimed.add(nearest)
    view = next(view for view in able if view.worker_id == nearest)
    return nearest if _may_ask(request, view, now) else None


class _Line:
    """The queue as one dispatch walks it: the workers that aged requests have claimed, and what is left to others."""

    def __init__(self, book: Book, bound: set[str], now: float) -> None:
        """`bound`: workers that parked handoffs have claimed."""
        self.bound = bound
        self.now = now
        self._book = book
        book.claims = {}
        self._claimed: frozenset[str] = frozenset()

    @property
    def left(self) -> Part:
        """Workers that are left to others."""
        return self._book.workers.cluster.without(self._claimed)

    @property
    def is_over(self) -> bool:
        """Every worker is claimed, or none is ready."""
        return not self.left.longest_sequence

    def claim(self, worker_id: str, request: Request) -> None:
        self._book.claims[worker_id] = request.order
        self._claimed = frozenset(self._book.claims)

    def is_aged(self, request: Request) -> bool:
        return self.now - request.waiting_since_s >= self._book.config.overtake_limit_s

    def is_out_of_reach(self, request: Request) -> bool:
        """Nobody who is left could hold it, were all idle. A few comparisons: a queue may hold a thousand of these."""
        left, num_tokens = self.left, len(request.spec.token_ids)
        if num_tokens + request.max_tokens > left.longest_sequence:
            return True
        # Whoever could prefill it is claimed.
        return left.longest_prompt <= num_tokens < self._book.workers.cluster.whole.longest_prompt

    def is_bound_elsewhere(self, request: Request) -> bool:
        """It has begun, and nobody who is left may go on with it."""
        return bool(request.output) and not self.left.fit(request.next_job()).can_begin


def _start_queued(book: Book, bound: set[str], now: float) -> None:
    """In order; a short way past those that wait for room."""
    line = _Line(book, bound, now)
    num_passed = 0
    for request in book.queue:
        if line.is_over or num_passed > book.config.max_overtaken:
            return
        if now < request.setbacks.not_before_s or line.is_out_of_reach(request):
            continue
        with book.isolated("placement", request, now):
            if not line.is_bound_elsewhere(request) and not _start(book, request, line):
                num_passed += 1


def _start(book: Book, request: Request, line: _Line) -> bool:
    job, config = request.next_job(), book.config.policy
    worker_id = policy.place_prefill(job, line.left, book.handoffs_in_flight, line.now, config)
    if worker_id is None and book.workers.cluster.whole.fit(job).can_hand_over:
        worker_id = _nearest_start(request, job, line, config) if line.is_aged(request) else None
        if worker_id is None:
            return False
    if worker_id is not None:
        book.open_prefill(request, book.workers.get(worker_id), line.now)
        return True
    return _start_whole(book, request, job, line)


def _nearest_start(request: Request, job: policy.Job, line: _Line, config: policy.PolicyConfig) -> str | None:
    """Where an aged prompt begins, or what it claims."""
    nearest = policy.nearest_start(job, line.left, config)
    if nearest is None:
        return None
    if nearest.source_has_room and nearest.target_has_room:
        return nearest.source_id
    line.claim(nearest.target_id, request)
    if nearest.target_has_room:
        line.claim(nearest.source_id, request)
    return None


def _start_whole(book: Book, request: Request, job: policy.Job, line: _Line) -> bool:
    """No prefill worker is there, or the sequence has outgrown them all: the whole of it runs on a decode worker."""
    able = line.left.able(job, None)
    askable = [view for view in able if view.worker_id not in line.bound and _may_ask(request, view, line.now)]
    worker_id = policy.place_decode(job, None, askable, line.now, book.config.policy)
    if worker_id is not None:
        book.open_decode(request, book.workers.get(worker_id), line.now)
        return True
    if line.is_aged(request) and (nearest := policy.nearest_to_room(job, None, able)) is not None:
        line.claim(nearest, request)
    return False


def _may_ask(request: Request, view: WorkerView, now: float) -> bool:
    refusal = request.setbacks.refusals.get(view.worker_id)
    # Not "higher": a worker that has restarted counts from 1 again.
    return refusal is None or (view.load.sequence_number != refusal.load_number and now >= refusal.retry_at_s)
