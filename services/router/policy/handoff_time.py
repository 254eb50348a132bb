"""Keeps what a pair's handoffs take that nothing hides: a running average, and what their bytes take. Pure.

Owns: also how fast blocks come from one worker to another, over the newest handoffs, by their bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MIN_HANDOFFS = 20
"""The fewest handoffs that must have been seen before the average is trusted."""
MEMORY_S = 60.0
"""Seconds after which an average or rate to which nothing was added is not trusted before the next handoff: a pair that
was slow is tried again now and then."""


_LEAST_BYTES = 256 << 10
"""Handoffs of less say how long a copy takes to begin."""
_LEAST_MS, _MOST_MS = 1e-3, 86_400_000.0
_MOST_BYTES_PER_S = 1e15
"""Beyond what any memory gives, whatever a worker says."""
_KEPT = 0.9
"""The share of what was seen that counts on when another handoff is seen."""


@dataclass(slots=True)
class TransferRate:
    """Averages the rates of one pair's handoffs, each by its bytes."""

    _num_bytes: float = 0.0
    _ms: float = 0.0

    def observe(self, num_bytes: int, copy_ms: float) -> bool:
        """Adds a handoff, as its destination reports it; what makes no sense is left out. Returns whether it counts."""
        if num_bytes < _LEAST_BYTES or not _LEAST_MS <= copy_ms <= _MOST_MS:  # also where it is not a number
            return False
        self._num_bytes = _KEPT * self._num_bytes + num_bytes
        self._ms = _KEPT * self._ms + copy_ms
        return True

    @property
    def bytes_per_s(self) -> float | None:
        """Returns the rate; None while it is not known."""
        return min(self._num_bytes / self._ms * 1000, _MOST_BYTES_PER_S) if self._ms else None


@dataclass(slots=True)
class HandoffTime:
    """Knows the newest handoffs of one pair of workers.

    Their average says what they take apart from their length: messages, and what the pair's prompts have in common. The
    rate says it of a prompt of any length, and after the first handoff."""

    token_bytes: int = 0
    """The KV of one token; 0 if it is not known, and then the rate says nothing."""
    rate: TransferRate = field(default_factory=TransferRate)
    _num_seen: int = 0
    _average_ms: float = 0.0
    _newest_s: float = 0.0
    _newest_copy_s: float = 0.0
    _tried_s: float = 0.0
    """When a prompt was last split because the average or the rate was not trusted any more."""

    def observe(self, ms: float, now: float) -> None:
        """Adds a handoff: `ms` passed after both its prompt was computed and its decode worker had admitted it."""
        self._num_seen = min(self._num_seen + 1, MIN_HANDOFFS)
        weight = 1 / self._num_seen
        if now - self._newest_s > MEMORY_S:
            weight = max(weight, 0.5)  # what was before says less than usual
        self._average_ms += weight * (ms - self._average_ms)
        self._newest_s = now

    def copied(self, num_bytes: int, copy_ms: float, now: float) -> None:
        """Adds how long a handoff's bytes were copied."""
        is_old = now - self._newest_copy_s > MEMORY_S
        rate = TransferRate() if is_old else self.rate  # what was long before would outweigh it
        if rate.observe(num_bytes, copy_ms):
            self.rate, self._newest_copy_s = rate, now

    def average_ms(self, now: float) -> float | None:
        """Returns the average in milliseconds; None while it is not known."""
        known = self._num_seen >= MIN_HANDOFFS and self._is_fresh(self._newest_s, now)
        return self._average_ms if known else None

    def expected_ms(self, num_tokens: float, step_tokens: float, token_ms: float, now: float) -> float | None:
        """Returns the milliseconds that nothing is expected to hide of a handoff of `num_tokens`; None while nothing is
        known.

        The source computes `step_tokens` at once, each in `token_ms`, and what it has computed is copied meanwhile. So
        the first of these steps is never hidden, and of a token after it what it takes to copy beyond computing it.
        """
        average_ms, copy_ms = self.average_ms(now), self._copy_ms(now)
        if copy_ms is None:
            return average_ms
        first = min(num_tokens, step_tokens)
        exposed_ms = first * copy_ms + (num_tokens - first) * max(0.0, copy_ms - token_ms)
        return max(average_ms or 0.0, exposed_ms)

    def tried(self, now: float) -> None:
        """Notes that a prompt is split to see what the pair takes now: until that is known, what was seen before counts
        for others."""
        has_rate = self.rate.bytes_per_s is not None
        if not self._is_fresh(self._newest_s, now) or (has_rate and not self._is_fresh(self._newest_copy_s, now)):
            self._tried_s = now

    def _copy_ms(self, now: float) -> float | None:
        """Returns how long a token's KV is copied; None while it is not known."""
        rate = self.rate.bytes_per_s
        known = rate and self.token_bytes and self._is_fresh(self._newest_copy_s, now)
        return self.token_bytes / rate * 1000 if rate and known else None

    def _is_fresh(self, newest_s: float, now: float) -> bool:
        return now - max(newest_s, self._tried_s) <= MEMORY_S
