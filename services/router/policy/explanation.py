"""Records why a worker was chosen: every candidate's terms, who was left out and why, and what decided. Pure.

Owns: the record of one choice and what follows from it, and the memory of recent requests' records, for `baton explain`
(`Explanations`). Never: the choice itself (`cluster.py`), or how records are shown.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from services.core.records import record
from services.router.policy.filter import LeftOutWorkers, Reasons
from services.router.policy.known_cache import PrefixOutcome, PrefixSource
from services.router.policy.splitting import SplitCosts, WhySplit, WhyUnsplit
from services.router.policy.terms import Question, Term
from services.router.policy.views import Job, Source, WorkerView

MOST_SCORED = 5
"""The most candidates that a record keeps."""


Ranked = tuple[WorkerView, float, tuple[float, ...]]
"""A candidate with its score and the value of each term."""


class Ranking:
    """Is given the candidates of one choice, as they were compared, and why others were none."""

    __slots__ = ("best", "find_shortages", "noted", "num_candidates")

    def __init__(self) -> None:
        self.num_candidates = 0
        self.best: Sequence[Ranked] = ()
        """The best of them, the winner first: at most `MOST_SCORED`."""
        self.noted: Reasons = {}
        """Why some of those that could ever take the job were not asked whether they have room."""
        self.find_shortages: Callable[[], Reasons] = dict
        """Returns why the others were no candidates. Most choices are tried again and again in vain, and not told of:
        so the filters are asked for their reasons only when somebody wants these."""

    @property
    def left_out(self) -> Reasons:
        """Returns why workers that could ever take the job were no candidates. To be called before anything has changed
        since."""
        return self.noted | self.find_shortages()


class PlacedPhase(enum.Enum):
    """Says what a worker was chosen for."""

    PREFILL = "prefill"
    DECODE = "decode"
    """A handoff was to be taken over."""
    UNSPLIT = "unsplit"
    """A decode worker was to run all of the sequence: prompt and output."""
    PARK = "park"
    """A store was to keep a handoff that no decode worker had room for."""


class ScoredWorker(NamedTuple):
    """Holds a candidate's score and what it was made of, and what the choice would have cost there."""

    worker_id: str
    score: float
    values: tuple[float, ...]
    """Each term's value, in the order of `PlacementChoice.terms`."""
    queued_tokens: int
    """Prompt tokens that wait there."""
    ms_per_prefill_token: float
    """As calibrated; 0 if it is not."""
    step_ms: float
    """A decode step with this sequence in it; 0 if it is not calibrated, or the choice was of a prefill worker."""

    @property
    def queue_ms(self) -> float | None:
        """Returns how long the prompt would wait for its turn; None without calibrated costs."""
        return self.queued_tokens * self.ms_per_prefill_token if self.ms_per_prefill_token else None


@record
class Unsplit:
    """Says why a sequence runs unsplit although its prompt could have run apart."""

    why: WhyUnsplit
    prefill_id: str = ""
    """The prefill worker that it was compared with; empty if nothing was compared."""
    costs: SplitCosts | None = None


@record
class SplitAfterAll:
    """Says why a prompt runs apart under `Split.AUTO`, which weighs whether all of it is to run on a decode worker."""

    why: WhySplit
    decode_id: str = ""
    """The decode worker that would have run all of it; empty if there was none."""
    costs: SplitCosts | None = None


@record
class VainAttempt:
    """Records an attempt to place that found nobody: the request goes on waiting."""

    phase: PlacedPhase
    at_s: float
    left_out: LeftOutWorkers


class Decider(enum.Enum):
    """Says what decided between the winner and the runner-up."""

    TERM = "term"
    """The scores; the term named has the largest weighted difference."""
    TIE = "tie"
    """Nothing: the scores are equal, and the lower worker id wins."""
    ONLY = "only"
    """There was one candidate."""
    AGED = "aged"
    """Not the scores: the request had waited too long, and goes to the worker nearest to having room."""


@record
class Verdict:
    """Says why the winner won, and what the runner-up would have cost."""

    decider: Decider
    term: str = ""
    """The term's name, if a term decided."""
    term_difference: float = 0.0
    """By how much the winner's weighted value of that term is higher."""
    score_difference: float = 0.0
    """By how much the winner's score is higher."""
    queue_ms: float | None = None
    """How much longer the prompt would have waited for its turn at the runner-up; negative: shorter. None without a
    runner-up, without calibrated costs, or for a decode."""
    step_ms: float | None = None
    """How much longer a decode step would have been there; None as above, or for a prefill."""


