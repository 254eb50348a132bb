"""Places what waits: each request and handoff in the order of the queue (`queue.py`), where it finds room. Pure.

Owns: what a placement tries, one thing after the other, and what an aged request claims that finds no room. Never: who
is next, or how good a worker is (`services.router.policy`).

An aged handoff claims the worker nearest to having room, and is offered there again and again: its age tells the worker
to keep room for it, and the worker knows its room better than its snapshot does. An aged request of the queue claims
the decode worker nearest to having room and, once that one has room, the prefill worker nearest to having room. A
request that no ready worker could serve, even an idle one, is passed over: it neither claims nor holds up others.
"""

from __future__ import annotations

from dataclasses import replace

from services.router import policy
from services.router.coordinator.attempt import Attempt
from services.router.coordinator.book import Book
from services.router.coordinator.parking import park_if_due
from services.router.coordinator.request import PlacedPark, PlacedPrefill, Request
from services.router.coordinator.unsplit import must_run_unsplit, start_unsplit, weigh_unsplit
from services.router.policy import PlacedPhase, Ranking, Source, Split, WhyNot, WorkerSubset, WorkerView


def place_all(book: Book, now: float) -> None:
    queue = book.queue
    if not queue.begin_pass():
        return
    before = book.newest_leg, queue.claims
    for request in queue.handoffs(now):
        with book.isolated("placement", request, now):
            _place_handoff(book, request, now)
    _start_queued(book, now)
    # What was placed last may have moved the claim that an earlier handoff had to leave alone, or taken the worker on
    # which an earlier request would have cost more than apart from its decode.
    may_go_now = len(queue.parked) or (len(queue) and book.config.split is Split.AUTO)
    if may_go_now and (book.newest_leg, queue.claims) != before:
        book.placement_is_due = True


def can_be_served(book: Book, request: Request) -> bool:
    """Returns whether a ready worker could take the request, or its parked handoff, if that worker were idle."""
    everyone, leg = book.workers.cluster.everyone, request.prefill
    if leg is None:
        return everyone.fit(request.next_job()).can_begin
    return bool(everyone.able(request.job(len(leg.token_ids)), _source(leg)))


def why_unserved(book: Book, request: Request) -> str:
    """Returns the message that tells the client why no ready worker can serve its request."""
    bound = request.next_job().fingerprint
    unbound = replace(request.next_job(), fingerprint=None)
    others = [view for view in book.workers.views() if view.fingerprint != bound]
    able = [view.fingerprint for view in others if policy.can_decode(unbound, view)]
    if bound is None or not able:
        model, unserved_by = request.spec.model, ", ".join(sorted(request.setbacks.unserved_by))
        why = f"workers of {unserved_by} do not serve such a request; " if unserved_by else ""
        return f"no worker of model {model!r} that could serve this is ready; {why}see what baton status says of them"
    crossing = "; with --replay-across-engines the router would let it go on with another engine"
    return (
        f"the stream began on workers of fingerprint {bound}, and none that could go on with it is ready; "
        f"those that are compute differently: {', '.join(sorted(set(map(str, able))))}"
        f"{crossing if any(each.engine != bound.engine for each in able) else ''}"
    )


def give_up_stranded(book: Book, now: float) -> None:
    """Ends leases that no ready worker could fetch, if their requests could be computed again elsewhere.

    To go on waiting for such a handoff would end the request. The lease of a request that could not be computed
    elsewhere is kept: its workers may come back.
    """
    for request in book.queue.parked:
        with book.isolated("tick", request, now):
            can_begin = book.workers.cluster.everyone.fit(request.next_job()).can_begin
            if request.park is None and can_begin and not can_be_served(book, request):
                book.end_prefill(request, now, "stranded")
                book.settle(request, now)


def _source(leg: PlacedPrefill | PlacedPark) -> Source:
    return Source(leg.worker.worker_id, leg.worker.host_id, leg.worker.fingerprint)


def _place_handoff(book: Book, request: Request, now: float) -> None:
    queue, everyone, leg = book.queue, book.workers.cluster.everyone, request.prefill
    if request.park is not None:
        _keep_claim(book, request, request.park, now)
        return
    assert leg is not None
    if everyone.decoder_ids <= queue.for_handoffs.keys() and leg.worker.worker_id not in everyone.decoder_ids:
        park_if_due(book, request, now)  # nobody is left to be asked
        return
    if now < request.setbacks.not_before_s:
        return
    source, view = _source(leg), book.workers.cluster.views.get(leg.worker.worker_id)
    if leg.sealed_s is None and view is not None:
        source = view.as_prefill  # what is still to be computed is copied meanwhile
    job = _beside_others(request, request.job(len(leg.token_ids)))
    able = everyone.able(job, source)
    worker_id, ranking, kept = None, Ranking(), set[str]()
    for kept in queue.kept_from(request, source.worker_id, [view.worker_id for view in able]):
        ranking = Ranking()
        askable = _askable(request, able, kept, now, ranking)
        worker_id = policy.place_decode(job, source, askable, now, book.config.policy, ranking)
        if worker_id is not None:
            break
    if worker_id is None and queue.is_aged(request, now):
        left = [view for view in able if view.worker_id not in kept]
        worker_id = _claim(book, request, job, source, left, now)
        if job.headroom:
            worker_id = None  # it is for the router to keep that worker's last room for other tenants
    attempt = Attempt(book, request, PlacedPhase.DECODE, job, source, everyone, now)
    if worker_id is None:
        attempt.note_wait(ranking)
        park_if_due(book, request, now)
        return
    book.open_decode(request, book.workers.get(worker_id), now, attempt.choice(worker_id, ranking))


