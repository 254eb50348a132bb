"""Ejects workers whose steps take much longer than their peers': outlier detection, as proxies know it. Pure.

Owns: who is whose peer, when a worker counts as slow, and for how long it is ejected. Never: what is placed where. An
ejected worker is given nothing new as long as another worker can take it (`cluster.py`).

A worker's peers are the ready workers of its model with the same roles, fingerprint and hardware. Compared are the
averages of their newest steps, by their tokens and what these attend to (`StepAverage.most_ms`): a worker whose step
has twice as much of either as a peer's may take twice the peer's time. So may half of the capacity, as all declare it.
Workers that do not report such averages are not judged, and judge nobody. Since at least two peers are needed, and no
ejected worker is one, the last workers of a role are never ejected.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from services.core.step_average import StepAverage
from services.router.policy.views import Load, Role, WorkerView


def is_slow_factor(value: float) -> bool:
    """Returns whether `OutlierConfig.slow_factor` may have this value."""
    return value == 0 or 1 < value <= 1000


@dataclass(frozen=True)
class OutlierConfig:
    slow_factor: float = 2.0
    """A worker is slow whose step takes this many times the median of its peers'; 0 if none is to be ejected."""
    interval_s: float = 1.0
    """How often workers are compared."""
    sustained_s: float = 5.0
    """Seconds for which a worker must be slow, in each comparison, before it is ejected."""
    fewest_steps: int = 20
    """Steps that it must have made meanwhile, as must at least `fewest_peers`. One step that took long is less than a
    doubling by then (`StepAverage`)."""
    fewest_peers: int = 2
    """With one peer, nobody could say which of the two is at fault."""
    most_peers: int = 16
    """How many peers a worker is compared with at most."""
    most_ejected: float = 0.5
    """The largest share of workers that are peers of each other, the ejected ones included, that is ejected at once."""
    base_ejection_s: float = 30.0
    """How long the first ejection lasts; each further one lasts twice as long."""
    max_ejection_s: float = 300.0
    """Seconds of the longest ejection. A worker that was back for this time begins with `base_ejection_s` again."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """Holds what one worker has measured of itself beside what is expected of it, in milliseconds."""

    what: str
    """What takes so long, in words for people."""
    ms: float
    peers_ms: float
    """The median of its peers', as for a worker of its capacity and a step like its own."""

    @property
    def factor(self) -> float:
        return self.ms / self.peers_ms


@dataclass(frozen=True, slots=True)
class Ejection:
    """Says why a worker is ejected, and until when."""

    slowness: Slowness
    until_s: float
    seconds: float
    """How long it lasts in all."""

    def reason(self, now: float) -> str:
        """Returns the reason and the time that is left, in words for people."""
        found = self.slowness
        return (
            f"ejected for {max(0.0, self.until_s - now):.0f} s: {found.what} takes {found.ms:.3g} ms, "
            f"the median of its peers {found.peers_ms:.3g} ms"
        )


@dataclass(slots=True)
class _SlowSince:
    """Keeps since when a worker has been found slow, in each comparison."""

    at_s: float
    num_steps: dict[str, int] = field(default_factory=dict)
    """How many steps it, and each of its peers, had made by then, or when it became its peer."""

    def note(self, phase: Role, views: Iterable[WorkerView]) -> None:
        made = {view.worker_id: _newest(phase, view.load).num_steps for view in views}
        # A new process of a worker counts from 0.
        self.num_steps = {name: min(steps, self.num_steps.get(name, steps)) for name, steps in made.items()}


@dataclass(slots=True)
class _Record:
    """Keeps what is remembered of one worker."""

    slow_since: dict[Role, _SlowSince] = field(default_factory=dict)
    """Of each phase in which it was slow in the last comparison."""
    ejection: Ejection | None = None
    num_ejections: int = 0
    """Ejections without a long time between them."""
    back_s: float = 0.0
    """When the last one ended."""


