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

Priority decides who goes first, then the expected length of the output, and nobody starves by it (docs/adr/0017). Of
`turn_every` starts one is a turn of those that have waited `aging_s`: the turns go round their priorities, and in each
the one that has waited longest is started. A handoff that has waited so long goes before all that have not. And a
worker where a prompt has waited so long gets only `turn_every` - 1 more prompts of higher priority until it has begun
that one, since it begins higher priorities first. Not all that have waited long go first: a flood of low priority would
then delay high ones as if there were no priorities.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from services.router import policy
from services.router.coordinator.book import Book
from services.router.coordinator.request import Phase, PlacedPrefill, Request
from services.router.coordinator.workers import Worker
from services.router.policy import (
    Fingerprint,
    HandoffsInFlight,
    LeftOut,
    PlacedPhase,
    Ranking,
    Role,
    Source,
    Split,
    WhyNot,
    WorkerSubset,
    WorkerView,
)

NOTE_S = 1.0
"""How often it is noted of a waiting request why no worker takes it, in seconds: it may be tried in every turn."""


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
    decoders = {view.worker_id for view in book.workers.views() if view.roles.can_decode} if len(book.parked) else set()
    for request in sorted(book.parked, key=lambda request: _handoffs_turn(book, request, now)):
        if decoders <= claimed and request.prefill is not None and request.prefill.worker.worker_id not in decoders:
            continue  # nobody is left to be asked
        with book.isolated("placement", request, now):
            _place_handoff(book, request, claimed, now)
    _start_queued(book, claimed, now)
    if len(book.parked) and (book.newest_leg, book.claims) != before:
        # What was placed last may have moved the claim that an earlier handoff had to leave alone.
        book.placement_is_due = True


def has_waited_long(book: Book, request: Request, now: float) -> bool:
    return now - request.waiting_since_s >= book.config.aging_s


def _is_aged(book: Book, request: Request, now: float) -> bool:
    """Returns whether the request has waited longer than others may overtake it."""
    return now - request.waiting_since_s >= book.config.overtake_limit_s


def _handoffs_turn(book: Book, request: Request, now: float) -> tuple[bool, float]:
    """Returns the sort key that puts handoffs that have waited long before the others, whose order is kept."""
    return (False, request.waiting_since_s) if has_waited_long(book, request, now) else (True, 0.0)


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
        worker.info.worker_id in request.setbacks.refusals or _is_aged(book, request, now) for request in book.parked
    )


def can_be_served(book: Book, request: Request) -> bool:
    """Returns whether a ready worker could take the request, or its parked handoff, if that worker were idle."""
    whole, leg = book.workers.cluster.whole, request.prefill
    if leg is None:
        return whole.fit(request.next_job()).can_begin
    return bool(whole.able(request.job(len(leg.token_ids)), _source(leg)))


def why_unserved(book: Book, request: Request) -> str:
    """Returns the message that tells the client why no ready worker can serve its request."""
    bound = request.next_job().fingerprint
    unbound = replace(request.next_job(), fingerprint=None)
    others = [view for view in book.workers.views() if view.fingerprint != bound]
    able = sorted({_named(view.fingerprint) for view in others if policy.can_decode(unbound, view)})
    if bound is None or not able:
        model = request.spec.model
        return f"no worker of model {model!r} that could serve this is ready; see what baton status says of them"
    return (
        f"the stream began on workers of fingerprint {_named(bound)}, and none that could go on with it is ready; "
        f"those that are compute differently: {', '.join(able)}"
    )


def _named(fingerprint: Fingerprint) -> str:
    return f"{fingerprint.short} ({fingerprint.numerics})"


def give_up_stranded(book: Book, now: float) -> None:
    """Ends leases that no ready worker could fetch, if their requests could be computed again elsewhere.

    To go on waiting for such a handoff would end the request. The lease of a request that could not be computed
    elsewhere is kept: its workers may come back.
    """
    for request in book.parked:
        with book.isolated("tick", request, now):
            can_begin = book.workers.cluster.whole.fit(request.next_job()).can_begin
            if can_begin and not can_be_served(book, request):
                book.end_prefill(request, now, "stranded")
                book.settle(request, now)


