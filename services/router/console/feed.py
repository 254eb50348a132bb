"""Tells viewers of the console what has changed, as server-sent events: once a second, and nothing while nobody looks.

What has changed is found out and encoded once for all viewers. A new viewer is given everything first. One that does
not read is let go when too much waits for it; a browser then connects again, and is given everything again.

Owns: what viewers know, and when they are told. Never: the form of the data (`rows.py`), or sockets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from baton.v1 import control_pb2
from services.core.clock import Clock
from services.core.token_pace import TokenPaces
from services.router.catalogue import Catalogue
from services.router.console import rows
from services.router.status import pair_status, pairs, status
from services.router.telemetry.request_metrics import RequestMetrics
from services.router.telemetry.timelines import Timeline, Timelines
from services.rpc.prometheus import INTER_TOKEN_BUCKETS

log = logging.getLogger(__name__)

EVERY_S = 1.0
ITL_EVERY_S = 10.0
"""How often it is noted how the times between tokens were distributed, for those who look later."""
_ITL_KEPT_S = 900.0
MOST_VIEWERS = 64
MOST_FIRST_REQUESTS = 500
MOST_REQUESTS = 200
"""The most requests that viewers are told of at a time, beside the ends of those that they were told live: what more
there is, nobody could read."""
MOST_GROWN = 20
"""The most requests of which viewers are told at a time that they have more tokens, if nothing else has happened."""
_MOST_WAITING_BYTES = 4 << 20
"""Several times what a new viewer is told first."""


@dataclass(eq=False)
class _Viewer:
    waiting: deque[bytes] = field(default_factory=deque)
    num_bytes: int = 0
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: bool = False

    def tell(self, event: bytes) -> None:
        """Adds an event to what waits. Of a viewer that does not read, nothing is kept once that is too much."""
        if self.is_over:
            return
        self.waiting.append(event)
        self.num_bytes += len(event)
        if self.num_bytes > _MOST_WAITING_BYTES:
            self.end()
        self.arrived.set()

    def end(self) -> None:
        self.is_over = True
        self.waiting.clear()
        self.arrived.set()


@dataclass(frozen=True)
class _Snapshot:
    """Holds all that a new viewer is told of. Those that come before the next tick are given the same: to make it takes
    some milliseconds."""

    made_s: float
    known: _Known
    events: list[bytes]


class ConsoleFeed:
    """Feeds the viewers of one router. Use it on the event loop; call `close` before the HTTP server stops."""

    def __init__(
        self,
        catalogue: Catalogue,
        timelines: Timelines,
        requests: RequestMetrics,
        clock: Clock,
        hello: Callable[[], dict[str, Any]],
    ) -> None:
        """Makes a feed without viewers. `hello` tells a new one about the router."""
        self._catalogue = catalogue
        self._timelines = timelines
        self._requests = requests
        self._clock = clock
        self._hello = hello
        self._viewers: set[_Viewer] = set()
        self._telling: asyncio.Task[None] | None = None
        self._known = _Known()
        self._snapshot: _Snapshot | None = None
        self._is_closed = False
        self._gaps = _Gaps(requests)
        self.epoch_s = time.time() - clock.now()
        """What makes Unix time of the router's clock: always the same, so that no row changes by it."""

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    @property
    def has_room(self) -> bool:
        """Returns whether one more may look. One that is let go takes its place until its connection ends."""
        return not self._is_closed and len(self._viewers) < MOST_VIEWERS

    async def events(self) -> AsyncIterator[bytes]:
        """Yields events for one viewer, until it leaves, does not read, or the router stops."""
        if not self.has_room:
            return
        viewer, first = _Viewer(), self._first()
        viewer.tell(event("hello", self._hello() | {"itl_before": self._gaps.before(self.epoch_s, self._clock.now())}))
        for each in first.events:
            viewer.tell(each)
        self._viewers.add(viewer)
        if self._telling is None:
            self._known = first.known  # whoever looked last is gone
            self._telling = asyncio.create_task(self._tell_forever(), name="console")
        try:
            while not viewer.is_over:
                await viewer.arrived.wait()
                viewer.arrived.clear()
                while viewer.waiting and not viewer.is_over:
                    told = viewer.waiting.popleft()
                    viewer.num_bytes -= len(told)
                    yield told
        finally:
            self._viewers.discard(viewer)
            if not self._viewers and self._telling is not None:
                self._telling.cancel()
                self._telling = None

    def _first(self) -> _Snapshot:
        """Returns what a new viewer is told first. What changes after it, the next tick tells."""
        found, now = self._snapshot, self._clock.now()
        if found is None or now - found.made_s >= EVERY_S:
            known = _Known()
            found = self._snapshot = _Snapshot(now, known, self._look(known, MOST_FIRST_REQUESTS))
        return found

    async def remember(self) -> None:
        """Notes, for ever, what those who look later want to know of the minutes before: all that is done while nobody
        looks, once in ten seconds."""
        while True:
            await asyncio.sleep(ITL_EVERY_S)
            self._gaps.note(self._clock.now())

    async def close(self) -> None:
        """Lets all viewers go, and takes no more."""
        self._is_closed = True
        telling, self._telling = self._telling, None
        for viewer in self._viewers:
            viewer.end()
        if telling is not None:
            telling.cancel()
            await asyncio.gather(telling, return_exceptions=True)

    async def _tell_forever(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            self._snapshot = None
            try:
                told = self._look(self._known, MOST_REQUESTS)
            except Exception:  # the page stands still; the router goes on
                log.exception("the console's page could not be told what has changed")
                continue
            for viewer in self._viewers:
                for each in told:
                    viewer.tell(each)

    def _look(self, known: _Known, most_requests: int) -> list[bytes]:
        """Returns the events with all that is not known, and notes that it is."""
        events = [event("state", self._state(known, self._clock.now()))]
        found = self._timelines.changed_since(known.newest, most_requests)
        found += known.ended(self._timelines, {each.number for each in found})
        if changed := known.news(found, self._catalogue):
            told = [rows.request_row(self._catalogue, each, self.epoch_s, in_full=False) for each in changed]
            events.append(event("requests", {"at": round(time.time(), 3), "requests": told}))
        known.newest = self._timelines.newest
        return events

    def _state(self, known: _Known, now: float) -> dict[str, Any]:
        found = status(self._catalogue, now)
        workers, worker_ids, changed_pairs, pair_ids = [], set(), [], set()
        for each in found.workers:
            row = rows.worker_row(each) | {"tokens_per_s": known.pace(each, now)}
            worker_ids.add(row["id"])
            if known.workers.get(row["id"]) != row:
                known.workers[row["id"]] = row
                workers.append(row)
        for worker, pair in pairs(self._catalogue):
            ids = (pair.source.worker_id, worker.info.worker_id)
            pair_ids.add(ids)
            if known.pairs.get(ids) != (key := rows.pair_key(worker, pair, now)):
                known.pairs[ids] = key
                changed_pairs.append(rows.pair_row(pair_status(worker, pair), handoff_ms=key[-1]))
        return {
            "at": round(time.time(), 3),
            "ready": found.ready,
            "phases": rows.phases_row(found),
            **known.totals(self._requests, now),
            "models": [rows.model_row(model) for model in found.models],
            "workers": workers,
            "gone": known.gone_workers(worker_ids),
            "pairs": changed_pairs,
            "pairs_gone": known.gone_pairs(pair_ids),
        }


_Buckets = tuple[list[int], list[int]]
"""How many times between tokens fall into each bucket, of split requests and of others."""


def _grown(now: _Buckets, before: _Buckets) -> dict[str, Any]:
    """Returns by how much each count has grown, as the page is told. A model that is served no longer takes its counts
    away: they grow by nothing."""
    split, unsplit = (
        [max(0, new - old) for new, old in zip(counts, then, strict=True)]
        for counts, then in zip(now, before, strict=True)
    )
    return {"buckets_ms": [round(each * 1000, 1) for each in INTER_TOKEN_BUCKETS], "split": split, "unsplit": unsplit}


class _Gaps:
    """Keeps how the times between tokens were distributed in the last minutes."""

    def __init__(self, requests: RequestMetrics) -> None:
        self._requests = requests
        self._newest = requests.tokens.buckets()
        self._noted: deque[tuple[float, dict[str, Any]]] = deque(maxlen=round(_ITL_KEPT_S / ITL_EVERY_S))

    def note(self, now: float) -> None:
        before, self._newest = self._newest, self._requests.tokens.buckets()
        self._noted.append((now, _grown(self._newest, before)))

    def before(self, epoch_s: float, now: float) -> list[dict[str, Any]]:
        """Returns a histogram for each time between two notes, and for that since the last one."""
        newest = (now, _grown(self._requests.tokens.buckets(), self._newest))
        return [{"at": round(epoch_s + at_s, 3), "itl": histogram} for at_s, histogram in (*self._noted, newest)]


class _Known:
    """Keeps what viewers know already."""

    def __init__(self) -> None:
        self.workers: dict[str, dict[str, Any]] = {}
        self.pairs: dict[tuple[str, str], tuple[Any, ...]] = {}
        self.requests: dict[int, tuple[Hashable, int]] = {}
        """What was told of each request but its tokens, and their number; what was told last comes last."""
        self.live: set[int] = set()
        """Those of them that lived when they were told last."""
        self.newest = 0
        self._paces = TokenPaces()
        self._totals: tuple[float, int, int, int, _Buckets] | None = None

    def pace(self, status: control_pb2.WorkerStatus, now: float) -> float | None:
        """Returns how many tokens a second the worker has computed since the last look; None at first."""
        if not status.HasField("load"):
            return None
        return self._paces.look(status.worker.worker_id, status.load.num_tokens, now)

    def totals(self, requests: RequestMetrics, now: float) -> dict[str, Any]:
        """Returns the pace of all requests since the last look, and the times between tokens in it."""
        buckets = requests.tokens.buckets()
        newest = (now, requests.num_prompt_tokens, requests.num_output_tokens, requests.num_ended, buckets)
        before, self._totals = self._totals or newest, newest
        seconds = max(now - before[0], 1e-3)
        return {
            "prompt_tokens_per_s": round((newest[1] - before[1]) / seconds, 1),
            "output_tokens_per_s": round((newest[2] - before[2]) / seconds, 1),
            "requests_per_s": round((newest[3] - before[3]) / seconds, 2),
            "itl": _grown(buckets, before[4]),
        }

    def gone_workers(self, ids: set[str]) -> list[str]:
        gone = [each for each in self.workers if each not in ids]
        for each in gone:
            del self.workers[each]
        self._paces.keep(ids)
        return gone

    def gone_pairs(self, ids: set[tuple[str, str]]) -> list[tuple[str, str]]:
        gone = [each for each in self.pairs if each not in ids]
        for each in gone:
            del self.pairs[each]
        return gone

    def ended(self, timelines: Timelines, others: set[int]) -> list[Timeline]:
        """Returns those that were told live and have ended, without the others."""
        over = [number for number in self.live - others if not timelines.is_live(number)]
        found = {number: timelines.find(number) for number in over}
        self.live -= {number for number, timeline in found.items() if timeline is None}  # forgotten meanwhile
        return [timeline for timeline in found.values() if timeline is not None]

    def news(self, timelines: Sequence[Timeline], catalogue: Catalogue) -> list[Timeline]:
        """Returns those of which something is not known, and notes that it is. Of those that have only more tokens than
        were told, it returns `MOST_GROWN`, those that were told longest ago: of many, nobody could follow each."""
        news: list[tuple[Timeline, tuple[Hashable, int]]] = []
        grown: dict[int, tuple[Timeline, tuple[Hashable, int]]] = {}
        for timeline in timelines:
            known = self.requests.get(timeline.number)
            told = (rows.request_key(catalogue, timeline), timeline.times.num_tokens)
            if known is None or known[0] != told[0]:
                news.append((timeline, told))
            elif known != told:
                grown[timeline.number] = (timeline, told)
        news += islice((grown[number] for number in self.requests if number in grown), MOST_GROWN)
        for timeline, told in news:
            self.requests.pop(timeline.number, None)
            self.requests[timeline.number] = told
            (self.live.add if timeline.is_live else self.live.discard)(timeline.number)
        while len(self.requests) > 2 * MOST_FIRST_REQUESTS:  # what has ended changes no more
            del self.requests[next(iter(self.requests))]
        return [timeline for timeline, _ in news]


def event(name: str, data: dict[str, Any]) -> bytes:
    """Returns one server-sent event."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return f"event: {name}\ndata: {text}\n\n".encode(errors="replace")
