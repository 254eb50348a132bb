"""Decides how far a worker, or a pair of workers, is trusted: one state machine for both. Pure.

Owns: states, transitions, and when a probe is due. Never: what counts as a failure or a success (`coordinator`), probes
themselves (`coordinator/canaries.py`), placement (`policy`). Open sessions are another matter: a worker is placed on
only if its session is open *and* its health allows.

                        2 successes                  1 success, with canaries;    its share grows at first
    SUSPECT  ----------------------------->  UP  <-------------------------------  NEW
       |  <---------------------------------  |                                     |
       |             1 failure                |  a device step is stuck             | 3 failures
       |  3 failures in all                   v                                     |
       '----------------------------------> DOWN <-----------------------------------'
                                            |  ^
                          after a pause     v  |  1 failure
                                          PROBING --- 2 successes ---> RISING --- after a while ---> UP
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass


class Health(enum.Enum):
    NEW = "new"
    """A canary decides whether it becomes UP or DOWN."""
    UP = "up"
    SUSPECT = "suspect"
    """It failed lately: it is used, but others are preferred."""
    DOWN = "down"
    PROBING = "probing"
    """Half-open: it gets probes only; without canaries, one request at a time serves as the probe."""
    RISING = "rising"
    """Slow start: its share of the requests grows."""


TRANSITIONS: dict[Health, frozenset[Health]] = {
    Health.NEW: frozenset({Health.UP, Health.DOWN}),
    Health.UP: frozenset({Health.SUSPECT, Health.DOWN, Health.NEW}),
    Health.SUSPECT: frozenset({Health.UP, Health.DOWN, Health.NEW}),
    Health.DOWN: frozenset({Health.PROBING}),
    Health.PROBING: frozenset({Health.RISING, Health.DOWN}),
    Health.RISING: frozenset({Health.UP, Health.DOWN, Health.NEW}),
}


@dataclass(frozen=True)
class HealthConfig:
    canaries: bool = False
    """Whether probes are sent: what is NEW is probed before it is used, and what is PROBING gets nothing else."""
    failures_down: int = 3
    successes_up: int = 2
    one_fault_s: float = 0.1
    """Failures this many seconds after a counted one do not count: a step that raises fails all its sequences."""
    pause_s: float = 1.0
    """Seconds between going down and the first probe; doubles each time it goes down again before it is up."""
    max_pause_s: float = 8.0
    slow_start_s: float = 10.0
    forgive_s: float = 30.0
    """Seconds without a failure or success after which a SUSPECT is UP again."""
    probe_s: float = 0.25
    """Seconds between probes; doubles with each probe that decided nothing."""
    max_probe_s: float = 5.0
    recheck_s: float = 0.0
    """Average seconds between two probes of what is UP; 0 for never."""
    starts_slowly: bool = False
    """Whether the share of what is new or restarted grows over `slow_start_s`, as after it was down."""


@dataclass(frozen=True, slots=True)
class Ramp:
    """Describes trust that grows from 0 at `since_s` to 1 in `over_s` seconds."""

    since_s: float
    over_s: float

    def at(self, now: float) -> float:
        return min(1.0, max(0.0, (now - self.since_s) / self.over_s))


class HealthRecord:
    """Keeps the health of one worker, across its restarts, or of one pair."""

    def __init__(self, config: HealthConfig, now: float) -> None:
        self.state = Health.NEW if config.canaries else Health.UP
        self.since_s = now
        self.reason = ""
        """The reason of the last failure, until the state is UP again."""
        self.num_failures = 0
        """Failures since the state was last UP."""
        self.last_success_s = -math.inf
        self._config = config
        self._last_failure_s = -math.inf
        self._num_successes = 0
        self._num_downs = 0
        self._probe_at_s = now
        self._num_probes = 0
        self._starts_at_s: float | None = now if config.starts_slowly else None
        """The time at which it became UP, new or restarted, if its share still grows from there; else None."""
        self._plan_probe(now)

    @property
    def usable(self) -> bool:
        """Returns whether requests may be placed there, as far as health decides."""
        return self.state in (Health.UP, Health.SUSPECT, Health.RISING)

    @property
    def trusted(self) -> bool:
        """Returns whether it has no failure that still counts against it: UP, or RISING after a recovery."""
        return self.state in (Health.UP, Health.RISING)

    @property
    def takes_one(self) -> bool:
        """Returns whether a single request may serve as its probe."""
        return self.state is Health.PROBING and not self._config.canaries

    @property
    def ramp(self) -> Ramp | None:
        """Returns how its trust grows again, or None if it is fully trusted."""
        if self.state is Health.RISING:
            return Ramp(self.since_s, self._config.slow_start_s)
        if self.state is Health.SUSPECT:
            return Ramp(self._last_failure_s, self._config.forgive_s)
        if self.state is Health.UP and self._starts_at_s is not None:
            return Ramp(self._starts_at_s, self._config.slow_start_s)
        return None

    @property
    def ages(self) -> bool:
        """Returns whether time alone will change it."""
        return self.state is Health.DOWN or self.ramp is not None

    @property
    def settled(self) -> bool:
        """Returns whether it is up, and neither time nor a probe will change that."""
        return self.state is Health.UP and self._starts_at_s is None and self._probe_at_s == math.inf

    # Inputs

    def failed(self, reason: str, now: float, *, at_once: bool = False) -> None:
        """Counts a failure, and goes to SUSPECT or DOWN if that is due.

        `at_once` is for a failure beyond doubt, such as a stuck step: it goes DOWN without a second failure. Report it
        for as long as it lasts: each time, the pause before the first probe begins again.
        """
        if self.state is Health.DOWN:
            if at_once:
                self._probe_at_s = now + self._pause_s()
            return
        if not at_once and now - self._last_failure_s < self._config.one_fault_s:
            return
        self._last_failure_s, self.reason = now, reason
        self.num_failures += 1
        self._num_successes = 0
        on_trial = self.state in (Health.PROBING, Health.RISING)
        if at_once or on_trial or self.num_failures >= self._config.failures_down:
            self._advance(Health.DOWN, now)
            self._num_downs += 1
            self._probe_at_s = now + self._pause_s()
        elif self.state is Health.UP:
            self._advance(Health.SUSPECT, now)

    def succeeded(self, now: float) -> None:
        """Counts a success, and goes towards UP if that is due."""
        self.last_success_s = now
        if self.state in (Health.UP, Health.RISING, Health.DOWN):
            return
        self._num_successes += 1
        if self.state is Health.NEW:
            self._up(now)
            self._starts_at_s = now if self._config.starts_slowly else None
        elif self._num_successes >= self._config.successes_up:
            if self.state is Health.PROBING:
                self._advance(Health.RISING, now)
                self.num_failures = 0
            else:
                self._up(now)

    def restarted(self, now: float) -> None:
        """Notes a new process of the worker, about which earlier successes say little.

        A pause after failures is not shortened.
        """
        if self._config.canaries and self.usable:
            self._advance(Health.NEW, now)
        elif self.state is Health.UP and self._config.starts_slowly:
            self._starts_at_s = now

    def returned(self, now: float) -> None:
        """Lets the share of what was given nothing for a while grow from nothing, as after it was down."""
        if self.state is Health.UP:
            self._starts_at_s = now

    def tick(self, now: float) -> bool:
        """Makes the transitions that time alone causes. Returns True if the state has changed."""
        before = self.state
        if self.state is Health.DOWN and now >= self._probe_at_s:
            self._advance(Health.PROBING, now)
        elif (ramp := self.ramp) is not None and ramp.at(now) >= 1.0:
            if self.state is Health.UP:
                self._starts_at_s = None
            else:
                self._up(now)
        return self.state is not before

    # Probes

    def wants_probe(self, now: float, *, busy: bool = False) -> bool:
        """Returns whether a probe is due.

        If `busy`, what is trusted is being used enough: its probe waits for a quieter moment, but at most `recheck_s`
        seconds.
        """
        if not self._config.canaries or self.state is Health.DOWN:
            return False
        return now >= self._probe_at_s + (self._config.recheck_s if busy and self.trusted else 0.0)

    def probed(self, now: float) -> None:
        """Notes that a probe was sent, and plans the next."""
        if self.trusted:
            self._plan_probe(now)
            return
        pause_s = min(self._config.max_probe_s, self._config.probe_s * 2.0 ** min(self._num_probes, 16))
        self._num_probes += 1
        self._probe_at_s = now + pause_s

    def wants_one_now(self, now: float) -> None:
        """Makes a probe of what is trusted due now, before its time."""
        if self.trusted:
            self._probe_at_s = now

    def _plan_probe(self, now: float) -> None:
        """Plans the next probe: at once if it is not trusted, else at a time that differs between workers."""
        if not self.trusted:
            self._probe_at_s = now
        elif self._config.recheck_s:
            self._probe_at_s = now + self._config.recheck_s * (0.75 + 0.5 * (now * 0.618034 % 1.0))
        else:
            self._probe_at_s = math.inf

    def _pause_s(self) -> float:
        return min(self._config.max_pause_s, self._config.pause_s * 2.0 ** min(self._num_downs - 1, 16))

    def _up(self, now: float) -> None:
        self._advance(Health.UP, now)
        self.num_failures = self._num_downs = 0
        self.reason = ""

    def _advance(self, to: Health, now: float) -> None:
        assert to in TRANSITIONS[self.state], f"{self.state} -> {to}"
        self.state, self.since_s = to, now
        self._num_successes = self._num_probes = 0
        self._starts_at_s = None
        self._plan_probe(now)