def _source(leg: PlacedPrefill) -> Source:
    return Source(leg.worker.worker_id, leg.worker.host_id, leg.worker.fingerprint)


def _place_handoff(book: Book, request: Request, claimed: set[str], now: float) -> None:
    leg = request.prefill
    assert leg is not None
    if now < request.setbacks.not_before_s:
        return
    source = _source(leg)
    job = request.job(len(leg.token_ids))
    able = book.workers.cluster.whole.able(job, source)
    # Adoption in place takes no room from the claimant of the worker, and its end may make that room.
    unclaimed = [view for view in able if view.worker_id not in claimed or view.worker_id == source.worker_id]
    ways = _ways_past_claims(book, request, source, unclaimed)
    askable = [[view for view in views if _may_ask(request, view, now)] for views in ways]
    ranking = Ranking()
    placed = (policy.place_decode(job, source, views, now, book.config.policy, ranking) for views in askable)
    worker_id = next(filter(None, placed), None)
    if worker_id is None and _is_aged(book, request, now):
        worker_id = _claim(request, job, source, ways[-1], claimed, now)
        if worker_id is not None:
            book.aged_offers[worker_id] = request
    reasons = _DecodeReasons(book, request, job, source, book.workers.cluster.whole, able)
    if worker_id is None:
        reasons.note_wait(askable[-1], now)
        return
    asked = next((views for views in askable if any(view.worker_id == worker_id for view in views)), askable[-1])
    choice = reasons.choice(worker_id, ranking, asked, now)
    book.open_decode(request, book.workers.get(worker_id), now, choice)


class _DecodeReasons:
    """Finds, for one request that a decode worker is looked for, why the others were no candidates."""

    def __init__(
        self,
        book: Book,
        request: Request,
        job: policy.Job,
        source: Source | None,
        workers: WorkerSubset,
        able: list[WorkerView],
    ) -> None:
        """`able` are those of the workers that could ever take it."""
        self._book = book
        self._request = request
        self._job = job
        self._source = source
        self._workers = workers
        self._able = able
        self._phase = PlacedPhase.WHOLE if source is None else PlacedPhase.DECODE

    def choice(
        self,
        worker_id: str,
        ranking: Ranking,
        asked: list[WorkerView],
        now: float,
        unsplit: policy.Unsplit | None = None,
    ) -> policy.PlacementChoice:
        """Returns why the worker was chosen. `asked` are those of the able ones that were not kept from it."""
        request, terms = self._request, self._book.config.policy.decode_terms
        chosen = self._workers.view(worker_id)
        return policy.explain_choice(
            self._phase,
            self._job,
            self._source,
            chosen,
            ranking,
            terms,
            now,
            waited_s=now - request.waiting_since_s,
            left_out=self._left_out(ranking.candidates or [chosen], asked, now),
            before=request.story.vain_attempt,
            unsplit=unsplit,
        )

    def note_wait(self, asked: list[WorkerView], now: float) -> None:
        if _may_note(self._request, self._phase, now):
            attempt = policy.VainAttempt(self._phase, now, self._left_out((), asked, now))
            self._request.story.vain_attempt = attempt

    def _left_out(self, candidates: Sequence[WorkerView], asked: list[WorkerView], now: float) -> policy.LeftOutWorkers:
        never = self._workers.fit(self._job).left_out_of_takers(self._source)
        claimed = [view for view in _kept_from(self._book, self._workers) if view.roles.can_decode]
        num_left_out = len(self._able) - len(candidates) + len(claimed)

        def left_out() -> Iterator[LeftOut]:
            ids, compared = {view.worker_id for view in asked}, {view.worker_id for view in candidates}
            yield from policy.left_out_of_decode(self._job, self._source, asked, compared)
            for view in self._able:
                if view.worker_id not in ids and view.worker_id not in compared:
                    was_refused = not _may_ask(self._request, view, now)
                    yield LeftOut(view.worker_id, WhyNot.REFUSED if was_refused else WhyNot.CLAIMED)
            for view in claimed:
                yield LeftOut(view.worker_id, WhyNot.CLAIMED)

        return never.joined(left_out(), num_left_out)