def _askable(
    request: Request, able: list[WorkerView], kept: set[str], now: float, ranking: Ranking
) -> list[WorkerView]:
    if not kept and not request.setbacks.refusals:
        return able

    def obstacle(view: WorkerView) -> WhyNot | None:
        if not request.setbacks.may_ask(view, now):
            return WhyNot.REFUSED
        return WhyNot.CLAIMED if view.worker_id in kept else None

    return policy.sift(able, obstacle, ranking.noted)


def _keep_claim(book: Book, request: Request, park: PlacedPark, now: float) -> None:
    """Keeps younger handoffs off the worker that an aged one waits for while a store takes that one over."""
    if book.queue.is_aged(request, now):
        source, job = _source(request.prefill or park), request.job(len(park.handoff.token_ids))
        able = book.workers.cluster.everyone.able(job, source)
        left = [view for view in able if view.worker_id not in book.queue.for_handoffs]
        _claim(book, request, job, source, left, now)


def _claim(
    book: Book, request: Request, job: policy.Job, source: Source, able: list[WorkerView], now: float
) -> str | None:
    """Claims the worker nearest to having room for an aged handoff. Returns it if it may be asked."""
    nearest = policy.nearest_to_room(job, source, able)
    if nearest is None:
        return None
    book.queue.claim(nearest, request)
    view = next(view for view in able if view.worker_id == nearest)
    return nearest if request.setbacks.may_ask(view, now) else None


def _start_queued(book: Book, now: float) -> None:
    """Starts queued requests in order, and goes past at most `max_overtaken` of those that find no room."""
    num_passed = num_long = 0
    for request in book.queue.starts(now):
        if num_passed > book.config.max_overtaken:
            return
        with book.isolated("placement", request, now):
            job = _beside_shorter(book, request, now)
            is_long = bool(job.kept_off)
            if is_long and num_long > book.config.max_overtaken:
                continue  # the workers that short prompts may use are not looked for in vain
            if not _start(book, request, job, now):
                num_long, num_passed = num_long + is_long, num_passed + (not is_long)


def _start(book: Book, request: Request, job: policy.Job, now: float) -> bool:
    left, ranking, config = book.queue.left_to(request), Ranking(), book.config.policy
    if must_run_unsplit(book, job):
        return start_unsplit(book, request, job, left, now)
    attempt = Attempt(book, request, PlacedPhase.PREFILL, job, None, left, now)
    worker_id = policy.place_prefill(job, left, book.handoffs_in_flight, now, config, ranking)
    weighed = weigh_unsplit(book, request, job, left, worker_id, now)
    if weighed.start():
        return True
    if worker_id is None:
        attempt.note_wait(ranking)
        worker_id = _nearest_start(book, request, job, left) if book.queue.is_aged(request, now) else None
        if worker_id is None:
            return False
    choice = attempt.choice(worker_id, ranking, split=weighed.why_split)
    book.open_prefill(request, book.workers.get(worker_id), now, choice)
    return True


def _beside_shorter(book: Book, request: Request, now: float) -> policy.Job:
    """Returns the request's job, with the workers that it leaves to shorter prompts if it is long and has not waited
    long for it."""
    job, everyone = _beside_others(request, request.next_job()), book.workers.cluster.everyone
    if not book.long_prompts.is_long(job.num_tokens) or book.queue.has_waited_long(request, now):
        return job
    views = [view for view, _ in everyone.starts(job)]
    return replace(job, kept_off=book.long_prompts.kept(job, views, now))


def _beside_others(request: Request, job: policy.Job) -> policy.Job:
    """Returns the job, with what it is to leave to other tenants if its own has more than its share."""
    headroom = request.share.headroom
    return replace(job, headroom=headroom) if headroom else job


def _nearest_start(book: Book, request: Request, job: policy.Job, left: WorkerSubset) -> str | None:
    """Returns the prefill worker on which an aged request starts; None if it claims workers instead, or finds none."""
    queue, nearest = book.queue, policy.nearest_start(job, left, book.config.policy)
    if nearest is None:
        return None
    if nearest.source_has_room and nearest.target_has_room:
        return nearest.source_id
    if job.kept_off and not nearest.source_has_room:
        queue.claim(nearest.source_id, request)  # a claim on a decode worker would keep short prompts off all others
        return None
    queue.claim(nearest.target_id, request)
    if nearest.target_has_room:
        queue.claim(nearest.source_id, request)
    return None
