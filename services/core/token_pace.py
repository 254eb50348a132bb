"""Reckons how many tokens a second workers compute, from their counts at two looks. Pure."""

from __future__ import annotations

from collections.abc import Set


class TokenPaces:
    """Keeps what was counted at the last look at each worker."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, int]] = {}

    def look(self, worker_id: str, num_tokens: int, now: float) -> float | None:
        """Returns the tokens that the worker has computed a second since the last look at it; None at the first, and if
        it counts anew. `num_tokens` is its `LoadSnapshot.num_tokens`, and `now` is in seconds."""
        before = self._counts.get(worker_id)
        self._counts[worker_id] = (now, num_tokens)
        if before is None or now <= before[0] or num_tokens < before[1]:
            return None
        return round((num_tokens - before[1]) / (now - before[0]), 1)

    def keep(self, worker_ids: Set[str]) -> None:
        """Forgets the other workers."""
        self._counts = {each: count for each, count in self._counts.items() if each in worker_ids}