def _may_note(request: Request, phase: PlacedPhase, now: float) -> bool:
    """Returns whether why the request waits is to be noted again."""
    last = request.story.vain_attempt
    return last is None or last.phase is not phase or now - last.at_s >= NOTE_S


def _ways_past_claims(book: Book, request: Request, source: Source, able: list[WorkerView]) -> list[list[WorkerView]]:
    """Returns the sets of workers that a handoff may go to, the preferred set first.

    It avoids the workers that older queued requests have claimed, if any other is able. But if its source is claimed
    too, all workers are allowed in the end: the claimant waits for the blocks that the handoff holds there, and each
    of the two would wait for the other.
    """
    older = {worker_id for worker_id, claimant in book.claims.items() if claimant.order < request.order}
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
    """Keeps, for one walk over the queue, the workers that aged requests have claimed and those left to others."""

    def __init__(self, book: Book, for_handoffs: set[str], now: float) -> None:
        """`for_handoffs` holds the workers that parked handoffs have claimed."""
        self.for_handoffs = for_handoffs
        self.now = now
        self._book = book
        book.claims = {}
        self._claimed: frozenset[str] = frozenset()
        self._must_not_overtake = book.must_not_overtake()

    def in_turn(self) -> Iterator[Request]:
        """Yields the queue in order, and a request that has waited long when the next start is its turn.

        It is to be started, or not, before the next is asked for.
        """
        book, first = self._book, None
        waiting: Sequence[Request] | None = None  # those that may have a turn; most walks have none
        for request in book.queue:
            is_turn = book.turns.num_starts >= book.config.turn_every - 1
            if is_turn and waiting != [] and (first is None or first.phase is not Phase.QUEUED):
                if waiting is None:
                    waiting = [each for each in book.queue if has_waited_long(book, each, self.now)]
                waiting = [each for each in waiting if each.phase is Phase.QUEUED and not self.passes_over(each)]
                first = min(waiting, key=book.turns.order, default=None)
                if first is not None:
                    yield first
                    if first.phase is not Phase.QUEUED:  # else it has found no room, and the turn stays its own
                        book.turns.taken(first.spec.priority)
            if request is not first and request.phase is Phase.QUEUED:
                yield request
                book.turns.num_starts += request.phase is not Phase.QUEUED

    def left_to(self, request: Request) -> WorkerSubset:
        """Returns the workers that no queued request has claimed, and where it would not overtake too often."""
        kept = self._must_not_overtake
        barred = {worker_id for worker_id, priority in kept.items() if priority < request.spec.priority}
        return self._book.workers.cluster.without(self._claimed | barred)

    @property
    def is_over(self) -> bool:
        """Returns whether every worker is claimed, or none is ready."""
        return not self._book.workers.cluster.without(self._claimed).longest_sequence

    def passes_over(self, request: Request) -> bool:
        """Returns whether the request is not to be placed now, and holds up nobody."""
        return self.now < request.setbacks.not_before_s or self._is_out_of_reach(request)

    def note_start(self) -> None:
        """Looks again at who must not be overtaken: a start may have been one too many."""
        if self._book.overtaken_at:
            self._must_not_overtake = self._book.must_not_overtake()

    def claim(self, worker_id: str, request: Request) -> None:
        self._book.claims[worker_id] = request
        self._claimed = frozenset(self._book.claims)

    def _is_out_of_reach(self, request: Request) -> bool:
        """Returns whether no unclaimed worker could hold the request, even if all were idle.

        It only compares a few numbers, since the queue may have a thousand such requests.
        """
        left, num_tokens = self.left_to(request), len(request.spec.token_ids)
        if num_tokens + request.max_tokens > left.longest_sequence:
            return True
        # Every worker that could prefill it is claimed.
        return left.longest_prompt <= num_tokens < self._book.workers.cluster.whole.longest_prompt

    def must_go_on_elsewhere(self, request: Request) -> bool:
        """Returns whether the request has output, and no unclaimed worker may go on with it."""
        return bool(request.output) and not self.left_to(request).fit(request.next_job()).can_begin


