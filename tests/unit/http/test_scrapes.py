"""Metrics are rendered some times a second, however many ask, and nobody sees old figures."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.rpc import prometheus
from services.rpc.prometheus import SCRAPE_EVERY_S, Rendering

OPEN_METRICS = "application/openmetrics-text"


class Turns:
    """Stands for the thread that renders, which works when it is told to, and for the module `time`, by which it
    sleeps."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        self.waiting.append((Future(), lambda: work(*arguments)))
        return self.waiting[-1][0]

    def work(self) -> None:
        while self.waiting:
            future, work = self.waiting.pop(0)
            if future.set_running_or_notify_cancel():
                future.set_result(work())


class Counted(Collector):
    """Keeps when it was collected, and tells a figure."""

    def __init__(self, registry: CollectorRegistry, turns: Turns) -> None:
        self.value = 0
        self.collected_s: list[float] = []
        self._turns = turns
        registry.register(self)
        self.collected_s.clear()  # registering collects once

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.collected_s.append(self._turns.monotonic())
        yield GaugeMetricFamily("figure", "x", self.value)


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Turns:
    turns = Turns()
    monkeypatch.setattr(prometheus, "time", turns)
    monkeypatch.setattr(prometheus, "ThreadPoolExecutor", lambda *_, **__: turns)
    return turns


async def test_the_router_renders_for_all_who_wait(turns: Turns) -> None:
    registry = CollectorRegistry()
    counted, rendering = Counted(registry, turns), Rendering(registry)
    for value in range(1, 6):
        counted.value = value
        turns.now_s += SCRAPE_EVERY_S / 100
        waiting = [asyncio.create_task(rendering.render(form)) for form in ("", OPEN_METRICS) for _ in range(100)]
        await asyncio.sleep(0)
        turns.work()
        for text, _ in await asyncio.gather(*waiting):
            assert f"figure {value}.0" in text.decode().splitlines(), "no older than the question"
    assert len(counted.collected_s) == 10, "five of each format"
    gaps_s = [later - earlier for earlier, later in itertools.pairwise(counted.collected_s)]
    assert gaps_s == pytest.approx([SCRAPE_EVERY_S] * 9)


async def test_who_leaves_takes_no_others_scrape_along(turns: Turns) -> None:
    registry = CollectorRegistry()
    counted, rendering = Counted(registry, turns), Rendering(registry)
    first, second = asyncio.create_task(rendering.render("")), asyncio.create_task(rendering.render(""))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.sleep(0)
    turns.work()
    text, kind = await second
    assert b"figure 0.0" in text
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert len(counted.collected_s) == 1
    with pytest.raises(asyncio.CancelledError):
        await first
