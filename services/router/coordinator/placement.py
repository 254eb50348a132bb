"""Places what waits: parked handoffs first, then the queue, each in order. Pure.

Owns: the order in which placements are tried, that no request starves, and that none holds up requests that other
workers could serve. Never: how good a worker is (`services.router.policy`).

Whatever has waited longer than `overtake_limit_s` is *aged*. An aged handoff claims the worker nearest to having room,
and younger ones do not use that worker. The handoff is offered there again and again: its age tells the worker to keep
room for it, and the worker knows its room better than its snapshot does.

An aged request of the queue claims the decode worker nearest to having room and, once that one has room, the prefill
worker nearest to having room. Younger requests are not placed where they would need a claimed worker, so
its room only grows until the claimant starts; the rest of the queue goes on. Handoffs go before the queue, since they
hold blocks that the queue may wait for. A handoff avoids a worker that an older request has claimed as long as another
worker could ever take it; but if its source is claimed too, it may go anywhere, since the claimant waits for its
blocks.

A request that no ready worker could serve, even an idle one, is passed over: it neither claims nor holds up others.

Which tenant's line of the queue goes on is decided by shares (`policy/shares.py`). Within it priority decides who goes
first, then the expected length of the output, and nobody starves by it (docs/adr/0017). Of `turn_every` starts of a
tenant one is a turn of those that have waited `aging_s`: the turns go round their priorities, and in each
the one that has waited longest is started. A handoff that has waited so long goes before all that have not. And a
worker where a prompt has waited so long gets only `turn_every` - 1 more prompts of higher priority until it has begun
that one, since it begins higher priorities first. Not all that have waited long go first: a flood of low priority would
then delay high ones as if there were no priorities.
"""

from __future__ import annotations

from dataclasses import replace

from services.router import policy
from services.router.coordinator.attempt import Attempt
from services.router.coordinator.book import Book
from services.router.coordinator.parking import park_if_due
from services.router.coordinator.request import Phase, PlacedPark, PlacedPrefill, Request
from services.router.coordinator.unsplit import must_run_unsplit, start_unsplit, weigh_unsplit
from services.router.coordinator.walk import Walk, has_waited_long, is_aged
from services.router.coordinator.workers import Worker
from services.router.policy import PlacedPhase, Ranking, Source, Split, WhyNot, WorkerSubset, WorkerView


def place_all(book: Book, now: float) -> None:
    if not len(book.parked) and not len(book.queue):
        book.claims = {}
        return
    if book.claims:  # a claim ends with the wait of its claimant
        book.claims = {
            worker_id: claimant for worker_id, claimant in book.claims.items() if claimant.phase is Phase.QUEUED
        }
    before = (book.newest_leg, book.claims)
    claimed = _with_aged_offers(book)
    decoders = book.workers.cluster.everyone.decoder_ids
    for request in sorted(book.parked, key=lambda request: _handoffs_turn(book, request, now)):
        if request.phase is not Phase.PARKED:
            continue  # a defect has ended it, with another part of the same request
        if request.park is not None:
            with book.isolated("placement", request, now):
                _keep_claim(book, request, request.park, claimed, now)
            continue
        if decoders <= claimed and request.prefill is not None and request.prefill.worker.worker_id not in decoders:
            with book.isolated("placement", request, now):  # nobody is left to be asked
                park_if_due(book, request, now)
            continue
        with book.isolated("placement", request, now):
            _place_handoff(book, request, claimed, now)
    _start_queued(book, claimed, now)
    # What was placed last may have moved the claim that an earlier handoff had to leave alone, or taken the worker on
    # which an earlier request would have cost more than apart from its decode.
    may_go_now = len(book.parked) or (len(book.queue) and book.config.split is Split.AUTO)
    if may_go_now and (book.newest_leg, book.claims) != before:
        book.placement_is_due = True


def _handoffs_turn(book: Book, request: Request, now: float) -> tuple[bool, bool, float]:
    """Returns the sort key that puts handoffs of tenants that were behind their shares before the others, and of each
    of the two those that have waited long, before the rest, whose order is kept."""
    has_waited = has_waited_long(book, request, now)
    return not request.goes_ahead, not has_waited, request.waiting_since_s if has_waited else 0.0