class OutlierDetection:
    """Keeps who is ejected, of all workers of one router."""

    def __init__(self, config: OutlierConfig) -> None:
        self._config = config
        self._records: dict[str, _Record] = {}
        self._look_at_s = 0.0

    def ejection(self, worker_id: str) -> Ejection | None:
        record = self._records.get(worker_id)
        return record.ejection if record is not None else None

    def forget(self, worker_id: str) -> None:
        """Drops what is known of a worker that is gone, or of whose name there is a new process."""
        self._records.pop(worker_id, None)

    def tick(self, workers: Callable[[], Collection[WorkerView]], now: float) -> list[str]:
        """Compares the workers, if that is due. Returns those that are ejected now, or are back."""
        if not self._config.slow_factor or now < self._look_at_s:
            return []
        self._look_at_s = now + self._config.interval_s
        changed = [worker_id for worker_id, record in self._records.items() if self._ends(record, now)]
        groups: dict[Hashable, list[WorkerView]] = {}
        for view in workers():
            if view.ready:
                kind = (view.model, view.roles, view.fingerprint, view.hardware)
                groups.setdefault(kind, []).append(view)
        for group in groups.values():
            changed += self._without_peers(group, now)
            changed += self._look_at(group, now)
        return changed

    def _without_peers(self, group: Sequence[WorkerView], now: float) -> Iterable[str]:
        """Ends the ejections of a group of which too few are left to say who is slow, and yields who is back."""
        ejected = [view for view in group if self.ejection(view.worker_id) is not None]
        num_active, config = len(group) - len(ejected), self._config
        if num_active < config.fewest_peers or len(ejected) > config.most_ejected * len(group):
            for view in ejected:
                self._end(self._records[view.worker_id], now)
                yield view.worker_id

    def _ends(self, record: _Record, now: float) -> bool:
        """Ends the worker's ejection if its time is over. Returns whether it was."""
        if record.ejection is None or now < record.ejection.until_s:
            return False
        self._end(record, now)
        return True

    def _end(self, record: _Record, now: float) -> None:
        record.ejection, record.back_s = None, now

    def _look_at(self, group: Sequence[WorkerView], now: float) -> Iterable[str]:
        """Ejects those of the group that have been slow for long enough, the slowest first, and yields them."""
        config = self._config
        active = [view for view in group if self.ejection(view.worker_id) is None]
        room = int(config.most_ejected * len(group)) - (len(group) - len(active))
        found = (
            (view, self._lasting(view, _peers(active, at, config.most_peers), now)) for at, view in enumerate(active)
        )
        slow = [(view, slowness) for view, slowness in found if slowness is not None]
        # Each ejection takes a peer from the others.
        room = min(room, len(active) - config.fewest_peers)
        for view, slowness in sorted(slow, key=lambda each: -each[1].factor)[: max(0, room)]:
            self._eject(view.worker_id, slowness, now)
            yield view.worker_id

    def _lasting(self, view: WorkerView, peers: Sequence[WorkerView], now: float) -> Slowness | None:
        """Returns by what the worker is slow, and has been for long enough; else None."""
        record = self._records.setdefault(view.worker_id, _Record())
        for phase in (Role.PREFILL, Role.DECODE):
            if phase not in view.roles:
                continue
            if self._slowness(phase, view, peers) is None:
                record.slow_since.pop(phase, None)
                continue
            since = record.slow_since.setdefault(phase, _SlowSince(now))
            since.note(phase, (view, *peers))
            if now - since.at_s < self._config.sustained_s or not self._is_proven(since, phase, view):
                continue
            # Who has done nothing since then speaks of another time, when everything may have been quicker.
            fresh = [peer for peer in peers if self._is_proven(since, phase, peer)]
            if (slowness := self._slowness(phase, view, fresh)) is not None:
                return slowness
        return None

    def _slowness(self, phase: Role, view: WorkerView, peers: Iterable[WorkerView]) -> Slowness | None:
        """Returns how slow the worker is; None if it is not, or nobody can say."""
        found = _slowness(phase, view, peers, self._config.fewest_peers)
        return found if found is not None and found.factor >= self._config.slow_factor else None

    def _is_proven(self, since: _SlowSince, phase: Role, view: WorkerView) -> bool:
        """Returns whether the worker has made enough steps since the comparison that began it."""
        return _newest(phase, view.load).num_steps - since.num_steps[view.worker_id] >= self._config.fewest_steps

    def _eject(self, worker_id: str, slowness: Slowness, now: float) -> None:
        config, record = self._config, self._records[worker_id]
        if now - record.back_s >= config.max_ejection_s:
            record.num_ejections = 0
        seconds = min(config.max_ejection_s, config.base_ejection_s * 2.0 ** min(record.num_ejections, 16))
        record.num_ejections += 1
        record.slow_since.clear()
        record.ejection = Ejection(slowness, now + seconds, seconds)


def _peers(active: Sequence[WorkerView], at: int, most: int) -> list[WorkerView]:
    """Returns the others, or as many as are enough of those that come next."""
    return [active[(at + step) % len(active)] for step in range(1, min(len(active), most + 1))]


def _newest(phase: Role, load: Load) -> StepAverage:
    """Returns what the worker's newest steps of the phase were like."""
    return load.prefill_step if phase is Role.PREFILL else load.decode_step


def _slowness(phase: Role, view: WorkerView, peers: Iterable[WorkerView], fewest: int) -> Slowness | None:
    """Returns None if the worker has not said what its steps are like, or fewer than `fewest` of its peers have."""
    mine = _newest(phase, view.load)
    peers_ms = [ms * peer.capacity for peer in peers if (ms := _newest(phase, peer.load).most_ms(mine))]
    if not (mine.ms and mine.tokens and mine.attended_tokens) or len(peers_ms) < fewest:
        return None
    what = "a step with prompts" if phase is Role.PREFILL else "a decode step"
    each = mine.attended_tokens / mine.tokens
    # Of two, the slower one: else one that says it is very fast would make an outlier of everybody else.
    return Slowness(
        f"{what}, of {mine.tokens:.0f} tokens that attend to {each:.0f} each,",
        mine.ms,
        statistics.median_high(peers_ms) / view.capacity,
    )
