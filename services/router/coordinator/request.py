"""Keeps a live request's record: what the client asked, the output received, the current legs, the phase. Pure.

Owns: the record and the phase's transition table. Never: a change of either: `book.py` opens and ends legs and moves
the phase, and `handoff.py` notes in the record what workers report.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from services.router.coordinator.events import RequestSpec, Stage, StageEnded, Summary, WorkerInfo
from services.router.policy import Fingerprint, Job, Load, PlacementChoice, Role, Share, VainAttempt, WorkerView

if TYPE_CHECKING:
    from baton.v1 import types_pb2


class Phase(enum.Enum):
    """Says where a request is between its arrival and its end."""

    QUEUED = "queued"
    """The request has no leg and waits for a worker."""
    PREFILLING = "prefilling"
    """A prefill command was sent; the worker has not opened a lease yet."""
    PARKED = "parked"
    """A lease is held, or a store takes it over, and no decode command for it is pending."""
    BINDING = "binding"
    """A decode command was sent and not answered yet."""
    DECODING = "decoding"
    """A decode worker has admitted the request: it imports or generates."""
    FINISHED = "finished"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.QUEUED: frozenset({Phase.PREFILLING, Phase.BINDING, Phase.FINISHED}),
    Phase.PREFILLING: frozenset({Phase.PARKED, Phase.QUEUED, Phase.FINISHED}),
    Phase.PARKED: frozenset({Phase.BINDING, Phase.QUEUED, Phase.FINISHED}),
    Phase.BINDING: frozenset({Phase.DECODING, Phase.PARKED, Phase.QUEUED, Phase.FINISHED}),
    Phase.DECODING: frozenset({Phase.PARKED, Phase.QUEUED, Phase.FINISHED}),
    Phase.FINISHED: frozenset(),
}


_NOBODY: frozenset[str] = frozenset()

Origin = int | str
"""Who may have computed what a leg has: a worker, by its incarnation, or, of what was found in a cache, any worker of a
`kv` fingerprint."""


@dataclass(slots=True)
class HeldLease:
    """Keeps what the router knows of the lease of a prefill leg."""

    lease_id: bytes
    source: types_pb2.KVSource
    opened_s: float
    num_failed_imports: int = 0
    was_offered: bool = False
    """Whether a decode leg was ever sent for it."""


@dataclass(slots=True)
class PlacedPrefill:
    """Keeps the router's record of a prefill leg."""

    leg: int
    worker: WorkerInfo
    token_ids: tuple[int, ...]
    output_base: int
    attempt: int
    sent_s: float
    heard_s: float
    """When its worker last reported on it, or else when it was sent; in awake time."""
    lease: HeldLease | None = None
    sealed_s: float | None = None
    """When token 0 arrived, of the last answer."""
    sampled: set[int] = field(default_factory=set)
    """The answers whose token 0 has arrived, as the leg counts them."""
    num_ended: int = 0
    """How many of these it has ended. With all of them the source closes the lease."""
    origins: set[Origin] = field(default_factory=set)
    num_computed: int | None = None
    """How much of the prompt is computed, in tokens, as far as its worker tells."""


@dataclass(slots=True)
class PlacedDecode:
    """Keeps the router's record of a decode leg."""

    leg: int
    worker: WorkerInfo
    output_base: int
    attempt: int
    sent_s: float
    heard_s: float
    """When its worker last reported on it, or its lease was sealed, or else when it was sent; in awake time."""
    asked_s: float
    """`sent_s` in awake time: since when the worker owes an answer."""
    has_handoff: bool
    admitted_s: float | None = None
    orphaned_s: float | None = None
    """When its prefill leg ended before the import was ready, in awake time. The leg may still report that it has
    everything, but only for `orphan_timeout_s`."""
    released_by: WorkerInfo | None = None
    """The source, if it was the first to say that this leg has released its lease."""
    lapsed_source: WorkerInfo | None = None
    """The source, if its lease expired or was aborted while this leg had it."""
    origins: set[Origin] = field(default_factory=set)