def _start_queued(book: Book, for_handoffs: set[str], now: float) -> None:
    """Starts queued requests in order, and goes past at most `max_overtaken` of those that find no room."""
    line = _Line(book, for_handoffs, now)
    num_passed = num_long = 0
    for request in line.in_turn():
        if line.is_over or num_passed > book.config.max_overtaken:
            return
        if line.passes_over(request):
            continue
        is_long = book.long_prompts.is_long(len(request.spec.token_ids))
        if is_long and num_long > book.config.max_overtaken:
            continue  # the workers that short prompts may use are not looked for in vain
        with book.isolated("placement", request, now):
            if not line.must_go_on_elsewhere(request) and not _start(book, request, line):
                num_long, num_passed = num_long + is_long, num_passed + (not is_long)


def _start(book: Book, request: Request, line: _Line) -> bool:
    job, config = _beside_shorter(book, request, line.now), book.config.policy
    left, ranking = line.left_to(request), Ranking()
    fit = book.workers.cluster.whole.fit(job)
    if not fit.can_hand_over:
        return _start_whole(book, request, job, left, line)
    if book.config.split is Split.NEVER and fit.decoders:
        return _start_whole(book, request, job, left, line, policy.Unsplit(policy.WhyWhole.NEVER))
    worker_id = policy.place_prefill(job, left, book.handoffs_in_flight, line.now, config, ranking)
    if _start_unsplit(book, request, job, left, line, worker_id):
        return True
    if worker_id is None:
        if _may_note(request, PlacedPhase.PREFILL, line.now):
            left_out = _left_out_of_start(book, job, left, ())
            request.story.vain_attempt = policy.VainAttempt(PlacedPhase.PREFILL, line.now, left_out)
        worker_id = _nearest_start(request, job, left, line, config) if _is_aged(book, request, line.now) else None
        if worker_id is None:
            return False
    chosen = left.view(worker_id)
    choice = policy.explain_choice(
        PlacedPhase.PREFILL,
        job,
        None,
        chosen,
        ranking,
        config.prefill_terms,
        line.now,
        waited_s=line.now - request.waiting_since_s,
        left_out=_left_out_of_start(book, job, left, ranking.candidates or [chosen]),
        before=request.story.vain_attempt,
    )
    book.open_prefill(request, book.workers.get(worker_id), line.now, choice)
    line.note_start()
    return True


def _start_unsplit(
    book: Book, request: Request, job: policy.Job, left: WorkerSubset, line: _Line, prefill_id: str | None
) -> bool:
    """Starts the whole sequence on a decode worker, if that costs less than to run its prompt on `prefill_id`: None if
    no prefill worker has room now."""
    if book.config.split is not Split.AUTO:
        return False
    source = policy.shortest_queue(job, left, book.handoffs_in_flight) if prefill_id is None else left.view(prefill_id)
    if source is None or source.roles is Role.MIXED or not source.load.ms_per_prefill_token:
        return False
    whole = _WholeStart(book, request, job, left, line)
    if whole.worker_id is None:
        return False
    handoff_ms = book.workers.handoff_ms(source.worker_id, whole.worker_id, line.now)
    costs = policy.split_costs(job, source, left.view(whole.worker_id), handoff_ms, book.output_lengths.median or 1)
    if costs is None or costs.splits:
        if prefill_id is not None:
            book.workers.handoff_tried(prefill_id, whole.worker_id, line.now)
        return False
    whole.open(policy.Unsplit(costs.why_whole, source.worker_id, costs))
    return True


def _beside_shorter(book: Book, request: Request, now: float) -> policy.Job:
    """Returns the request's job, with the workers that it leaves to shorter prompts if it is long and has not waited
    long for it."""
    job, whole = request.next_job(), book.workers.cluster.whole
    if not book.long_prompts.is_long(job.num_tokens) or has_waited_long(book, request, now):
        return job
    views = [whole.view(start.worker_id) for start in whole.fit(job).starts]
    return replace(job, kept_off=book.long_prompts.kept(job.num_tokens, views, now))


def _left_out_of_start(
    book: Book, job: policy.Job, left: WorkerSubset, candidates: Sequence[WorkerView]
) -> policy.LeftOutWorkers:
    return policy.left_out_of_start(job, left, _kept_from(book, left), candidates, book.config.policy)