def _with_aged_offers(book: Book) -> set[str]:
    """Returns the workers that have not yet answered whether they take an aged handoff, and drops the offers that are
    answered. Such a worker stays claimed: until it has room for that one it refuses younger ones, and to offer it all
    that wait, one after the other, would ask as many questions at each of its snapshots."""
    book.aged_offers = {
        worker_id: request
        for worker_id, request in book.aged_offers.items()
        if request.phase is Phase.BINDING
        and request.decode is not None
        and request.decode.worker.worker_id == worker_id
    }
    return set(book.aged_offers)


def may_be_asked_again(book: Book, worker: Worker, now: float) -> bool:
    """Returns whether a new snapshot of the worker may place a parked handoff even if it shows no more room.

    The worker has refused the handoff, and after a new snapshot it is asked again. Or the handoff is aged: it is
    offered to the worker nearest to having room, and which one that is changes with every snapshot.
    """
    return any(
        worker.info.worker_id in request.setbacks.refusals or is_aged(book, request, now) for request in book.parked
    )


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
    for request in book.parked:
        with book.isolated("tick", request, now):
            can_begin = book.workers.cluster.everyone.fit(request.next_job()).can_begin
            if request.park is None and can_begin and not can_be_served(book, request):
                book.end_prefill(request, now, "stranded")
                book.settle(request, now)


def _source(leg: PlacedPrefill | PlacedPark) -> Source:
    return Source(leg.worker.worker_id, leg.worker.host_id, leg.worker.fingerprint)


def _place_handoff(book: Book, request: Request, claimed: set[str], now: float) -> None:
    leg = request.prefill
    assert leg is not None
    if now < request.setbacks.not_before_s:
        return
    source, view = _source(leg), book.workers.cluster.views.get(leg.worker.worker_id)
    if leg.sealed_s is None and view is not None:
        source = view.as_prefill  # what is still to be computed is copied meanwhile
    job = _beside_others(request, request.job(len(leg.token_ids)))
    everyone = book.workers.cluster.everyone
    able = everyone.able(job, source)
    worker_id, ranking, claims = None, Ranking(), set[str]()
    for claims in _claims_to_respect(book, request, source, able, claimed):
        ranking = Ranking()
        askable = _askable(request, able, claims, now, ranking)
        worker_id = policy.place_decode(job, source, askable, now, book.config.policy, ranking)
        if worker_id is not None:
            break
    if worker_id is None and is_aged(book, request, now):
        left = [view for view in able if view.worker_id not in claims]
        worker_id = _claim(request, job, source, left, claimed, now)
        if job.headroom:
            worker_id = None  # it is for the router to keep that worker's last room for other tenants
        if worker_id is not None:
            book.aged_offers[worker_id] = request
    attempt = Attempt(book, request, PlacedPhase.DECODE, job, source, everyone, now)
    if worker_id is None:
        attempt.note_wait(ranking)
        park_if_due(book, request, now)
        return
    book.open_decode(request, book.workers.get(worker_id), now, attempt.choice(worker_id, ranking))


def _askable(
    request: Request, able: list[WorkerView], claims: set[str], now: float, ranking: Ranking
) -> list[WorkerView]:
    if not claims and not request.setbacks.refusals:
        return able

    def obstacle(view: WorkerView) -> WhyNot | None:
        if not request.setbacks.may_ask(view, now):
            return WhyNot.REFUSED
        return WhyNot.CLAIMED if view.worker_id in claims else None

    return policy.sift(able, obstacle, ranking.noted)


def _keep_claim(book: Book, request: Request, park: PlacedPark, claimed: set[str], now: float) -> None:
    """Keeps younger handoffs off the worker that an aged one waits for while a store takes that one over."""
    if is_aged(book, request, now):
        source, job = _source(request.prefill or park), request.job(len(park.handoff.token_ids))
        able = book.workers.cluster.everyone.able(job, source)
        _claim(request, job, source, [view for view in able if view.worker_id not in claimed], claimed, now)


