"""Which worker can take over whose leases, as experience shows. Pure.

Owns: one health record per (source, target), kept with the target. Never: transfers, or whom a failed one counts
against.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.router.coordinator.events import WorkerInfo
from services.router.health import Health, HealthConfig, HealthRecord

if TYPE_CHECKING:
    from baton.v1 import types_pb2


@dataclass(slots=True)
class Pair:
    """The way from one incarnation of a source to one incarnation of a target."""

    source: WorkerInfo
    health: HealthRecord
    timings: types_pb2.PhaseTimings | None = None
    """What the target measured of the newest transfer that a canary made."""


class Pairs:
    """A target's sources, by worker id."""

    def __init__(self) -> None:
        self._pairs: dict[str, Pair] = {}
        self._known: _Known | None = None
        """What follows from the records; None if one of them has changed."""

    def meet(self, source: WorkerInfo, target: WorkerInfo, config: HealthConfig, now: float) -> None:
        """Both are there. Nothing changes for a pair that is known."""
        known = self._pairs.get(source.worker_id)
        if source.worker_id == target.worker_id or source.fingerprint.kv != target.fingerprint.kv:
            return
        if (
            source.roles.can_prefill
            and target.roles.can_decode
            and (known is None or known.source.incarnation != source.incarnation)
        ):
            self._pairs[source.worker_id] = Pair(source, HealthRecord(config, now))
            self.changed()

    def forget(self, source_id: str) -> bool:
        """Whether it was known."""
        self.changed()
        return self._pairs.pop(source_id, None) is not None

    def changed(self) -> None:
        """The state of a record is another."""
        self._known = None

    def get(self, source: WorkerInfo) -> Pair | None:
        """None for another incarnation of it."""
        pair = self._pairs.get(source.worker_id)
        return pair if pair is not None and pair.source.incarnation == source.incarnation else None

    @property
    def unsettled(self) -> list[Pair]:
        """Those that time or a probe will change; of a cluster at rest, none."""
        return [pair for pair in self._look().unsettled if not pair.health.settled]

    def all(self) -> list[Pair]:
        return list(self._pairs.values())

    def barred(self) -> frozenset[str]:
        """Sources it cannot fetch from, or that are being tried again after that."""
        return self._look().barred

    def untried(self) -> frozenset[str]:
        """Sources of which that is not known."""
        return self._look().untried

    def _look(self) -> _Known:
        if self._known is None:
            barred = frozenset(name for name, pair in self._pairs.items() if _barred(pair.health))
            doubtful = (name for name, pair in self._pairs.items() if not pair.health.trusted)
            unsettled = tuple(pair for pair in self._pairs.values() if not pair.health.settled)
            self._known = _Known(barred, frozenset(doubtful) - barred, unsettled)
        return self._known


@dataclass(frozen=True, slots=True)
class _Known:
    barred: frozenset[str]
    untried: frozenset[str]
    unsettled: tuple[Pair, ...]


def _barred(health: HealthRecord) -> bool:
    """What is new may be used: only a transfer shows whether it works, and a user's request may be the first."""
    return health.state in (Health.DOWN, Health.PROBING) and not health.takes_one
