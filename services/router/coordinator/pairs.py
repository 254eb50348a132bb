"""Which worker can take over whose leases, as experience shows. Pure.

Owns: one health record per (source, target), kept with the target. Never: transfers, or whom a failed one counts
against.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.router.coordinator.events import WorkerInfo
from services.router.health import Health, HealthConfig, HealthRecord


@dataclass(slots=True)
class Pair:
    """The way from one incarnation of a source to one incarnation of a target."""

    source: WorkerInfo
    health: HealthRecord
    timings: object = None
    """What the target measured of the newest transfer that a canary made."""


class Pairs:
    """A target's sources, by worker id."""

    def __init__(self) -> None:
        self._pairs: dict[str, Pair] = {}

    def meet(self, source: WorkerInfo, target: WorkerInfo, config: HealthConfig, now: float) -> None:
        """Both are there. Nothing changes for a pair that is known."""
        known = self._pairs.get(source.worker_id)
        if source.worker_id == target.worker_id or source.layout != target.layout:
            return
        if (
            source.role.can_prefill
            and target.role.can_decode
            and (known is None or known.source.incarnation != source.incarnation)
        ):
            self._pairs[source.worker_id] = Pair(source, HealthRecord(config, now))

    def forget(self, source_id: str) -> None:
        self._pairs.pop(source_id, None)

    def get(self, source: WorkerInfo) -> Pair | None:
        """None for another incarnation of it."""
        pair = self._pairs.get(source.worker_id)
        return pair if pair is not None and pair.source.incarnation == source.incarnation else None

    def all(self) -> list[Pair]:
        return list(self._pairs.values())

    def barred(self) -> frozenset[str]:
        """Sources it cannot fetch from, or that are being tried again after that."""
        return frozenset(name for name, pair in self._pairs.items() if _barred(pair.health))

    def untried(self) -> frozenset[str]:
        """Sources of which that is not known."""
        return frozenset(
            name for name, pair in self._pairs.items() if not pair.health.trusted and not _barred(pair.health)
        )


def _barred(health: HealthRecord) -> bool:
    """What is new may be used: only a transfer shows whether it works, and a user's request may be the first."""
    return health.state in (Health.DOWN, Health.PROBING) and not health.takes_one
