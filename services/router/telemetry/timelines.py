"""Remembers where recent requests spent their time, for the console, `baton top` and `baton slo`. Pure.

Owns: the memory and its bounds; the stages of each request as the router saw them. Never: a clock; times are those of
the router's clock, in seconds. No text is kept unless it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice

from baton.v1 import types_pb2

MOST_REQUESTS = 4096
"""The most requests that are remembered after their end."""
MOST_BYTES = 16 << 20
"""The memory that all of them may take, about."""
MOST_STAGES = 64
"""The most stages that are kept of one request: the first, and the newest."""
MOST_TEXT_CHARS = 2000
_MOST_FAILURE_CHARS = 500
_MOST_REFUSED = 512
_REQUEST_BYTES = 900
_STAGE_BYTES = 250


@dataclass(slots=True)
class TokenTimes:
    """Keeps when the tokens of one request were passed on."""

    num_tokens: int = 0
    first_s: float | None = None
    last_s: float = 0.0
    longest_gap_s: float = 0.0
    """The longest time between one token of an answer and the next."""
    last_of: dict[int, float] = field(default_factory=dict)
    """When the newest token of each answer was passed on."""

    def add(self, num_tokens: int, now: float, index: int = 0) -> float | None:
        """Notes tokens of an answer that were passed on together; the time between them counts as 0. Returns the time
        since the answer's token before; None if there is none."""
        if self.first_s is None:
            self.first_s = now
        before_s = self.last_of.get(index)
        gap_s = None if before_s is None else now - before_s
        if gap_s is not None and gap_s > self.longest_gap_s:
            self.longest_gap_s = gap_s
        self.num_tokens += num_tokens
        self.last_s = self.last_of[index] = now
        return gap_s

    @property
    def per_token_s(self) -> float | None:
        """Returns the mean time of a token after the first, of answers that have as many; None if none has a second."""
        num_further = self.num_tokens - len(self.last_of)
        if self.first_s is None or num_further < 1:
            return None
        return (self.last_s - self.first_s) * len(self.last_of) / num_further


@dataclass(slots=True)
class TimelineStage:
    """Holds one stage of a request: by the router's own names of spans."""

    name: str
    started_s: float
    ended_s: float | None = None
    """None while it goes on."""
    worker_id: str = ""
    leg: int = 0
    attempt: int = 1
    outcome: str = ""
    """How it ended; empty while it goes on."""


@dataclass(slots=True, eq=False)
class Timeline:
    """Keeps where one request spends its time."""

    number: int
    """Counts requests in the order of arrival, from 1. The router's own id of the request is made of it."""
    label: str
    """The id that the client knows; others may have the same."""
    model: str
    arrived_s: float
    times: TokenTimes
    priority: int = 0
    trace_id: str = ""
    text_chars: int = 0
    """How much it may show of the prompt, and of the output: nothing without --log-prompts."""
    prompt: str = ""
    """Shortened."""
    output: str = ""
    """Shortened; empty until it has ended."""
    prompt_tokens: int = 0
    max_tokens: int | None = None
    stages: list[TimelineStage] = field(default_factory=list)
    cached_tokens: int = 0
    prefill_worker: str = ""
    decode_worker: str = ""
    num_retries: int = 0
    ended_s: float | None = None
    """None while it lives."""
    outcome: str = ""
    """Why it finished, or failed; empty while it lives."""
    failure: str = ""
    """What its client was told, if it has failed; shortened."""
    timings: types_pb2.PhaseTimings | None = None
    """What workers and router measured; None unless it has succeeded."""
    was_queued: bool = False
    changed: int = 0
    """The number of its last change, its arrival or its end, among those of all requests."""

    @property
    def request_id(self) -> str:
        """Returns the router's own id of the request, which no other ever has."""
        return str(self.number)

    @property
    def is_live(self) -> bool:
        return self.ended_s is None

    @property
    def num_bytes(self) -> int:
        """Returns about how much memory it takes."""
        return (
            _REQUEST_BYTES
            + _STAGE_BYTES * len(self.stages)
            + 2 * (len(self.prompt) + len(self.output))
            + len(self.failure)
        )

    # What the request's trace and answer report

    def tokenized(self, started_s: float, ended_s: float, num_tokens: int) -> None:
        self.prompt_tokens = num_tokens
        self._add(TimelineStage("tokenize", started_s, ended_s, outcome="done"))

    def leg_sent(self, name: str, worker_id: str, leg: int, attempt: int, now: float) -> None:
        if name == "prefill":
            self.prefill_worker = worker_id
        else:
            self.decode_worker = worker_id
        self._add(TimelineStage(name, now, worker_id=worker_id, leg=leg, attempt=attempt))

    def stage_ended(self, stage: TimelineStage) -> None:
        """Notes a stage that is over. One that belongs to a leg has begun with `leg_sent`."""
        self.was_queued = True
        if stage.leg:
            for known in reversed(self.stages):
                if known.leg == stage.leg:
                    known.ended_s, known.outcome = stage.ended_s, stage.outcome
                    return
            return  # it is kept no longer
        if stage.name == "queue":
            self.num_retries = stage.attempt - 1
        self._add(stage)

    def _add(self, stage: TimelineStage) -> None:
        self.stages.append(stage)
        if len(self.stages) > MOST_STAGES:
            del self.stages[1]


