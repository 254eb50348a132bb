"""However many ask for the metrics, they are rendered some times a second, and nobody sees old figures."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.router.http.app import _OPENMETRICS, _Scrapes
from services.rpc.metrics import SCRAPE_EVERY_S, MetricsServer


class Counted(Collector):
    """Counts how often it was collected and how many did so at once, and tells a figure."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.value = 0
        self.times = self.most_at_once = self._at_once = 0
        registry.register(self)
        self.times = 0  # registering collects once

    def collect(self) -> Iterator[GaugeMetricFamily]:
        self.times += 1
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        time.sleep(0.005)
        self._at_once -= 1
        yield GaugeMetricFamily("figure", "x", self.value)


def bound(elapsed_s: float) -> int:
    """The most renderings of that time, and one at its beginning."""
    return int(elapsed_s / SCRAPE_EVERY_S) + 1


async def test_the_router_renders_for_all_who_wait() -> None:
    registry = CollectorRegistry()
    counted = Counted(registry)
    scrapes = _Scrapes(registry)

    async def scraper(accept: str) -> None:
        for _ in range(5):
            counted.value += 1
            asked_at = counted.value
            text, _ = await scrapes.render(accept)
            told = next(line for line in text.decode().splitlines() if line.startswith("figure "))
            assert float(told.split()[1]) >= asked_at

    begin_s = time.monotonic()
    await asyncio.gather(*(scraper(accept) for accept in ("", _OPENMETRICS) for _ in range(100)))
    assert counted.times == 10, "five of each format"
    assert counted.times <= bound(time.monotonic() - begin_s)
    assert counted.most_at_once == 1


async def test_who_leaves_takes_no_others_scrape_along() -> None:
    scrapes = _Scrapes(CollectorRegistry())
    await scrapes.render("")
    first, second = asyncio.create_task(scrapes.render("")), asyncio.create_task(scrapes.render(""))
    await asyncio.sleep(0)
    first.cancel()
    assert await second == (b"", "text/plain; version=0.0.4; charset=utf-8")
    assert not scrapes._next


def test_a_metrics_port_renders_one_at_a_time() -> None:
    registry = CollectorRegistry()
    counted = Counted(registry)
    server = MetricsServer(registry)
    begin_s = time.monotonic()

    def scrape(_: int) -> int:
        return httpx2.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False).status_code

    try:
        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(scrape, range(16))) == {200}
    finally:
        server.close()
    assert counted.times == 16
    assert counted.times <= bound(time.monotonic() - begin_s)
    assert counted.most_at_once == 1