def _claims_to_respect(
    book: Book, request: Request, source: Source, able: list[WorkerView], claimed: set[str]
) -> list[set[str]]:
    """Returns the sets of claimed workers that a handoff may be kept off, one after the other until it finds room.

    Adoption in place takes no room from the claimant of the worker in `claimed`, and its end may make that room. The
    handoff avoids the workers that older queued requests have claimed, if any other is able. But if its source is
    claimed by one too, all workers are allowed in the end: the claimant waits for the blocks that the handoff holds
    there, and each of the two would wait for the other.
    """
    by_handoffs = claimed - {source.worker_id}
    older = {worker_id for worker_id, claimant in book.claims.items() if claimant.order < request.order}
    claims = by_handoffs | older
    if all(view.worker_id in claims for view in able):
        return [by_handoffs]
    return [claims, by_handoffs] if source.worker_id in older else [claims]


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
    return nearest if request.setbacks.may_ask(view, now) else None


def _start_queued(book: Book, for_handoffs: set[str], now: float) -> None:
    """Starts queued requests in order, and goes past at most `max_overtaken` of those that find no room."""
    walk = Walk(book, for_handoffs, now)
    num_passed = num_long = 0
    for request in walk.in_turn():
        if walk.is_over or num_passed > book.config.max_overtaken:
            return
        if walk.passes_over(request):
            continue
        with book.isolated("placement", request, now):
            is_long = bool(_beside_shorter(book, request, now).kept_off)
            if is_long and num_long > book.config.max_overtaken:
                continue  # the workers that short prompts may use are not looked for in vain
            if not walk.must_go_on_elsewhere(request) and not _start(book, request, walk):
                num_long, num_passed = num_long + is_long, num_passed + (not is_long)


def _start(book: Book, request: Request, walk: Walk) -> bool:
    job, config = _beside_shorter(book, request, walk.now), book.config.policy
    left, ranking = walk.left_to(request), Ranking()
    if must_run_unsplit(book, job):
        return start_unsplit(book, request, job, left, walk)
    attempt = Attempt(book, request, PlacedPhase.PREFILL, job, None, left, walk.now)
    worker_id = policy.place_prefill(job, left, book.handoffs_in_flight, walk.now, config, ranking)
    weighed = weigh_unsplit(book, request, job, left, walk, worker_id)
    if weighed.start():
        return True
    if worker_id is None:
        attempt.note_wait(ranking)
        worker_id = _nearest_start(request, job, left, walk, config) if is_aged(book, request, walk.now) else None
        if worker_id is None:
            return False
    choice = attempt.choice(worker_id, ranking, split=weighed.why_split)
    book.open_prefill(request, book.workers.get(worker_id), walk.now, choice)
    walk.note_start()
    return True


def _beside_shorter(book: Book, request: Request, now: float) -> policy.Job:
    """Returns the request's job, with the workers that it leaves to shorter prompts if it is long and has not waited
    long for it."""
    job, everyone = _beside_others(request, request.next_job()), book.workers.cluster.everyone
    if not book.long_prompts.is_long(job.num_tokens) or has_waited_long(book, request, now):
        return job
    views = [view for view, _ in everyone.starts(job)]
    return replace(job, kept_off=book.long_prompts.kept(job, views, now))


def _beside_others(request: Request, job: policy.Job) -> policy.Job:
    """Returns the job, with what it is to leave to other tenants if its own has more than its share."""
    headroom = request.share.headroom
    return replace(job, headroom=headroom) if headroom else job


def _nearest_start(
    request: Request, job: policy.Job, left: WorkerSubset, walk: Walk, config: policy.PolicyConfig
) -> str | None:
    """Returns the prefill worker on which an aged request starts; None if it claims workers instead, or finds none."""
    nearest = policy.nearest_start(job, left, config)
    if nearest is None:
        return None
    if nearest.source_has_room and nearest.target_has_room:
        return nearest.source_id
    if job.kept_off and not nearest.source_has_room:
        walk.claim(nearest.source_id, request)  # a claim on a decode worker would keep short prompts off all others
        return None
    walk.claim(nearest.target_id, request)
    if nearest.target_has_room:
        walk.claim(nearest.source_id, request)
    return None