class Timelines:
    """Keeps the timelines of a router's requests: of all that live, and of those that have ended last."""

    def __init__(self, most_requests: int = MOST_REQUESTS, most_bytes: int = MOST_BYTES) -> None:
        self._most_requests = most_requests
        self._most_bytes = most_bytes
        self._live: dict[int, Timeline] = {}
        self._ended: deque[Timeline] = deque()
        self._refused: deque[Timeline] = deque()
        self._by_number: dict[int, Timeline] = {}
        """All that are remembered."""
        self._ended_bytes = 0
        self._number = 0
        self.newest = 0
        """The number of the last change."""

    def begin(self, label: str, model: str, arrived_s: float, times: TokenTimes, priority: int = 0) -> Timeline:
        """Returns the timeline of a request that has arrived. It is kept at least until its end."""
        self._number += 1
        timeline = Timeline(self._number, label, model, arrived_s, times, priority)
        self._live[timeline.number] = self._by_number[timeline.number] = timeline
        self._change(timeline)
        return timeline

    def end(self, timeline: Timeline, outcome: str, now: float, failure: str = "") -> None:
        """Notes that the request has ended: it may be forgotten from now on. Few of those that never came into the
        queue are kept: a flood of them spares the others."""
        if not timeline.is_live:
            return
        timeline.ended_s, timeline.outcome, timeline.failure = now, outcome, failure[:_MOST_FAILURE_CHARS]
        for stage in timeline.stages:
            if stage.ended_s is None:  # nothing else will report how it ended
                stage.ended_s, stage.outcome = now, outcome
        del self._live[timeline.number]
        self._ended_bytes += timeline.num_bytes
        (self._ended if timeline.was_queued else self._refused).append(timeline)
        self._change(timeline)
        for kept, most in ((self._refused, _MOST_REFUSED), (self._ended, self._most_requests)):
            while kept and (len(kept) > most or self._ended_bytes > self._most_bytes):
                forgotten = kept.popleft()
                self._ended_bytes -= forgotten.num_bytes
                del self._by_number[forgotten.number]

    def is_live(self, number: int) -> bool:
        return number in self._live

    def find(self, number: int) -> Timeline | None:
        """Returns the timeline with that number, if it is remembered."""
        return self._by_number.get(number)

    def changed_since(self, change: int, most: int) -> list[Timeline]:
        """Returns those that live or have ended since that change, at most `most`, of those that changed last, in the
        order of their last changes. Of one that lives, more may have changed since than is numbered."""
        live = list(islice(reversed(self._live.values()), most))
        ended = [each for kept in (self._ended, self._refused) for each in islice(_newest_until(kept, change), most)]
        return sorted([*live, *ended], key=lambda each: each.changed)[-most:]

    def _change(self, timeline: Timeline) -> None:
        self.newest += 1
        timeline.changed = self.newest


def _newest_until(kept: deque[Timeline], change: int) -> Iterable[Timeline]:
    for timeline in reversed(kept):
        if timeline.changed <= change:
            return
        yield timeline
