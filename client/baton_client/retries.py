"""Decides when a call is made again.

Owns: the decision, the pause and the deadline that all attempts share. Never: calls, or waiting.
"""

from __future__ import annotations

import dataclasses
import random
import time
from collections.abc import Callable

import grpc

from baton_client.errors import CallFailed, from_rpc_error

_WORKER_FAILED = "WORKER_FAILED"
"""Workers kept failing under this request. It may be the reason, so it is left to the caller to send it once more."""


@dataclasses.dataclass(frozen=True)
class RetryPolicy:
    """Says how often a refused call is made, and how long the pauses are."""

    max_attempts: int = 4
    """The most calls in all; with 1, none is repeated."""
    first_pause_s: float = 0.2
    """The pause before the second attempt, in seconds; it doubles with each further one."""
    max_pause_s: float = 5.0
    """The longest pause, in seconds; a server that asks for a longer one is not asked again."""

    def __post_init__(self) -> None:
        if self.max_attempts < 1 or not 0 < self.first_pause_s <= self.max_pause_s:
            raise ValueError(f"{self}: at least one attempt, and 0 < first_pause_s <= max_pause_s")


A_FEW_TIMES = RetryPolicy()
ONCE = RetryPolicy(max_attempts=1)


class Attempts:
    """Counts the attempts of one call."""

    def __init__(
        self,
        policy: RetryPolicy,
        timeout_s: float | None,
        *,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """Starts the clock: `timeout_s` is for all attempts and pauses together. `draw` gives a number in [0, 1)."""
        self._policy = policy
        self._clock = clock
        self._draw = draw
        self._deadline_s = None if timeout_s is None else clock() + timeout_s
        self._num_failed = 0
        self.received = False
        """Set by the caller when something of the answer has arrived: from then on no attempt follows."""

    def remaining_s(self) -> float | None:
        """Returns the time left to the next attempt; None without a deadline."""
        return None if self._deadline_s is None else max(0.0, self._deadline_s - self._clock())

    def pause_s(self, error: grpc.RpcError) -> float:
        """Returns how long to wait before the next attempt after this failure. Raises it where there is none."""
        failed = from_rpc_error(error)
        self._num_failed += 1
        pause_s = self._pause_s(failed.retry_after_s or 0.0)
        remaining_s = self.remaining_s()
        if (
            self.received
            or self._num_failed >= self._policy.max_attempts
            or not is_refusal(failed)
            or pause_s is None
            or (remaining_s is not None and remaining_s <= pause_s)
        ):
            raise failed from error
        return pause_s

    def _pause_s(self, asked_s: float) -> float | None:
        """Adds a random part to what the server asks for, so that many clients do not all come at once."""
        policy = self._policy
        if asked_s > policy.max_pause_s:
            return None
        own_s = min(policy.max_pause_s, policy.first_pause_s * (1 << (self._num_failed - 1)))
        return min(policy.max_pause_s, asked_s + own_s * (1 + self._draw()) / 2)


def is_refusal(failed: CallFailed) -> bool:
    """Tells whether the same call may succeed later and does no harm if it is made again: nobody was there to take it,
    or the server was full and says when to come back."""
    if failed.code is grpc.StatusCode.UNAVAILABLE:
        return failed.reason != _WORKER_FAILED
    return failed.code is grpc.StatusCode.RESOURCE_EXHAUSTED and failed.retry_after_s is not None
