"""Says, for one request, which workers were no candidates when it was placed, and why. Pure.

Owns: the record of a choice or of a vain attempt, with what the coordinator adds to it: claims, refusals, and workers
that were not left to the request. Never: the choice (`placement.py`, `unsplit.py`), or what policy's filters say of a
worker (`services.router.policy`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from services.router import policy
from services.router.coordinator.book import Book
from services.router.coordinator.request import Request
from services.router.policy import LeftOut, PlacedPhase, Ranking, Source, WhyNot, WorkerSubset, WorkerView

NOTE_S = 1.0
"""How often it is noted of a waiting request why no worker takes it, in seconds: it may be tried in every turn."""


class DecodeReasons:
    """Finds, for one request that a decode worker is looked for, why the others were no candidates."""

    def __init__(
        self,
        book: Book,
        request: Request,
        job: policy.Job,
        source: Source | None,
        workers: WorkerSubset,
        able: list[WorkerView],
        reserved: Collection[str] = (),
    ) -> None:
        """`able` are those of the workers that could ever take it. The room of the `reserved` ones is for handoffs."""
        self._book = book
        self._request = request
        self._job = job
        self._source = source
        self._workers = workers
        self._able = able
        self._reserved = reserved
        self._phase = PlacedPhase.UNSPLIT if source is None else PlacedPhase.DECODE

    def choice(
        self,
        worker_id: str,
        ranking: Ranking,
        asked: list[WorkerView],
        now: float,
        unsplit: policy.Unsplit | None = None,
    ) -> policy.PlacementChoice:
        """Returns why the worker was chosen. `asked` are those of the able ones that may be asked now."""
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
        if may_note(self._request, self._phase, now):
            attempt = policy.VainAttempt(self._phase, now, self._left_out((), asked, now))
            self._request.story.vain_attempt = attempt

    def _left_out(self, candidates: Sequence[WorkerView], asked: list[WorkerView], now: float) -> policy.LeftOutWorkers:
        never = self._workers.fit(self._job).left_out_of_takers(self._source)
        claimed = [view for view in _not_left_to(self._book, self._workers) if view.roles.can_decode]
        num_left_out = len(self._able) - len(candidates) + len(claimed)

        def left_out() -> Iterator[LeftOut]:
            ids, compared = {view.worker_id for view in asked}, {view.worker_id for view in candidates}
            yield from policy.left_out_of_decode(self._job, self._source, asked, compared)
            for view in self._able:
                if view.worker_id not in ids and view.worker_id not in compared:
                    yield LeftOut(view.worker_id, self._why_not_asked(view, now))
            for view in claimed:
                yield LeftOut(view.worker_id, WhyNot.CLAIMED)

        return never.joined(left_out(), num_left_out)

    def _why_not_asked(self, view: WorkerView, now: float) -> WhyNot:
        if not self._request.setbacks.may_ask(view, now):
            return WhyNot.REFUSED
        return WhyNot.RESERVED if view.worker_id in self._reserved else WhyNot.CLAIMED


def left_out_of_start(
    book: Book, job: policy.Job, left: WorkerSubset, candidates: Sequence[WorkerView]
) -> policy.LeftOutWorkers:
    return policy.left_out_of_start(job, left, _not_left_to(book, left), candidates, book.config.policy)


def _not_left_to(book: Book, left: WorkerSubset) -> list[WorkerView]:
    """Returns the workers that are not among those left to a request: others that have waited long need them."""
    everyone = book.workers.cluster.everyone
    if left is everyone:
        return []
    ids = {view.worker_id for view in left.views()}
    return [view for view in everyone.views() if view.worker_id not in ids]


def may_note(request: Request, phase: PlacedPhase, now: float) -> bool:
    """Returns whether why the request waits is to be noted again."""
    last = request.story.vain_attempt
    return last is None or last.phase is not phase or now - last.at_s >= NOTE_S
