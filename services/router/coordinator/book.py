"""Keeps the live requests, their legs and phases. No other code opens or ends requests' legs, or ends
requests; canaries have legs of their own (`canaries.py`). Pure.

Owns: requests, leg numbers, the queue, the worker table, the list of actions, the counts of requests by phase
and of handoffs in flight, what tenants are charged and hold, the alarms of deadlines and of silent legs, and that a
defect met on behalf of one request ends that one only (`isolated`). Never: decides where something runs
(`placement.py`) or what an event means (`handoff.py`).

Invariant: after every input a request's phase follows from its legs (`settle`), it is in the queue iff QUEUED and among
the parked iff PARKED, and each current leg is listed with its worker.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from services.core.errors import BatonError, WorkerFailed, unforeseen
from services.core.hashing import num_blocks_for
from services.kv.verdicts import Verdicts
from services.router.coordinator.config import CoordinatorConfig
from services.router.coordinator.events import (
    Action,
    CancelLeg,
    Defect,
    EjectionChanged,
    EmitFailed,
    EmitFinished,
    EmitStarted,
    ExpectedRequest,
    FinishReason,
    HandoffRef,
    HealthChanged,
    Parked,
    RequestSpec,
    SendLeg,
    Stage,
    WorkerInfo,
)
from services.router.coordinator.loading import LoadingWorkers
from services.router.coordinator.output_lengths import OutputLengths
from services.router.coordinator.prefixes import PrefixSources
from services.router.coordinator.queue import Queue
from services.router.coordinator.request import (
    TRANSITIONS,
    HeldLease,
    PartialAnswer,
    Phase,
    PlacedDecode,
    PlacedLeg,
    PlacedPark,
    PlacedPrefill,
    Request,
    leg_stage,
    place_stage,
    queue_stage,
    summary,
)
from services.router.coordinator.workers import Prediction, Worker, WorkerTable
from services.router.policy import HandoffsInFlight, PlacementChoice, Role, Share, Shares, uncached_tokens
from services.router.policy.filter import LongPrompts
from services.router.policy.health import HealthRecord

Key = TypeVar("Key", int, str)


class Alarms(Generic[Key]):
    """Keeps the times at which keys are due; a key may have several alarms."""

    def __init__(self, live: Container[Key]) -> None:
        """`live` holds the keys that still exist. Alarms of other keys are dropped before they outnumber the rest."""
        self._live: Container[Key] = live
        self._heap: list[tuple[float, Key]] = []
        self._most = 0

    def __len__(self) -> int:
        return len(self._heap)

    def set(self, at_s: float, key: Key) -> None:
        heapq.heappush(self._heap, (at_s, key))
        if len(self._heap) > self._most:
            self._heap = [alarm for alarm in self._heap if alarm[1] in self._live]
            heapq.heapify(self._heap)
            self._most = 2 * len(self._heap) + 64

    def due(self, now: float) -> list[Key]:
        """Returns the keys whose alarms have rung, in order of time. Each alarm is returned once."""
        keys: dict[Key, None] = {}
        while self._heap and self._heap[0][0] <= now:
            keys[heapq.heappop(self._heap)[1]] = None
        return [key for key in keys if key in self._live]


@dataclass(frozen=True, slots=True)
class Outlook:
    """Says what the live requests that are not queued still need, for forecasts. It is empty while nobody waits, since
    then nobody needs to know."""

    tokens_left: tuple[float, ...] = ()
    """The output tokens that decoding requests are expected to get yet, ascending."""
    prompt_tokens_each: float = 0.0
    """Prompt tokens of a request between the queue and a decode worker, on average."""
    output_tokens_each: float = 0.0
    """Output tokens that a request between the queue and a decode worker is expected to get yet, on average."""


class Book:
    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.workers = WorkerTable(
            config.health,
            self._health_changed,
            lambda worker_id, ejection: self.actions.append(EjectionChanged(worker_id, ejection)),
            outliers=config.outliers,
            follow_caches=config.policy.hash_prompts,
            replay_across_engines=config.replay_across_engines,
        )
        self.requests: dict[str, Request] = {}
        """By `Request.key`."""
        self.parts: dict[str, dict[str, Request]] = {}
        """Those of each request that has come apart, by its id and then by key. Each is in `requests` too."""
        self._expecting: dict[Share, None] = {}
        """Tenants with requests whose prompts are being tokenised: each of these has a place in the queue."""
        self.num_in: Counter[Phase] = Counter()
        """Live requests by phase."""
        self.crashed: set[str] = set()
        """The keys of the requests that count crashes."""
        self.handoffs_in_flight = HandoffsInFlight()
        """The handoffs that still need room, on a decode worker or at a store. One from a mixed worker does not count,
        since that worker can adopt its own lease."""
        self.unoffered_handoffs = HandoffsInFlight()
        """Those that no decode worker has been offered yet, and those at stores: which one will take them is open."""
        self.placement_is_due = False
        """Whether a request that waits may find a place now. (`WorkerTable.has_news` says the same of workers.)"""
        self.deadlines: Alarms[str] = Alarms(self.requests)
        self.queue = Queue(config, self.workers)
        self.loading = LoadingWorkers(self.workers.awake)
        self.shares = Shares()
        self.actions: list[Action] = []
        self.legs: dict[int, Request] = {}
        """Current legs, and the last released prefill leg of each request, by leg number."""
        self.silent_legs: Alarms[int] = Alarms(self.legs)
        """When each leg is next checked for having been silent too long, in awake time."""
        self.soonest_silence_s = min(config.answer_timeout_s, config.queue_timeout_s)
        """The shortest silence for which a leg may be given up while its source is there."""
        self.newest_leg = 0
        self.prefixes = PrefixSources(config.policy.share_prefixes, self.workers, self.legs)
        self.output_lengths = OutputLengths()
        self.long_prompts = LongPrompts(config.long_prompts)
        self.verdicts = Verdicts()
        self.longest_output = 0
        """The most output tokens that were seen before the first request was complete."""
        self.outlook: Outlook | None = None
        """As found since the last tick, once somebody has asked."""
        self.awake = self.workers.awake
        """The time by which workers' answers are judged. A client's waiting time is judged by the real clock."""
        self._num_arrivals = 0

    def add(self, spec: RequestSpec, max_tokens: int, now: float) -> Request:
        number, num_answers = self._num_arrivals + 1, spec.num_answers
        self._num_arrivals += num_answers  # each part would have a place of its own
        request = Request(
            spec,
            max_tokens,
            number,
            self.shares.enter(spec.tenant, spec.weight, now),
            arrived_s=now,
            answers=[PartialAnswer(index) for index in range(num_answers)],
            phase_since_s=now,
            expected_output_tokens=self.expected_output(spec.tenant, len(spec.token_ids), spec.min_tokens, max_tokens),
            waiting_since_s=now,
        )
        self.requests[spec.request_id] = request  # from here on, whatever fails, it is ended as one that lives
        self._note_length(request)
        self._queue(request)
        self.placement_is_due = True
        return request

    def _queue(self, request: Request) -> None:
        """Puts a new request, or a new part of one, into the queue."""
        self.num_in[Phase.QUEUED] += 1
        self._wait(request)
        if request.spec.deadline_s is not None:
            self.deadlines.set(request.spec.deadline_s, request.key)

    def _wait(self, request: Request) -> None:
        request.name_blocks(self.verdicts.epoch)
        if self.queue.add(request):
            request.share.begins_to_wait()

    def of_id(self, request_id: str) -> list[Request]:
        """Returns what lives of the client's request of that id: it, or its parts."""
        if (request := self.requests.get(request_id)) is not None:
            return [request]
        return list(self.parts.get(request_id, {}).values())

    def _note_length(self, request: Request) -> None:
        """Notes how much of the prompt is to be computed by the worker that has most of it."""
        if self.long_prompts.is_on:
            job, everyone = request.next_job(), self.workers.cluster.everyone
            views = [everyone.view(start.worker_id) for start in everyone.fit(job).starts]
            self.long_prompts.arrived(min(uncached_tokens(views, job).values(), default=job.num_tokens))

    def _note_start(self, request: Request, worker: Worker, now: float) -> None:
        """Notes where a prompt starts. To be called before the worker is expected to have it."""
        if self.long_prompts.is_on:
            worker_id = worker.info.worker_id
            num_tokens = self.workers.cluster.views[worker_id].uncached_tokens(request.next_job())
            self.long_prompts.started(worker_id, num_tokens, now)

    def expected_output(self, caller: str, prompt_tokens: int, min_tokens: int, max_tokens: int) -> int:
        """Returns how many output tokens are to be expected: the median of requests like it, within its own bounds.

        Before the first request has finished, it is at least as long as the longest so far: a cluster that took all
        that might be short could be kept from ever finishing one.
        """
        median = self.output_lengths.median_like(caller, prompt_tokens)
        expected = max(min_tokens, self.longest_output if median is None else median)
        return min(expected, max_tokens)  # it ends at the context's end, even if more are asked for

    # Legs

    def new_leg(self) -> int:
        """Returns a leg number that was never used before."""
        self.newest_leg += 1
        return self.newest_leg

    def leg_at(self, worker: Worker, leg: int) -> tuple[Request, PlacedLeg] | None:
        """Returns a request and its leg of that number, current or released, if it was sent to this worker."""
        request = self.legs.get(leg)
        placed = request.leg(leg) if request is not None else None
        if request is None or placed is None or placed.worker.worker_id != worker.info.worker_id:
            return None
        return request, placed

    def open_prefill(self, request: Request, worker: Worker, now: float, choice: PlacementChoice | None = None) -> None:
        """Opens a prefill leg at `worker`. `choice` says why there."""
        token_ids = request.leg_tokens()
        self._note_start(request, worker, now)
        request.setbacks.num_fruitless_starts += 1
        request.goes_ahead = request.share.is_behind
        prefix = self.prefixes.choose(request, worker)
        leg = self._open_leg(request, worker, len(token_ids), len(token_ids), now)
        request.story.num_prefills += 1
        request.story.prefill_worker = worker.info.worker_id
        self._fix_fingerprint(request, worker)
        request.prefill = PlacedPrefill(
            leg,
            worker.info,
            token_ids,
            output_base=len(request.output),
            attempt=request.story.num_prefills,
            sent_s=now,
            heard_s=self.awake.at(now),
            origins={worker.info.incarnation},
        )
        request.story.vain_attempt = None
        command = _command(request, Role.PREFILL, request.prefill, token_ids, now, choice)
        self.actions.append(self.prefixes.add(command, prefix, self.prefixes.keeper(request, worker)))
        self.settle(request, now)

    def open_decode(self, request: Request, worker: Worker, now: float, choice: PlacementChoice | None = None) -> None:
        """Opens a decode leg at `worker` for the request's lease; without a lease, the whole sequence runs there.

        `choice` says why there.
        """
        source = request.prefill
        handoff, age_s, tokens_to_prefill = None, 0.0, 0
        if source is None:
            token_ids, output_base = request.leg_tokens(), len(request.output)
            tokens_to_prefill = len(token_ids)
            request.setbacks.num_fruitless_starts += 1
            request.goes_ahead = request.share.is_behind
        else:
            assert source.lease is not None
            source.lease.was_offered = True
            token_ids, output_base = source.token_ids, source.output_base
            handoff = HandoffRef(source.lease.lease_id, source.lease.source)
            age_s = now - request.waiting_since_s
        prefix = self.prefixes.choose(request, worker) if source is None else None
        in_place = source is not None and source.worker.worker_id == worker.info.worker_id
        num_tokens = 0 if in_place else len(token_ids)
        num_sequences = len(request.open_answers)
        leg = self._open_leg(
            request, worker, num_tokens, tokens_to_prefill, now, num_sequences=num_sequences, in_place=in_place
        )
        request.story.num_decodes += 1
        request.story.decode_worker = worker.info.worker_id
        if source is None:
            request.story.prefill_worker = worker.info.worker_id
            self._fix_fingerprint(request, worker)
        request.decode = PlacedDecode(
            leg,
            worker.info,
            output_base,
            attempt=request.story.num_decodes,
            sent_s=now,
            heard_s=self.awake.at(now),
            asked_s=self.awake.at(now),
            has_handoff=handoff is not None,
            origins={worker.info.incarnation, *(source.origins if source is not None else ())},
        )
        command = _command(request, Role.DECODE, request.decode, token_ids, now, choice)
        command = replace(command, handoff=handoff, age_s=age_s)
        self.actions.append(self.prefixes.add(command, prefix, self.prefixes.keeper(request, worker)))
        for place, answer in enumerate(request.answers):
            if answer.over:  # by a stop string, which the worker does not know of
                self.cancel_leg(worker.info, leg, place)
        request.story.vain_attempt, request.story.decode_choice = None, choice
        self.settle(request, now)

    def open_park(self, request: Request, worker: Worker, now: float, choice: PlacementChoice) -> None:
        """Opens a leg at a store that is to take the request's handoff over. `choice` says why there."""
        source = request.prefill
        assert source is not None
        assert source.lease is not None
        source.lease.was_offered = True
        leg = self._open_leg(request, worker, len(source.token_ids), 0, now)
        request.story.num_parks += 1
        request.park = PlacedPark(
            leg, worker.info, source, request.story.num_parks, sent_s=now, heard_s=self.awake.at(now)
        )
        command = _command(request, Role.STORE, request.park, source.token_ids, now, choice)
        handoff = HandoffRef(source.lease.lease_id, source.lease.source)
        self.actions.append(
            replace(
                command, output_base=source.output_base, handoff=handoff, age_s=max(0.0, now - request.waiting_since_s)
            )
        )

    def end_park(self, request: Request, now: float, outcome: str, *, cancel: bool = True) -> None:
        """Ends a store's leg that does not have the handoff; where that is, it stays. `cancel` says that the store must
        be told."""
        leg = request.park
        assert leg is not None
        request.park = None
        self._drop_leg(leg.leg, leg.worker.worker_id)
        self.actions.append(leg_stage(request, Stage.PARK, leg, now, outcome))
        if cancel:
            self.cancel_leg(leg.worker, leg.leg)
        self.placement_is_due = True

    def take_parked(self, request: Request, event: Parked, now: float) -> None:
        """Makes the store's leg the one whose lease has the request's KV; the leg that had it before is over."""
        leg = request.park
        assert leg is not None
        if request.prefill is not None:
            self.release_prefill(request, now)
        request.park, source = None, leg.handoff
        request.prefill = PlacedPrefill(
            leg.leg,
            leg.worker,
            source.token_ids,
            source.output_base,
            leg.attempt,
            leg.sent_s,
            heard_s=self.awake.at(now),
            lease=HeldLease(event.lease_id, event.source, opened_s=now),
            sealed_s=source.sealed_s,
            sampled=source.sampled,
            num_ended=source.num_ended,
        )
        self.actions.append(leg_stage(request, Stage.PARK, leg, now, "done"))
        self.placement_is_due = True
        self.settle(request, now)

    def end_prefill(self, request: Request, now: float, outcome: str, *, cancel: bool = True) -> None:
        """Ends the prefill leg, and with it the lease. `cancel` says that the worker must be told."""
        leg = request.prefill
        assert leg is not None
        request.prefill = None
        if cancel and leg.sealed_s is None:
            num_left = len(leg.token_ids) - (leg.num_computed or 0)
            self.workers.cancel_prompt(leg.worker.worker_id, leg.leg, num_left, now)
        self._drop_leg(leg.leg, leg.worker.worker_id)
        if leg.sealed_s is None:
            self.actions.append(leg_stage(request, Stage.PREFILL, leg, now, outcome))
        if cancel:
            self.cancel_leg(leg.worker, leg.leg)

    def end_decode(self, request: Request, now: float, outcome: str, *, cancel: bool = True) -> None:
        """Ends the decode leg; the prefill leg and its lease stay. `cancel` says that the worker must be told."""
        leg = request.decode
        assert leg is not None
        request.decode = None
        if cancel and not leg.has_handoff and len(request.output) == leg.output_base:
            self.workers.cancel_prompt(leg.worker.worker_id, leg.leg, len(request.leg_tokens()), now)
        self._drop_leg(leg.leg, leg.worker.worker_id)
        self.actions.append(leg_stage(request, Stage.DECODE, leg, now, outcome))
        if cancel:
            self.cancel_leg(leg.worker, leg.leg)

    def cancel_leg(self, worker: WorkerInfo, leg: int, index: int | None = None) -> None:
        """Tells a worker to end a leg, or one of its answers, unless its session is over: then its legs are, too."""
        if self.workers.current(worker.worker_id, worker.incarnation) is not None:
            self.actions.append(CancelLeg(worker, leg, index))

    def seal_prefill(self, request: Request, now: float) -> None:
        """Notes that token 0 has arrived: the prefill leg's computation is over, and its lease is sealed."""
        leg = request.prefill
        assert leg is not None
        assert leg.lease is not None
        leg.sealed_s = now
        if request.decode is not None:
            request.decode.heard_s = self.awake.at(now)  # until now the decode worker had to wait for the source
        request.story.prefill_wait_s = leg.lease.opened_s - leg.sent_s
        request.story.prefill_compute_s = now - leg.lease.opened_s
        self.actions.append(leg_stage(request, Stage.PREFILL, leg, now, "done"))
        self.placement_is_due = self.placement_is_due or request.phase is Phase.PARKED  # from now on it may be parked

    def release_prefill(self, request: Request, now: float) -> None:
        """Ends the prefill leg because the decode leg, or a store, has its blocks. Its last reports may still come."""
        leg = request.prefill
        assert leg is not None
        request.prefill = None
        self.workers.drop_leg(leg.worker.worker_id, leg.leg)
        if leg.sealed_s is None:
            self.actions.append(leg_stage(request, Stage.PREFILL, leg, now, "done"))
        self.forget_released(request)
        request.released = leg
        self._count_handoff(request)

    def forget_released(self, request: Request) -> None:
        if request.released is not None:
            del self.legs[request.released.leg]
            request.released = None

    def announce(self, request: Request) -> None:
        """Tells the client, once, which worker prefills its prompt."""
        if not request.story.announced:
            request.story.announced = True
            self.actions.append(
                EmitStarted(request.request_id, request.story.prefill_worker, request.story.cached_tokens)
            )

    # Phases

    def settle(self, request: Request, now: float, *, refused: bool = False) -> None:
        """Moves the request to the phase that follows from its legs. To be called after every change of legs.

        Fails the request if workers have crashed under it too often. `refused` says that a worker has refused a leg:
        then the request neither counts a retry nor becomes younger. A request for several answers, some of which has
        output, comes apart where it would have to be computed again: their outputs are no longer one prompt.
        """
        self._count_handoff(request)
        if request.decode is not None:
            self._move(request, Phase.BINDING if request.decode.admitted_s is None else Phase.DECODING, now)
            return
        if why := self._why_given_up(request):
            self.fail(request, WorkerFailed(why, retry_after_s=self.config.retry_after_s), now)
            return
        is_lost = request.prefill is None and request.park is None
        if is_lost and len(request.answers) > 1 and request.num_received:
            self._come_apart(request, now)
            return
        before = request.phase
        if is_lost:
            after = Phase.QUEUED
        elif request.prefill is None:
            after = Phase.PARKED  # the store may have everything
        else:
            # A handoff is offered only when the prompt is scored: else output might come before that, and without it
            # if the source is lost.
            begins = request.prefill.lease is None or request.awaits_scores
            after = Phase.PREFILLING if begins else Phase.PARKED
        self._move(request, after, now)
        if after is Phase.QUEUED and not refused:
            request.setbacks.refusals.clear()  # of a lease that is gone
        went_back = after is not before and (after is Phase.QUEUED or before in (Phase.BINDING, Phase.DECODING))
        if went_back and not refused:
            request.story.num_retries += 1
        if after is not before and not refused:
            request.waiting_since_s = now
            request.story.vain_attempt = None  # of another wait

    def begin_again(self, request: Request, now: float) -> None:
        """Ends all legs of the request, so that it is computed anew from its prompt and the output received."""
        if request.decode is not None:
            self.end_decode(request, now, "begun again")
        if request.park is not None:
            self.end_park(request, now, "begun again")
        if request.prefill is not None:
            self.end_prefill(request, now, "begun again")
        self.settle(request, now)

    def _come_apart(self, request: Request, now: float) -> None:
        """Replaces a request without legs by a request for each answer that is not over."""
        self.forget_released(request)
        self._remove(request, now)
        parts = self.parts[request.request_id] = {}
        for answer in request.open_answers:
            story = request.story
            part = Request(
                request.spec,
                request.max_tokens,
                request.number + answer.index,
                self.shares.enter(request.spec.tenant, request.share.weight, now),
                is_charged=request.is_charged,
                arrived_s=request.arrived_s,
                phase_since_s=now,
                expected_output_tokens=request.expected_output_tokens,
                answers=[answer],
                is_part=True,
                num_scored=request.num_scored,
                output_from=request.output_from,
                fingerprint=request.fingerprint,
                waiting_since_s=now,
                setbacks=replace(request.setbacks, crashes=list(request.setbacks.crashes), refusals={}),
                story=replace(story, num_retries=story.num_retries + 1, worker_timings=list(story.worker_timings)),
            )
            parts[part.key] = self.requests[part.key] = part
            self._queue(part)
            if part.setbacks.crashes:
                self.crashed.add(part.key)
        assert parts, "what is over has ended"
        self.placement_is_due = True

    def _why_given_up(self, request: Request) -> str:
        """Returns why the request is placed no more; an empty text if it may be."""
        num_crashes, num_starts = len(request.setbacks.crashes), request.setbacks.num_fruitless_starts
        if num_crashes >= self.config.max_crashes:
            return f"workers failed {num_crashes} times under this request"
        if request.prefill is None and request.park is None and num_starts >= self.config.max_fruitless_starts:
            return f"its prompt was computed {num_starts} times without a token"
        return ""

    def finish(
        self, request: Request, answer: PartialAnswer, reason: FinishReason, stop_token_id: int | None, now: float
    ) -> None:
        """Notes that an answer is complete. The request ends with its last."""
        answer.over = True
        if not request.open_answers:
            self._end_request(request, now, "done")
        spec = request.spec
        self.output_lengths.observe(spec.tenant, len(spec.token_ids), len(answer.output))
        is_last = not self.of_id(request.request_id)
        told = summary(request, answer, now)
        self.actions.append(EmitFinished(request.request_id, reason, stop_token_id, told, answer.index, is_last))

    def fail(self, request: Request, error: BatonError, now: float) -> None:
        """Ends the client's request with all its parts."""
        for each in self.of_id(request.request_id):
            self._end_request(each, now, error.reason.lower())
        self.actions.append(EmitFailed(request.request_id, error))

    def _fix_fingerprint(self, request: Request, worker: Worker) -> None:
        """Notes which worker computes the prompt: only workers of its fingerprint may go on with the output."""
        bound, found = request.fingerprint, worker.info.fingerprint
        crosses = self.config.replay_across_engines and bound is not None and found.engine != bound.engine
        assert not request.has_begun or found == bound or crosses, "replayed by other weights"
        request.fingerprint = found

    # Defects

    def isolated(self, where: str, request: Request | None, now: float) -> _Isolated:
        """Returns a context that reports an exception of its block as a defect, and ends only the request it was met
        for, if there is one."""
        return _Isolated(self, where, request, now)

    def spoil(self, where: str, request: Request | None, error: Exception, now: float) -> None:
        """Reports a defect, and fails the request on whose behalf it was met, if there is one."""
        self.actions.append(Defect(where, request.request_id if request is not None else "", error))
        if request is None:
            return
        if live := self.of_id(request.request_id):
            self.fail_surely(live[0], unforeseen(error), now)
        else:  # it was ended before the defect was met, but its client may not have been told
            self.actions.append(EmitFailed(request.request_id, unforeseen(error)))
        self._remove_everywhere(request)

    def fail_surely(self, request: Request, error: BatonError, now: float) -> None:
        """Fails a request even if its record is broken: nothing of it is left, here or at the workers."""
        if self.requests.get(request.key) is not request:
            return
        family = self.of_id(request.request_id)
        try:
            self.fail(request, error, now)
        except Exception as defect:
            self.actions.append(Defect("event", request.request_id, defect))
            for each in family:
                self._remove_everywhere(each)
            self.actions.append(EmitFailed(request.request_id, error))

    def _remove_everywhere(self, request: Request) -> None:
        """Removes every trace of a request whose own record cannot be trusted.

        It searches all other records for its legs, and counts anew what is counted over all requests.
        """
        for worker in self.workers.all():
            for leg in [leg for leg, key in worker.legs.items() if key == request.key]:
                self.workers.drop_leg(worker.info.worker_id, leg)
                self.cancel_leg(worker.info, leg)
        for leg in [leg for leg, other in self.legs.items() if other is request]:
            del self.legs[leg]
        self.queue.discard(request)
        request.prefill = request.decode = request.park = request.released = None
        request.phase, request.tokens_in_flight, request.tokens_unoffered = Phase.FINISHED, 0, 0
        self._let_go(request)
        if self.requests.get(request.key, request) is request:
            self._forget(request)
        live = self.requests.values()
        self.num_in = Counter(other.phase for other in live)
        self.handoffs_in_flight = HandoffsInFlight([each.tokens_in_flight for each in live if each.tokens_in_flight])
        self.unoffered_handoffs = HandoffsInFlight([each.tokens_unoffered for each in live if each.tokens_unoffered])
        self.placement_is_due = True

    def _count_handoff(self, request: Request) -> None:
        """Updates the handoffs in flight: one is, from the prompt's placement until a decode worker has admitted it, or
        a store has it."""
        leg, decode, before = request.prefill, request.decode, request.tokens_in_flight
        num_tokens = len(leg.token_ids) if leg is not None and leg.worker.roles is not Role.MIXED else 0
        is_kept = leg is not None and leg.worker.roles is Role.STORE  # it waits where it is in nobody's way
        after = num_tokens if not is_kept and (decode is None or decode.admitted_s is None) else 0
        if after != before:
            self.handoffs_in_flight.change(before, after)
            self.placement_is_due = self.placement_is_due or bool(before)
            request.tokens_in_flight = after
        unoffered = num_tokens if decode is None else 0
        if unoffered != request.tokens_unoffered:
            self.unoffered_handoffs.change(request.tokens_unoffered, unoffered)
            request.tokens_unoffered = unoffered

    def _open_leg(
        self,
        request: Request,
        worker: Worker,
        num_tokens: int,
        queued_tokens: int,
        now: float,
        *,
        num_sequences: int = 1,
        in_place: bool = False,
    ) -> int:
        leg = self.new_leg()
        self.legs[leg] = request
        self.silent_legs.set(self.awake.at(now) + self.soonest_silence_s, leg)
        blocks = num_blocks_for(num_tokens, worker.info.block_size)
        prediction = Prediction(blocks, queued_tokens, now, num_sequences=num_sequences)
        if queued_tokens:
            prediction.priority = request.spec.worker_priority(goes_ahead=request.goes_ahead)
            self.queue.note_sent(worker, prediction.priority, now)
        self.workers.add_leg(worker, leg, request.key, prediction, in_place=in_place)
        if worker.cache is not None and worker.info.roles is not Role.STORE:  # it cannot tell whose blocks it keeps
            spec = request.spec
            worker.cache.expect(spec.block_hashes.get(worker.info.block_size, ()), spec.conversation)
        return leg

    def _health_changed(self, worker_id: str, source_id: str, health: HealthRecord) -> None:
        self.actions.append(HealthChanged(worker_id, source_id, health.state, health.reason))

    def _drop_leg(self, leg: int, worker_id: str) -> None:
        del self.legs[leg]
        self.workers.drop_leg(worker_id, leg)

    def _move(self, request: Request, phase: Phase, now: float) -> None:
        before = request.phase
        if phase is before:
            return
        assert phase in TRANSITIONS[before], f"{before} -> {phase}"
        if before is Phase.QUEUED:
            self.queue.remove(request)
            if phase is not Phase.FINISHED:
                self._hold(request)
            request.story.queued_s += now - request.phase_since_s
            self.actions.append(queue_stage(request, now, outcome="abandoned" if phase is Phase.FINISHED else "done"))
        elif before is Phase.PARKED:
            self.queue.parked.remove(request)
        self.num_in[before] -= 1
        self.num_in[phase] += 1
        request.phase, request.phase_since_s = phase, now
        if phase is Phase.QUEUED:
            self._wait(request)
        elif phase is Phase.PARKED:
            self.queue.parked.add(request)
        else:
            request.unserved_since_s = request.loading_until_s = None
        if phase in (Phase.QUEUED, Phase.FINISHED):
            self._let_go(request)
        if phase in (Phase.QUEUED, Phase.PARKED, Phase.FINISHED):
            self.placement_is_due = True  # the request waits now, or others may have waited for what it had claimed
        self._follow_placing(request, now)

    # Shares

    @property
    def num_expected(self) -> int:
        """Returns how many requests' prompts are being tokenised."""
        return sum(share.num_expected for share in self._expecting)

    def expecting(self) -> list[Share]:
        """Returns the shares of tenants whose prompts are being tokenised."""
        return list(self._expecting)

    def expect(self, expected: ExpectedRequest, now: float) -> Share:
        """Counts a request whose prompt is being tokenised."""
        share = self.shares.enter(expected.tenant, expected.weight, now)
        share.num_expected += 1
        self._expecting[share] = None
        return share

    def arrived(self, share: Share) -> None:
        share.num_expected -= 1
        if not share.num_expected:
            del self._expecting[share]
        share.group.leave(share)

    def received(self, request: Request, num_tokens: int) -> None:
        """Charges output to the request's tenant, and counts it as held."""
        request.share.charge_output(num_tokens)
        if request.num_held:
            request.num_held += num_tokens
            request.share.hold(num_tokens)

    def _hold(self, request: Request) -> None:
        """Counts what a request holds that begins. Its prompt is charged once, however often it is computed."""
        share, num_tokens = request.share, len(request.spec.token_ids)
        share.begins()
        if not request.is_charged:
            request.is_charged = True
            share.charge_prompt(num_tokens)
        request.num_held = num_tokens + request.num_received
        share.hold(request.num_held)

    def _let_go(self, request: Request) -> None:
        request.share.hold(-request.num_held)
        request.num_held = 0

    def _follow_placing(self, request: Request, now: float) -> None:
        """Begins and ends the PLACE span, which lasts from the lease to a worker's admission, over all refusals."""
        if request.phase is Phase.PARKED and request.placing_since_s is None:
            request.placing_since_s = now
        if request.phase in (Phase.PARKED, Phase.BINDING) or request.placing_since_s is None:
            return
        outcome = "done" if request.phase is Phase.DECODING else "abandoned"
        self.actions.append(place_stage(request, request.placing_since_s, now, outcome))
        request.placing_since_s = None

    def _end_request(self, request: Request, now: float, outcome: str) -> None:
        if request.decode is not None:
            self.end_decode(request, now, outcome)
        if request.park is not None:
            self.end_park(request, now, outcome)
        if request.prefill is not None:
            self.end_prefill(request, now, outcome)
        self.forget_released(request)
        self._remove(request, now)

    def _remove(self, request: Request, now: float) -> None:
        """Removes a request without legs."""
        self._count_handoff(request)
        self._move(request, Phase.FINISHED, now)
        del self.num_in[Phase.FINISHED]
        self._forget(request)

    def _forget(self, request: Request) -> None:
        """Forgets its key wherever that is kept."""
        if self.requests.pop(request.key, None) is not None:
            request.share.group.leave(request.share)
        self.crashed.discard(request.key)
        if request.is_part and (parts := self.parts.get(request.request_id)) is not None:
            parts.pop(request.key, None)
            if not parts:
                del self.parts[request.request_id]


class _Isolated:
    """Keeps an exception of its block from whoever runs it. Entered twenty times for a request, and so no generator."""

    __slots__ = ("_book", "_now", "_request", "_where")

    def __init__(self, book: Book, where: str, request: Request | None, now: float) -> None:
        self._book, self._where, self._request, self._now = book, where, request, now

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._book.spoil(self._where, self._request, error, self._now)
        return True


def _command(
    request: Request,
    phase: Role,
    leg: PlacedLeg,
    token_ids: tuple[int, ...],
    now: float,
    choice: PlacementChoice | None,
) -> SendLeg:
    deadline_s = request.spec.deadline_s
    return SendLeg(
        phase,
        leg.worker,
        leg.leg,
        request.spec,
        request.max_tokens,
        token_ids,
        0 if isinstance(leg, PlacedPark) else leg.output_base,
        remaining_s=None if deadline_s is None else max(0.0, deadline_s - now),
        attempt=leg.attempt,
        choice=choice,
        scores_prompt=request.awaits_scores,
        num_answers=len(request.answers),
        index=request.answers[0].index,
        goes_ahead=request.goes_ahead,
    )
