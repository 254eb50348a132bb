"""Starts sequences unsplit: one worker computes the prompt and decodes. Pure.

Owns: whether a prompt that could run apart from its decode does, and the search for the worker if it does not. Never:
what either way costs (`services.router.policy.splitting`), or where a split prompt runs (`placement.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from services.router import policy
from services.router.coordinator.attempt import Attempt
from services.router.coordinator.book import Book
from services.router.coordinator.request import Request
from services.router.policy import HandoffsInFlight, Ranking, Role, Split, WhyNot, WhySplit, WorkerSubset, WorkerView


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
