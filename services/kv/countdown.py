"""A clock that runs only at certain times: the lease's time to live, and its stall clock. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Countdown:
    """Seconds that pass only while it runs. Pausing keeps what was spent, so that starting again and again does not
    make it endless; only `reset` does."""

    limit_s: float
    spent_s: float = 0.0
    since_s: float | None = None
    """When it was last started; None while it is paused."""

    def run(self, running: bool, now: float) -> None:
        """Starts or pauses it; no effect if it is so already."""
        if running and self.since_s is None:
            self.since_s = now
        elif not running and self.since_s is not None:
            self.spent_s += now - self.since_s
            self.since_s = None

    def reset(self, now: float) -> None:
        """Full again, running or paused as it was."""
        self.spent_s = 0.0
        if self.since_s is not None:
            self.since_s = now

    @property
    def deadline_s(self) -> float | None:
        """When it will be over if it goes on running; None while it is paused."""
        return None if self.since_s is None else self.since_s + self.limit_s - self.spent_s

    def over(self, now: float) -> bool:
        deadline_s = self.deadline_s
        return deadline_s is not None and deadline_s <= now