@dataclass(slots=True)
class PlacedPark:
    """Keeps the router's record of a store's leg until the store has the handoff. From then on it is a `PlacedPrefill`
    of the same number, whose lease is sealed."""

    leg: int
    worker: WorkerInfo
    handoff: PlacedPrefill
    """The leg whose lease it takes over."""
    attempt: int
    sent_s: float
    heard_s: float
    """When the store last reported on it, or else when it was sent; in awake time."""
    admitted_s: float | None = None
    orphaned_s: float | None = None
    """When the leg that it takes over ended before the store said that it has everything, in awake time. It may still
    say so, but only for `orphan_timeout_s`."""


PlacedLeg = PlacedPrefill | PlacedPark | PlacedDecode


@dataclass(slots=True)
class PartialAnswer:
    """Keeps what was received of one answer."""

    index: int = 0
    """Which of the client's answers it is. A leg counts its own answers from 0."""
    output: list[int] = field(default_factory=list)
    over: bool = False
    """Whether it is complete. What a worker still says of it is of no interest."""
    given_up: bool = False
    """Whether it was ended here, by its text: a worker that makes it may not know yet."""


@dataclass(frozen=True, slots=True)
class Crash:
    """Records that a worker failed under this request, and in which role."""

    worker_id: str
    incarnation: int
    role: Role
    session_lost: bool
    """Whether the crash is only assumed from a lost session, which a live worker may have too."""
    failed_import: bool = False
    """Whether it stands for a failed import from this source. A loss of its session that follows is the same
    failure."""

    @property
    def process(self) -> tuple[str, int]:
        return (self.worker_id, self.incarnation)

    def foretold(self, loss: Crash) -> bool:
        """Says whether this failed import was a first sign of the loss, so that the two are one failure."""
        return self.failed_import and self.process == loss.process


@dataclass(frozen=True, slots=True)
class BackOff:
    """Says when a worker that refused a handoff may be asked again: after a new snapshot, and either from a time on or
    when it shows more room than it did."""

    load: Load
    """The worker's newest snapshot at the refusal."""
    retry_at_s: float
    count: int


@dataclass(slots=True)
class Setbacks:
    """Keeps what has gone wrong under a request, and what follows for its next placement."""

    crashes: list[Crash] = field(default_factory=list)
    newest_leg_at_crash: int = 0
    """The highest leg number in use when the last crash was counted: the loss of a leg up to it counts no further."""
    num_fruitless_starts: int = 0
    """How many times its prompt was given to a worker since its newest token."""
    refusals: dict[str, BackOff] = field(default_factory=dict)
    """Refusals by worker id."""
    unserved_by: frozenset[str] = frozenset()
    """Engines a worker of which has said that it does not serve such a request."""
    not_before_s: float = 0.0
    """The request is not placed earlier, since workers have just been lost under it."""

    def may_ask(self, view: WorkerView, now: float) -> bool:
        """Returns whether the worker may be asked to take the request: it has not refused it, or that was long ago."""
        refusal = self.refusals.get(view.worker_id)
        if refusal is None:
            return True
        # The numbers are compared for difference, since a worker that has restarted counts from 1 again.
        if view.load.sequence_number == refusal.load.sequence_number:
            return False
        # One that has more room is asked at once: if it is claimed, nobody else is, and it would stand idle until then.
        return now >= refusal.retry_at_s or view.load.shows_more_room_than(refusal.load)


@dataclass(slots=True)
class Story:
    """Keeps what the client, the trace and the metrics will be told of a request. No placement depends on it."""

    announced: bool = False
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    num_retries: int = 0
    """How many times the request went back to be placed again; refusals do not count."""
    num_prefills: int = 0
    num_decodes: int = 0
    num_parks: int = 0
    queued_s: float = 0.0
    first_token_s: float | None = None
    prefill_wait_s: float | None = None
    prefill_compute_s: float | None = None
    worker_timings: list[types_pb2.PhaseTimings] = field(default_factory=list)
    decode_choice: PlacementChoice | None = None
    """Why it was the decode worker that was last asked."""
    vain_attempt: VainAttempt | None = None
    """The newest attempt to place it that found nobody and was noted, while it waits."""


