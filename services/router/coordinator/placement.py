"""Places what waits: each request and handoff in the order of the queue (`queue.py`), where it finds room. Pure.

Owns: what a placement tries, one thing after the other: a prompt apart from its decode or both on one worker, a handoff
at a decode worker or in a store; what an aged request claims that finds no room; and the record of who was chosen and
why, or why nobody was. Never: who is next, what a worker costs and how good it is (`services.router.policy`), or what
becomes of what was placed (`handoff.py`, `parking.py`).

An aged handoff claims the worker nearest to having room, and is offered there again and again: its age tells the worker
to keep room for it, and the worker knows its room better than its snapshot does. An aged request of the queue claims
the decode worker nearest to having room and, once that one has room, the prefill worker nearest to having room. A
request that no ready worker could serve, even an idle one, is passed over: it neither claims nor holds up others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.router import policy
from services.router.coordinator.book import Book
from services.router.coordinator.request import PlacedPark, PlacedPrefill, Request
from services.router.policy import (
    HandoffsInFlight,
    PlacedPhase,
    Ranking,
    Role,
    Source,
    Split,
    WhyNot,
    WhySplit,
    WorkerSubset,
    WorkerView,
)

NOTE_S = 1.0
"""How often it is noted of a waiting request why no worker takes it, in seconds: it may be tried in every turn."""

_ROLES = {
    PlacedPhase.PREFILL: Role.PREFILL,
    PlacedPhase.DECODE: Role.DECODE,
    PlacedPhase.UNSPLIT: Role.DECODE,
    PlacedPhase.PARK: Role.STORE,
}


@dataclass(slots=True, eq=False)
class Attempt:
    """Describes one attempt to place a request."""

    book: Book
    request: Request
    phase: PlacedPhase
    job: policy.Job
    source: Source | None
    workers: WorkerSubset
    """The workers that are left to the request."""
    now: float

    def choice(
        self,
        worker_id: str,
        ranking: Ranking,
        unsplit: policy.Unsplit | None = None,
        split: policy.SplitAfterAll | None = None,
    ) -> policy.PlacementChoice:
        """Returns why the worker was chosen."""
        config = self.book.config.policy
        terms = config.prefill_terms if self.phase is PlacedPhase.PREFILL else config.decode_terms
        terms = policy.PARK_TERMS if self.phase is PlacedPhase.PARK else terms
        return policy.explain_choice(
            self.phase,
            self.job,
            self.source,
            self.workers.view(worker_id),
            ranking,
            terms,
            self.now,
            waited_s=self.now - self.request.waiting_since_s,
            left_out=self._left_out(ranking, worker_id),
            before=self.request.story.vain_attempt,
            unsplit=unsplit,
            split=split,
        )

    def note_wait(self, ranking: Ranking) -> None:
        """Notes why nobody was chosen, if that was not noted just now."""
        last = self.request.story.vain_attempt
        if last is None or last.phase is not self.phase or self.now - last.at_s >= NOTE_S:
            attempt = policy.VainAttempt(self.phase, self.now, self._left_out(ranking))
            self.request.story.vain_attempt = attempt

    def _left_out(self, ranking: Ranking, chosen_id: str = "") -> policy.LeftOutWorkers:
        """Returns all with the role of the phase that were no candidates. One may be chosen that was none, since the
        request has waited too long."""
        reasons = {worker_id: why for worker_id, why in ranking.left_out.items() if worker_id != chosen_id}
        reasons.update((view.worker_id, WhyNot.CLAIMED) for view in self._not_left())
        return self.workers.fit(self.job).left_out(self.phase, self.source).after(reasons)

    def _not_left(self) -> list[WorkerView]:
        """Returns the workers with the role that are not left to the request: others that have waited long need
        them."""
        everyone = self.book.workers.cluster.everyone
        if self.workers is everyone:
            return []
        role, ids = _ROLES[self.phase], {view.worker_id for view in self.workers.views()}
        return [view for view in everyone.views() if view.worker_id not in ids and role in view.roles]


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
        _park_if_due(book, request, now)  # nobody is left to be asked
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
        _park_if_due(book, request, now)
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


def must_run_unsplit(book: Book, job: policy.Job) -> bool:
    """Returns whether the prompt cannot run apart from its decode: no prefill worker is there, or it is too long for
    them all, or nothing is to be split."""
    fit = book.workers.cluster.everyone.fit(job)
    return not fit.can_hand_over or (book.config.split is Split.NEVER and bool(fit.decoders))


def start_unsplit(book: Book, request: Request, job: policy.Job, left: WorkerSubset, now: float) -> bool:
    """Starts the sequence, which must run unsplit, on a decode worker.

    Returns False if no decode worker has room; an aged request then claims the nearest one.
    """
    start = _UnsplitStart(book, request, job, left, now)
    if start.worker_id is not None:
        could_be_split = book.workers.cluster.everyone.fit(job).can_hand_over
        start.open(policy.Unsplit(policy.WhyUnsplit.NEVER) if could_be_split else None)
        return True
    start.note_wait()
    if book.queue.is_aged(request, now) and (nearest := policy.nearest_to_room(job, None, start.able)) is not None:
        book.queue.claim(nearest, request)
    return False


@dataclass(frozen=True, slots=True)
class Weighed:
    """Holds what came of weighing both ways of one sequence."""

    why_split: policy.SplitAfterAll | None = None
    """Why its prompt is to run apart; None if it is not, or nothing was weighed."""
    _start: _UnsplitStart | None = None
    _why_unsplit: policy.Unsplit | None = None

    def start(self) -> bool:
        """Starts the sequence unsplit on a decode worker if that costs less. Returns whether it did."""
        if self._start is not None:
            self._start.open(self._why_unsplit)
        return self._start is not None


def weigh_unsplit(
    book: Book, request: Request, job: policy.Job, left: WorkerSubset, prefill_id: str | None, now: float
) -> Weighed:
    """Compares what it costs to run all of the sequence on a decode worker with what it costs to run its prompt on
    `prefill_id`: None if no prefill worker has room now."""
    if book.config.split is not Split.AUTO:
        return Weighed()
    source = policy.shortest_queue(job, left, book.handoffs_in_flight) if prefill_id is None else left.view(prefill_id)
    if source is None or source.roles is Role.MIXED:
        return Weighed()
    if not source.load.ms_per_prefill_token:
        return Weighed(policy.SplitAfterAll(WhySplit.UNKNOWN))
    start = _UnsplitStart(book, request, job, left, now, beside=book.unoffered_handoffs)
    if start.worker_id is None:
        return Weighed(policy.SplitAfterAll(WhySplit.NO_ROOM))
    taker_id = _taker(book, job, source, left, now) or start.worker_id
    copied = left.view(taker_id).uncached_tokens(job)
    handoff_ms = book.workers.handoff_ms(source.as_prefill, taker_id, copied, now)
    costs = policy.split_costs(job, source, left.view(start.worker_id), handoff_ms, book.output_lengths.median or 1)
    if costs is None or costs.splits:
        if prefill_id is not None:
            book.workers.handoff_tried(prefill_id, taker_id, now)
        why = WhySplit.UNKNOWN if costs is None else WhySplit.CHEAPER
        return Weighed(policy.SplitAfterAll(why, start.worker_id, costs))
    return Weighed(None, start, policy.Unsplit(costs.why_unsplit, source.worker_id, costs))


def _taker(book: Book, job: policy.Job, prefill: WorkerView, workers: WorkerSubset, now: float) -> str | None:
    """Returns the decode worker that would be chosen for the handoff if it came now; None if none has room."""
    source = prefill.as_prefill
    return policy.place_decode(job, source, workers.able(job, source), now, book.config.policy)


def split_break_even(book: Book, now: float) -> policy.BreakEven | None:
    """Returns the break-even between the workers that a prompt would be placed on now; None as for
    `Coordinator.split_break_even`."""
    if book.config.split is not Split.AUTO:
        return None
    workers = book.workers.cluster.everyone
    model = next((view.model for view in workers.views()), "")
    job = policy.Job(num_tokens=1, total_tokens=2, model=model)
    source = policy.shortest_queue(job, workers, HandoffsInFlight())
    decode_id = policy.place_decode(job, None, workers.able(job, None), now, book.config.policy)
    if source is None or source.roles is Role.MIXED or decode_id is None:
        return None
    taker_id = _taker(book, job, source, workers, now) or decode_id

    def handoff_ms(num_tokens: float) -> float | None:
        return book.workers.handoff_ms(source.as_prefill, taker_id, num_tokens, now)

    found = policy.break_even(source, workers.view(decode_id), handoff_ms, book.output_lengths.median or 1)
    return replace(found, decode_id=taker_id) if found is not None else None


class _UnsplitStart:
    """Finds the decode worker for a sequence that is not split."""

    def __init__(
        self,
        book: Book,
        request: Request,
        job: policy.Job,
        left: WorkerSubset,
        now: float,
        beside: HandoffsInFlight | None = None,
    ) -> None:
        """`beside` are handoffs whose room it must not take; one that has no other way need not wait for these."""
        self.able = left.able(job, None)
        roomy = [view for view in self.able if view.worker_id not in book.queue.for_handoffs]
        if beside is not None:
            roomy = policy.beside_handoffs(job, roomy, beside, book.output_lengths.median or 1)
        roomy_ids = {view.worker_id for view in roomy}

        def obstacle(view: WorkerView) -> WhyNot | None:
            if not request.setbacks.may_ask(view, now):
                return WhyNot.REFUSED
            if view.worker_id in roomy_ids:
                return None
            if view.worker_id in book.queue.for_handoffs:
                return WhyNot.CLAIMED
            return policy.decode_shortage(job, None, view) or WhyNot.RESERVED

        self._ranking = Ranking()
        askable = policy.sift(self.able, obstacle, self._ranking.noted)
        config = book.config.policy
        lenders = left.lenders(config)
        self.worker_id = policy.place_decode(job, None, askable, now, config, self._ranking, lenders)
        self._attempt = Attempt(book, request, policy.PlacedPhase.UNSPLIT, job, None, left, now)

    def open(self, unsplit: policy.Unsplit | None = None) -> None:
        """Starts it there. `unsplit` says why, if its prompt could have run apart."""
        assert self.worker_id is not None
        attempt = self._attempt
        book, choice = attempt.book, attempt.choice(self.worker_id, self._ranking, unsplit)
        book.open_decode(attempt.request, book.workers.get(self.worker_id), attempt.now, choice)

    def note_wait(self) -> None:
        self._attempt.note_wait(self._ranking)


def _park_if_due(book: Book, request: Request, now: float) -> None:
    """Sends the request's handoff to a store, if it is time and one has room. It is called where no decode worker can
    take the handoff now.

    The handoff of a mixed worker stays there, since that worker can adopt it without a copy.
    """
    leg, workers = request.prefill, book.workers.cluster.everyone
    if not workers.has_stores or leg is None or leg.sealed_s is None or leg.worker.roles is not Role.PREFILL:
        return
    if request.park is not None or now - max(leg.sealed_s, request.waiting_since_s) < book.config.park_after_s:
        return
    ranking = Ranking()
    source = Source(leg.worker.worker_id, leg.worker.host_id, leg.worker.fingerprint)
    job = request.job(len(leg.token_ids))

    def obstacle(store: WorkerView) -> WhyNot | None:
        if (why := policy.park_shortage(job, store)) is not None:
            return why
        if not request.setbacks.may_ask(store, now):
            return WhyNot.REFUSED
        return None if workers.able(job, store.as_source) else WhyNot.NO_TAKER

    able = policy.sift(workers.keepers(job, source), obstacle, ranking.noted)
    store_id = policy.place_park(job, source, able, now, ranking)
    if store_id is not None:
        attempt = Attempt(book, request, PlacedPhase.PARK, job, source, workers, now)
        book.open_park(request, book.workers.get(store_id), now, attempt.choice(store_id, ranking))