def _kept_from(book: Book, left: WorkerSubset) -> list[WorkerView]:
    """Returns the workers that are not among those left to a request: others that have waited long need them."""
    whole = book.workers.cluster.whole
    if left is whole:
        return []
    ids = {view.worker_id for view in left.views()}
    return [view for view in whole.views() if view.worker_id not in ids]


def _nearest_start(
    request: Request, job: policy.Job, left: WorkerSubset, line: _Line, config: policy.PolicyConfig
) -> str | None:
    """Returns the prefill worker on which an aged request starts; None if it claims workers instead, or finds none."""
    nearest = policy.nearest_start(job, left, config)
    if nearest is None:
        return None
    if nearest.source_has_room and nearest.target_has_room:
        return nearest.source_id
    if job.kept_off and not nearest.source_has_room:
        line.claim(nearest.source_id, request)  # a claim on a decode worker would keep short prompts off all others
        return None
    line.claim(nearest.target_id, request)
    if nearest.target_has_room:
        line.claim(nearest.source_id, request)
    return None


def split_break_even(book: Book, now: float) -> policy.BreakEven | None:
    """Returns the break-even between the workers that a prompt would be placed on now; None as for
    `Coordinator.split_break_even`."""
    if book.config.split is not Split.AUTO:
        return None
    workers = book.workers.cluster.whole
    model = next((view.model for view in workers.views()), "")
    job = policy.Job(num_tokens=1, total_tokens=2, model=model)
    source = policy.shortest_queue(job, workers, HandoffsInFlight())
    decode_id = policy.place_decode(job, None, workers.able(job, None), now, book.config.policy)
    if source is None or source.roles is Role.MIXED or decode_id is None:
        return None
    handoff_ms = book.workers.handoff_ms(source.worker_id, decode_id, now)
    return policy.break_even(source, workers.view(decode_id), handoff_ms, book.output_lengths.median or 1)


class _WholeStart:
    """Finds the decode worker for a whole sequence."""

    def __init__(self, book: Book, request: Request, job: policy.Job, left: WorkerSubset, line: _Line) -> None:
        self.able = left.able(job, None)
        self._askable = [
            view for view in self.able if view.worker_id not in line.for_handoffs and _may_ask(request, view, line.now)
        ]
        self._ranking = Ranking()
        self.worker_id = policy.place_decode(job, None, self._askable, line.now, book.config.policy, self._ranking)
        self._book, self._request, self._line = book, request, line
        self._reasons = _DecodeReasons(book, request, job, None, left, self.able)

    def open(self, unsplit: policy.Unsplit | None = None) -> None:
        """Starts it there. `unsplit` says why as a whole, if its prompt could have run apart."""
        assert self.worker_id is not None
        book, line = self._book, self._line
        choice = self._reasons.choice(self.worker_id, self._ranking, self._askable, line.now, unsplit)
        book.open_decode(self._request, book.workers.get(self.worker_id), line.now, choice)
        line.note_start()

    def note_wait(self) -> None:
        self._reasons.note_wait(self._askable, self._line.now)


def _start_whole(
    book: Book,
    request: Request,
    job: policy.Job,
    left: WorkerSubset,
    line: _Line,
    unsplit: policy.Unsplit | None = None,
) -> bool:
    """Starts the whole sequence on a decode worker: no prefill worker is there, or it is too long for them all, or
    nothing is to be split.

    Returns False if no decode worker has room; an aged request then claims the nearest one.
    """
    whole = _WholeStart(book, request, job, left, line)
    if whole.worker_id is not None:
        whole.open(unsplit)
        return True
    whole.note_wait()
    if _is_aged(book, request, line.now) and (nearest := policy.nearest_to_room(job, None, whole.able)) is not None:
        line.claim(nearest, request)
    return False


def _may_ask(request: Request, view: WorkerView, now: float) -> bool:
    refusal = request.setbacks.refusals.get(view.worker_id)
    if refusal is None:
        return True
    # The numbers are compared for difference, since a worker that has restarted counts from 1 again.
    if view.load.sequence_number == refusal.load.sequence_number:
        return False
    # One that has more room is asked at once: if it is claimed, nobody else is, and it would stand idle until then.
    return now >= refusal.retry_at_s or view.load.shows_more_room_than(refusal.load)