@dataclass(slots=True)
class Request:
    """Keeps one live request: what the client asked, what it has received, its legs, and what happened to it so far."""

    spec: RequestSpec
    max_tokens: int
    number: int
    """The request's place in the order of arrival, from 1."""
    share: Share
    """Its tenant's."""
    arrived_s: float
    phase_since_s: float
    expected_output_tokens: int = 0
    """How long its output is expected to be, as of its arrival."""
    phase: Phase = Phase.QUEUED
    num_scored: int = 1
    """Tokens of the prompt whose log-probabilities were received, if they are wanted; the first counts, which has
    none."""
    answers: list[PartialAnswer] = field(default_factory=lambda: [PartialAnswer()])
    """Those that the legs make: all that the client wants, until some of it must be computed again. Then whatever has
    not ended becomes a request of its own, a *part* (`Book.settle`)."""
    is_part: bool = False
    is_charged: bool = False
    """Whether its tenant was charged its prompt."""
    num_held: int = 0
    """Tokens with which it counts in what its tenant holds; 0 while it is queued."""
    goes_ahead: bool = False
    """Whether its tenant had less than its share of what was placed when its prompt last began."""
    prefill: PlacedPrefill | None = None
    """The leg whose lease has the KV: a prefill worker's, or that of the store where the handoff is parked."""
    park: PlacedPark | None = None
    decode: PlacedDecode | None = None
    released: PlacedPrefill | None = None
    """The prefill leg whose blocks were taken over; its last reports are still expected."""
    fingerprint: Fingerprint | None = None
    """The fingerprint of the worker that computes the prompt. It is fixed once the answer has begun: a replay needs the
    same one."""
    waiting_since_s: float = 0.0
    """When the request last began to wait for a worker; a refusal does not change it."""
    unserved_since_s: float | None = None
    """Since when, while it waits, no ready worker could serve it at all, and none was expected that loads."""
    loading_until_s: float | None = None
    """Until when it waits for workers that load; None if it has found none."""
    awaited_s: float = -math.inf
    """When it last waited for a worker that loads: that time is no wait for a busy one."""
    placing_since_s: float | None = None
    """Since when the current handoff has been looking for a decode worker."""
    tokens_in_flight: int = 0
    """The number of tokens with which it counts among the handoffs in flight; 0 if it does not."""
    tokens_unoffered: int = 0
    """As many while no decode worker has been offered its handoff."""
    output_from: set[Origin] = field(default_factory=set)
    """The origins of all that was received of the client's answers: all parts of a request have the same set."""
    setbacks: Setbacks = field(default_factory=Setbacks)
    story: Story = field(default_factory=Story)
    _first_job: Job | None = None
    """The job of a request that has neither begun, nor had crashes, nor been refused by an engine: every tick asks for
    those of the whole queue."""

    @property
    def request_id(self) -> str:
        """Returns the router's own id of the client's request; parts of it have that in common."""
        return self.spec.request_id

    @property
    def key(self) -> str:
        """Returns the name by which the book has it: the id, for a part with the index of its answer."""
        return f"{self.request_id}\x1f{self.answers[0].index}" if self.is_part else self.request_id

    @property
    def output(self) -> list[int]:
        """Returns all tokens received of the answer, from output position 0; of several, those of the longest."""
        if len(self.answers) == 1:
            return self.answers[0].output
        return max((answer.output for answer in self.answers), key=len)

    @property
    def num_received(self) -> int:
        return sum(len(answer.output) for answer in self.answers)

    @property
    def open_answers(self) -> list[PartialAnswer]:
        return [answer for answer in self.answers if not answer.over]

    @property
    def total_tokens(self) -> int:
        """Returns the most tokens that the sequence may have, prompt and output together."""
        return len(self.spec.token_ids) + self.max_tokens

    @property
    def has_begun(self) -> bool:
        """Returns whether some of the answers was received, of this one or, as a part, of others: output, or
        log-probabilities of the prompt."""
        return bool(self.output) or self.is_part or self.num_scored > 1

    @property
    def awaits_scores(self) -> bool:
        """Returns whether log-probabilities of the prompt are wanted that were not received yet."""
        return self.spec.scores_prompt and self.num_scored < len(self.spec.token_ids)

    def name_blocks(self, epoch: str) -> None:
        """Has the blocks of a request without legs be named as they are in this epoch."""
        if self.spec.epoch != epoch:
            self.spec = replace(self.spec, epoch=epoch, block_hashes={})
            self._first_job = None

    def leg(self, number: int) -> PlacedLeg | None:
        """Returns the leg of that number, if it is current or was the last one released."""
        for leg in (self.decode, self.prefill, self.park, self.released):
            if leg is not None and leg.leg == number:
                return leg
        return None

    def leg_tokens(self) -> tuple[int, ...]:
        """Returns the token ids that a new leg computes: the prompt and all output received."""
        return self.spec.token_ids + tuple(self.output)

    def job(self, num_tokens: int) -> Job:
        return Job(
            num_tokens=num_tokens,
            total_tokens=self.total_tokens,
            avoid=frozenset(crash.worker_id for crash in self.setbacks.crashes) if self.setbacks.crashes else _NOBODY,
            fingerprint=self.fingerprint if self.has_begun else None,
            unserved_by=self.setbacks.unserved_by,
            conversation=self.spec.conversation,
            tenant=self.spec.tenant,
            model=self.spec.model,
            priority=self.spec.priority,
            block_hashes=self.spec.block_hashes,
            num_answers=len(self.answers),
        )

    def next_job(self) -> Job:
        """Returns the job of a request without legs: its prompt and all output received are to be computed."""
        if self.has_begun or self.setbacks.crashes or self.setbacks.unserved_by:
            return self.job(len(self.spec.token_ids) + len(self.output))
        if self._first_job is None:
            self._first_job = self.job(len(self.spec.token_ids))
        return self._first_job


