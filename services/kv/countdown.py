"""Defines a clock that can be paused, for a lease's time to live and for its stall limit. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Countdown:
    """Counts seconds down, only while it runs.

    A pause keeps what was spent, so that pauses do not extend the limit; only `reset` does.
    """

    limit_s: float
    spent_s: float = 0.0
    since_s: float | None = None
    """When it was last started; None while it is paused."""

    def run(self, running: bool, now: float) -> None:
        """Starts or pauses the countdown. Without effect if it runs, or is paused, already."""
        if running and self.since_s is None:
            self.since_s = now
        elif not running and self.since_s is not None:
            self.spent_s += now - self.since_s
            self.since_s = None

    def reset(self, now: float) -> None:
        """Sets the countdown back to its full limit; it goes on running, or stays paused."""
        self.spent_s = 0.0
        if self.since_s is not None:
            self.since_s = now

    @property
    def deadline_s(self) -> float | None:
        """Returns when the countdown will be over if it goes on running; None while it is paused."""
        return None if self.since_s is None else self.since_s + self.limit_s - self.spent_s

    def over(self, now: float) -> bool:
        deadline_s = self.deadline_s
        return deadline_s is not None and deadline_s <= now
