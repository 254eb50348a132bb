"""Ejects workers whose steps take much longer than their peers': outlier detection, as proxies know it. Pure.

Owns: who is whose peer, when a worker counts as slow, and for how long it is ejected. Never: what is placed where. An
ejected worker is given nothing new as long as another worker can take it (`cluster.py`).

A worker's peers are the ready workers of its model with the same roles, fingerprint and hardware. What they have
measured of themselves is compared as if all had declared the same capacity: half of the capacity may take twice the
time. Since at least two peers are needed, and no ejected worker is one, the last workers of a role are never ejected.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from services.router.policy.views import Role, WorkerView


def is_slow_factor(value: float) -> bool:
    """Returns whether `OutlierConfig.slow_factor` may have this value."""
    return value == 0 or 1 < value <= 1000


@dataclass(frozen=True)
class OutlierConfig:
    slow_factor: float = 0.0
    """A worker is slow whose step takes this many times the median of its peers'; 0 if none is to be ejected. It is the
    default, since steps are compared by their sequences and not by the lengths of these: long contexts look slow."""
    interval_s: float = 1.0
    """How often workers are compared."""
    sustained_s: float = 5.0
    """A worker is ejected after it has been slow for so long, in each comparison..."""
    fewest_steps: int = 20
    """...and in so many steps. One step that took fifty times as long weighs less than a doubling after these."""
    fewest_peers: int = 2
    """With one peer, nobody could say which of the two is at fault."""
    most_peers: int = 16
    """How many peers a worker is compared with at most."""
    most_ejected: float = 0.5
    """The largest share of workers that are peers of each other, the ejected ones included, that is ejected at once."""
    similar_steps: float = 2.0
    """Costs of prompts are compared only between workers whose steps differ in prompt tokens by at most this factor:
    what a step costs whatever it computes is shared by its tokens."""
    base_ejection_s: float = 30.0
    """How long the first ejection lasts; each further one lasts twice as long."""
    max_ejection_s: float = 300.0
    """The longest ejection. A worker that was back for so long begins with `base_ejection_s` again."""


@dataclass(frozen=True, slots=True)
class Slowness:
    """Holds what one worker has measured of itself beside what is expected of it, in milliseconds."""

    what: str
    """What takes so long, in words for people."""
    ms: float
    peers_ms: float
    """The median of its peers', as for a worker of its capacity."""

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
class _Record:
    """Keeps what is remembered of one worker."""

    slow_since: dict[Role, tuple[float, int]] = field(default_factory=dict)
    """The time and the number of steps at which each phase was first found slow, if it has been since."""
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
        config, record = self._config, self._records.setdefault(view.worker_id, _Record())
        for phase, steps, measure in (
            (Role.PREFILL, view.load.num_prefill_steps, _prefill_slowness),
            (Role.DECODE, view.load.num_decode_steps, _decode_slowness),
        ):
            slowness = measure(view, peers, config) if phase in view.roles else None
            if slowness is None or slowness.factor < config.slow_factor:
                record.slow_since.pop(phase, None)
                continue
            since_s, since_steps = record.slow_since.setdefault(phase, (now, steps))
            if now - since_s >= config.sustained_s and steps - since_steps >= config.fewest_steps:
                return slowness
        return None

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


def _prefill_slowness(view: WorkerView, peers: Sequence[WorkerView], config: OutlierConfig) -> Slowness | None:
    like = [peer for peer in peers if view.load.has_steps_like(peer.load, config.similar_steps)]
    return _slowness("a prompt token", view, like, lambda each: each.load.ms_per_prefill_token, config)


def _decode_slowness(view: WorkerView, peers: Sequence[WorkerView], config: OutlierConfig) -> Slowness | None:
    """Compares steps of as many sequences as the worker has, and as its peers have: what a worker says of a batch far
    from those that it has run is a guess. The comparison by which it is less slow counts."""
    if len(peers) < config.fewest_peers:
        return None
    batches = {max(1.0, float(view.load.num_running)), max(1.0, statistics.median(p.load.num_running for p in peers))}
    found = (_step_slowness(batch, view, peers, config) for batch in sorted(batches))
    return min((each for each in found if each is not None), key=lambda each: each.factor, default=None)


def _step_slowness(
    batch: float, view: WorkerView, peers: Sequence[WorkerView], config: OutlierConfig
) -> Slowness | None:
    return _slowness(f"a decode step of {batch:.0f}", view, peers, lambda each: each.step_ms(batch), config)


def _slowness(
    what: str,
    view: WorkerView,
    peers: Iterable[WorkerView],
    cost_ms: Callable[[WorkerView], float],
    config: OutlierConfig,
) -> Slowness | None:
    """Returns None if the worker has measured nothing, or too few of its peers have."""
    measured = [ms * peer.capacity for peer in peers if (ms := cost_ms(peer))]
    if not cost_ms(view) or len(measured) < config.fewest_peers:
        return None
    # Of two, the slower one: else one that says it is very fast would make an outlier of everybody else.
    return Slowness(what, cost_ms(view), statistics.median_high(measured) / view.capacity)