# What is reported of a request: where it is, spans, and the summary.


class LiveStage(NamedTuple):
    """Says where a live request is, for people."""

    phase: Phase
    since_s: float
    """Since when it waits for a worker, if it does; else since when it is in this phase."""
    cached_tokens: int
    num_retries: int


def leg_stage(request: Request, stage: Stage, leg: PlacedLeg, now: float, outcome: str) -> StageEnded:
    return StageEnded(request.request_id, stage, leg.leg, leg.worker.worker_id, leg.attempt, leg.sent_s, now, outcome)


def queue_stage(request: Request, now: float, *, outcome: str) -> StageEnded:
    attempt = request.story.num_retries + 1
    return StageEnded(
        request.request_id,
        Stage.QUEUE,
        0,
        "",
        attempt,
        request.phase_since_s,
        now,
        outcome,
        vain_attempt=request.story.vain_attempt,
    )


def place_stage(request: Request, started_s: float, now: float, outcome: str) -> StageEnded:
    num_refusals = sum(refusal.count for refusal in request.setbacks.refusals.values())
    return StageEnded(
        request.request_id,
        Stage.PLACE,
        0,
        request.story.decode_worker,
        max(1, request.story.num_prefills),
        started_s,
        now,
        outcome,
        num_refusals,
        request.story.decode_choice,
        request.story.vain_attempt,
    )


def summary(request: Request, answer: PartialAnswer, now: float) -> Summary:
    return Summary(
        num_output_tokens=len(answer.output),
        cached_tokens=request.story.cached_tokens,
        prefill_worker=request.story.prefill_worker,
        decode_worker=request.story.decode_worker,
        num_retries=request.story.num_retries,
        queue_s=request.story.queued_s,
        ttft_s=None if request.story.first_token_s is None else request.story.first_token_s - request.arrived_s,
        total_s=now - request.arrived_s,
        prefill_wait_s=request.story.prefill_wait_s,
        prefill_compute_s=request.story.prefill_compute_s,
        worker_timings=tuple(request.story.worker_timings),
    )
