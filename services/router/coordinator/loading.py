"""Keeps the workers that say that they load, and how long a request waits for one of them. Pure.

Owns: what such workers have announced. Never: workers that can be dialled (`workers.py`), and nothing is placed on
these.

A request that no ready worker could serve waits for one that loads until the latest end that was announced when it
began to wait: a worker that dies while it loads, again and again, keeps it no longer. After that, or once the last of
them has registered as ready or fallen silent, `no_worker_timeout_s` begins.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.core.awake import AwakeTime
from services.router.coordinator.events import LoadingWorker

SILENT_S = 10.0
"""Seconds after which a worker that has not repeated that it loads is gone. It repeats it each second, but to import
torch and to read weights may hold its interpreter for seconds."""


@dataclass(slots=True)
class Loading:
    """Keeps one worker's newest announcement."""

    worker: LoadingWorker
    since_s: float
    until_s: float
    """When it expects to serve."""
    heard_s: float
    """In awake time."""


class LoadingWorkers:
    def __init__(self, awake: AwakeTime) -> None:
        self._awake = awake
        self._loading: dict[str, Loading] = {}

    def all(self) -> list[Loading]:
        return list(self._loading.values())

    def heard(self, worker: LoadingWorker, now: float) -> None:
        known = self._loading.get(worker.worker_id)
        since_s = now if known is None else known.since_s
        until_s, heard_s = now + worker.ready_within_s, self._awake.at(now)
        self._loading[worker.worker_id] = Loading(worker, since_s, until_s, heard_s)

    def loaded(self, worker_id: str) -> None:
        """Forgets the worker: it has registered as one that serves."""
        self._loading.pop(worker_id, None)

    def tick(self, now: float) -> None:
        """Forgets those that have fallen silent."""
        if self._loading:
            heard_s = self._awake.at(now) - SILENT_S
            self._loading = {name: each for name, each in self._loading.items() if each.heard_s > heard_s}

    def expected_s(self, *, has_decoder: bool, now: float) -> float | None:
        """Returns until when to wait for those that load; None if none is expected any more, or they would not help:
        without a worker that decodes, and none among them, nothing is served."""
        expected = [each for each in self._loading.values() if each.until_s > now]
        if not has_decoder and not any(each.worker.roles.can_decode for each in expected):
            return None
        return max((each.until_s for each in expected), default=None)
