"""How far a worker, or a pair of workers, is trusted: one state machine for both. Pure.

Owns: states, transitions, and when a probe is due. Never: what counts as a failure or a success (`coordinator`), probes
themselves (`coordinator/canaries.py`), placement (`policy`). Whether a session is open is another matter: a worker is
placed on only if its session is open *and* its health allows.

                        2 successes                  1 success, with deep checks
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
    """A deep check decides."""
    UP = "up"
    SUSPECT = "suspect"
    """It failed lately: used, but others are preferred."""
    DOWN = "down"
    PROBING = "probing"
    """Half-open: probes only; without deep checks one request at a time is the probe."""
    RISING = "rising"
    """Slow start: its share grows."""


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
    deep_checks: bool = False
    """Someone sends probes: what is new is probed before it is used, and what is half-open is used for nothing else."""
    failures_down: int = 3
    successes_up: int = 2
    one_fault_s: float = 0.1
    """Failures that follow each other so closely are one: a step that raises fails all its sequences."""
    pause_s: float = 1.0
    """Between going down and the first probe; doubles each time it goes down again before it is up."""
    max_pause_s: float = 8.0
    slow_start_s: float = 10.0
    forgive_s: float = 30.0
    """A suspect that neither fails nor succeeds for so long is trusted again."""
    probe_s: float = 0.25
    """Between probes; doubles with each that decided nothing."""
    max_probe_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Ramp:
    """Trust that grows from 0 at `since_s` to 1 in `over_s`."""

    since_s: float
    over_s: float

    def at(self, now: float) -> float:
        return min(1.0, max(0.0, (now - self.since_s) / self.over_s))


class HealthRecord:
    """Of one worker, over its restarts, or of one pair."""

    def __init__(self, config: HealthConfig, now: float) -> None:
        self.state = Health.NEW if config.deep_checks else Health.UP
        self.since_s = now
        self.reason = ""
        """Of the last failure, until it is up again."""
        self.num_failures = 0
        """Since it was last up."""
        self.last_success_s = -math.inf
        self._config = config
        self._last_failure_s = -math.inf
        self._num_successes = 0
        self._num_downs = 0
        self._probe_at_s = now
        self._num_probes = 0

    @property
    def usable(self) -> bool:
        """As far as health goes, requests may be placed there."""
        return self.state in (Health.UP, Health.SUSPECT, Health.RISING)

    @property
    def trusted(self) -> bool:
        """Nothing speaks against it."""
        return self.state in (Health.UP, Health.RISING)

    @property
    def takes_one(self) -> bool:
        """A single request may be its probe."""
        return self.state is Health.PROBING and not self._config.deep_checks

    @property
    def ramp(self) -> Ramp | None:
        """None: fully trusted."""
        if self.state is Health.RISING:
            return Ramp(self.since_s, self._config.slow_start_s)
        if self.state is Health.SUSPECT:
            return Ramp(self._last_failure_s, self._config.forgive_s)
        return None

    # What happens to it

    def failed(self, reason: str, now: float, *, at_once: bool = False) -> None:
        """`at_once`: beyond doubt, so that it is down without a second failure; again and again while that lasts."""
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
        """It did what was asked of it."""
        self.last_success_s = now
        if self.state in (Health.UP, Health.RISING, Health.DOWN):
            return
        self._num_successes += 1
        if self.state is Health.NEW:
            self._up(now)
        elif self._num_successes >= self._config.successes_up:
            if self.state is Health.PROBING:
                self._advance(Health.RISING, now)
                self.num_failures = 0
            else:
                self._up(now)

    def restarted(self, now: float) -> None:
        """A new process: what it has shown so far says little. A pause it has to sit out stays."""
        if self._config.deep_checks and self.usable:
            self._advance(Health.NEW, now)

    def tick(self, now: float) -> bool:
        """True if time alone has changed something."""
        before = self.state
        if self.state is Health.DOWN and now >= self._probe_at_s:
            self._advance(Health.PROBING, now)
        elif (ramp := self.ramp) is not None and ramp.at(now) >= 1.0:
            self._up(now)
        return self.state is not before

    # Probes

    def wants_probe(self, now: float) -> bool:
        unsure = self.state in (Health.NEW, Health.SUSPECT, Health.PROBING)
        return self._config.deep_checks and unsure and now >= self._probe_at_s

    def probed(self, now: float) -> None:
        """A probe is on its way; no other before its time."""
        pause_s = min(self._config.max_probe_s, self._config.probe_s * 2.0 ** min(self._num_probes, 16))
        self._num_probes += 1
        self._probe_at_s = now + pause_s

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
        self._probe_at_s = now
