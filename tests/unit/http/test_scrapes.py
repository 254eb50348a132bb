"""Metrics are rendered some times a second, however many ask, and nobody sees old figures."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from services.rpc.metrics import SCRAPE_EVERY_S, MetricsServer, Rendering

pytestmark = pytest.mark.clock


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
    """Returns the most renderings of that time, and one at its beginning."""
    return int(elapsed_s / SCRAPE_EVERY_S) + 1


async def test_the_router_renders_for_all_who_wait() -> None:
    registry = CollectorRegistry()
    counted = Counted(registry)
    rendering = Rendering(registry)

    async def scraper(accept: str) -> None:
        for _ in range(5):
            counted.value += 1
            asked_at = counted.value
            text, _ = await rendering.render(accept)
            told = next(line for line in text.decode().splitlines() if line.startswith("figure "))
            assert float(told.split()[1]) >= asked_at

    begin_s = time.monotonic()
    await asyncio.gather(*(scraper(accept) for accept in ("", "application/openmetrics-text") for _ in range(100)))
    assert 10 <= counted.times <= 12, "five of each format, and those that began before all had asked"
    assert counted.times <= bound(time.monotonic() - begin_s)
    assert counted.most_at_once == 1


async def test_who_leaves_takes_no_others_scrape_along() -> None:
    registry = CollectorRegistry()
    counted = Counted(registry)
    rendering = Rendering(registry)
    await rendering.render("")  # so that the next one waits, and both have asked for it
    first, second = asyncio.create_task(rendering.render("")), asyncio.create_task(rendering.render(""))
    await asyncio.sleep(0)
    first.cancel()
    text, kind = await second
    assert b"figure 0.0" in text
    assert kind == "text/plain; version=0.0.4; charset=utf-8"
    assert counted.times == 2
    with pytest.raises(asyncio.CancelledError):
        await first


def test_a_metrics_port_renders_for_all_who_wait() -> None:
    """No thread is left waiting by a client that has gone: three hundred in a second once kept a scrape waiting for
    half a minute."""
    registry = CollectorRegistry()
    counted = Counted(registry)
    server = MetricsServer(registry)
    begin_s = time.monotonic()
    try:
        for _ in range(300):
            with socket.create_connection(("127.0.0.1", server.port)) as gone:
                gone.sendall(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\n\r\n")
        counted.value = 7
        asked_s = time.monotonic()
        answer = httpx2.get(f"http://127.0.0.1:{server.port}/metrics", trust_env=False, timeout=60)
        end_s = time.monotonic()
    finally:
        server.close()
    assert "figure 7.0" in answer.text
    assert counted.times <= bound(end_s - begin_s), "so who waits shares one"
    assert end_s - asked_s < 3.0, "three hundred in turns take thirty seconds"
    assert counted.most_at_once == 1