@dataclass(slots=True, eq=False)
class PlacementChoice:
    """Records one choice of a worker. It never changes, as far as others see."""

    phase: PlacedPhase
    at_s: float
    waited_s: float
    """How long the request had been waiting for this."""
    is_aged: bool
    """Whether it went to the worker nearest to having room, whatever its score."""
    terms: Sequence[tuple[float, Term]]
    """The weights and terms of the phase."""
    num_candidates: int
    left_out: LeftOutWorkers
    before: VainAttempt | None
    """The last attempt of this wait that found nobody, as far as noted."""
    unsplit: Unsplit | None
    """Why all of it runs there; None unless its prompt could have run apart."""
    split: SplitAfterAll | None
    """Why only the prompt runs there; None unless it was weighed."""
    scored: tuple[ScoredWorker, ...]
    """The winner, then the best of the others, best first; at most `MOST_SCORED`."""
    prefix: PrefixSource | None = None
    """From whom a part of the prompt's KV is brought there, or why it is not; None if nobody had more of it. It is
    known once the leg is opened."""
    brought: PrefixOutcome | None = None
    """What came of that; None as long as it is not known."""

    @property
    def winner(self) -> ScoredWorker:
        return self.scored[0]

    @property
    def runner_up(self) -> ScoredWorker | None:
        return self.scored[1] if len(self.scored) > 1 else None

    @property
    def num_bytes(self) -> int:
        """Returns about how much memory it takes, with the workers as they were."""
        num_named = len(self.left_out.named) + (len(self.before.left_out.named) if self.before else 0)
        num_own = 600 if self.unsplit is None and self.split is None else 800
        return num_own + len(self.scored) * (250 + 32 * len(self.terms)) + 64 * num_named

    def weighted(self, scored: ScoredWorker) -> list[tuple[str, float]]:
        """Returns each term's name with its weighted value; the values add up to the score."""
        return [
            (term_name(term), weight * value) for (weight, term), value in zip(self.terms, scored.values, strict=True)
        ]

    def verdict(self) -> Verdict:
        if self.is_aged:
            return Verdict(Decider.AGED)
        winner, other = self.winner, self.runner_up
        if other is None:
            return Verdict(Decider.ONLY)
        queue_ms = step_ms = None
        if self.phase is not PlacedPhase.DECODE and winner.queue_ms is not None and other.queue_ms is not None:
            queue_ms = other.queue_ms - winner.queue_ms
        if self.phase is not PlacedPhase.PREFILL and winner.step_ms and other.step_ms:
            step_ms = other.step_ms - winner.step_ms
        if winner.score == other.score:
            return Verdict(Decider.TIE, queue_ms=queue_ms, step_ms=step_ms)
        pairs = zip(self.weighted(winner), self.weighted(other), strict=True)
        difference, term = max(((mine - theirs, name) for (name, mine), (_, theirs) in pairs), key=lambda each: each[0])
        return Verdict(Decider.TERM, term, difference, winner.score - other.score, queue_ms, step_ms)


def term_name(term: Term) -> str:
    return str(getattr(term, "__name__", "unnamed"))


def explain_choice(
    phase: PlacedPhase,
    job: Job,
    source: Source | None,
    chosen: WorkerView,
    ranking: Ranking,
    terms: Sequence[tuple[float, Term]],
    now: float,
    *,
    waited_s: float,
    left_out: LeftOutWorkers,
    before: VainAttempt | None = None,
    unsplit: Unsplit | None = None,
    split: SplitAfterAll | None = None,
) -> PlacementChoice:
    """Returns the record of a choice. To be called before anything has changed since.

    `ranking` is empty if `chosen` was taken without comparing, as the worker nearest to having room.
    """
    best, is_aged = ranking.best, not ranking.best
    if is_aged:
        values = tuple([term([chosen], Question(job, source, now))[0] for _, term in terms])
        best = ((chosen, sum(weight * value for (weight, _), value in zip(terms, values, strict=True)), values),)
    return PlacementChoice(
        phase,
        now,
        waited_s,
        is_aged,
        terms,
        ranking.num_candidates,
        left_out,
        before,
        unsplit,
        split,
        tuple([_scored(phase, *each) for each in best]),
    )


def _scored(phase: PlacedPhase, view: WorkerView, score: float, values: tuple[float, ...]) -> ScoredWorker:
    load, step_ms = view.load, 0.0
    if phase is not PlacedPhase.PREFILL and load.ms_per_decode_step:
        step_ms = view.step_ms(view.num_sequences + 1)
    return ScoredWorker(view.worker_id, score, values, view.queued_tokens, load.ms_per_prefill_token, step_ms)


