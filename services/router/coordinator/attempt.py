"""Records, for one request that is placed, who was chosen and why, or why nobody was. Pure.

Owns: the record of a choice or of a vain attempt, of every phase. Never: the choice (`placement.py`, `unsplit.py`,
`parking.py`), or the reasons: the filters that placing asked have noted them in the ranking.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.router import policy
from services.router.coordinator.book import Book
from services.router.coordinator.request import Request
from services.router.policy import PlacedPhase, Ranking, Role, Source, WhyNot, WorkerSubset, WorkerView

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