MOST_REQUESTS = 4096
"""The most requests of one model that are remembered after their end."""
MOST_BYTES = 16 << 20
"""The memory that the records of one model may take; of a live request the newest is kept whatever it takes."""
MOST_CHOICES = 16
"""The most choices that are kept of one request: the first, and the newest."""
_REQUEST_BYTES = 700
_MOST_FAILURE = 500
_MOST_REFUSED = 512
_CHOICE_BYTES = 100


@dataclass(slots=True)
class ExplainedChoice:
    """Holds one choice of a worker, and what became of the leg."""

    leg: int
    attempt: int
    choice: PlacementChoice
    outcome: str = ""
    """How the leg ended; empty while it runs."""


@dataclass(slots=True, eq=False)
class ExplainedRequest:
    """Holds the choices that were made for one request."""

    request_id: str
    """The router's own id of it."""
    label: str
    """The id that its client knows, by which it is found."""
    arrived_s: float
    choices: list[ExplainedChoice] = field(default_factory=list)
    """The oldest first."""
    num_forgotten: int = 0
    """Choices that were made between the first and the rest, and are no longer kept."""
    is_live: bool = True
    failure: str = ""
    """What its client was told, if it was refused or has failed; shortened."""
    unplaced: VainAttempt | None = None
    """If it has ended while it waited for a worker, the last attempt that found nobody."""
    num_bytes: int = _REQUEST_BYTES


class Explanations:
    """Remembers why recent requests of one model were placed as they were. No text, no token.

    Requests that live are found too; of those that have ended, the oldest are forgotten first.
    """

    def __init__(self, most_requests: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._by_label: dict[str, list[ExplainedRequest]] = {}
        """Each list in the order of arrival."""
        self._ended: deque[ExplainedRequest] = deque()
        self._refused: deque[ExplainedRequest] = deque()
        self.num_bytes = 0

    def begin(self, request_id: str, label: str, now: float) -> ExplainedRequest:
        """Returns the record of a request that has arrived. It is kept at least until its `end`."""
        request = ExplainedRequest(request_id, label, now)
        self._by_label.setdefault(label, []).append(request)
        self.num_bytes += request.num_bytes
        self._forget()
        return request

    def placed(self, request: ExplainedRequest, leg: int, attempt: int, choice: PlacementChoice) -> None:
        request.choices.append(ExplainedChoice(leg, attempt, choice))
        self._count(request, choice.num_bytes + _CHOICE_BYTES)
        self._forget()
        over = self.num_bytes > self._most_bytes
        while len(request.choices) > (1 if over else MOST_CHOICES):
            dropped = request.choices.pop(0 if over else 1)
            request.num_forgotten += 1
            self._count(request, -dropped.choice.num_bytes - _CHOICE_BYTES)

    def leg_ended(self, request: ExplainedRequest, leg: int, outcome: str) -> None:
        for each in reversed(request.choices):
            if each.leg == leg:
                each.outcome = outcome
                return

    def end(self, request: ExplainedRequest, failure: str = "") -> None:
        """Notes that the request has ended, and why if it failed: it may be forgotten from now on."""
        if request.is_live:
            self._end(request, failure, self._ended)

    def refused(self, request_id: str, label: str, now: float, failure: str) -> None:
        """Notes a request that was refused at its arrival. Few of these are kept: a flood of them spares the others."""
        self._end(self.begin(request_id, label, now), failure, self._refused)

    def _end(self, request: ExplainedRequest, failure: str, kept: deque[ExplainedRequest]) -> None:
        request.is_live, request.failure = False, failure[:_MOST_FAILURE]
        self._count(request, len(request.failure))
        kept.append(request)
        self._forget()

    def find(self, label: str) -> list[ExplainedRequest]:
        """Returns the requests of that label which are remembered, the newest first: clients use one as they like."""
        return self._by_label.get(label, [])[::-1]

    def _count(self, request: ExplainedRequest, num_bytes: int) -> None:
        request.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _forget(self) -> None:
        for requests, most in ((self._refused, _MOST_REFUSED), (self._ended, self._most_requests)):
            while requests and (len(requests) > most or self.num_bytes > self._most_bytes):
                request = requests.popleft()
                self.num_bytes -= request.num_bytes
                namesakes = self._by_label[request.label]
                namesakes.remove(request)
                if not namesakes:
                    del self._by_label[request.label]
