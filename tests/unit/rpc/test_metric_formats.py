"""Tests the formats of metrics: which one is sent, and that names are the same in each."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain_text

from services.rpc.prometheus import Aliases, Rendering

OPENMETRICS, PLAIN = "application/openmetrics-text; version=1.0.0", "text/plain; version=0.0.4"


@pytest.mark.parametrize(
    ("accept", "kind"),
    [
        ("", PLAIN),
        ("*/*", PLAIN),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text; version=9.9.9,text/plain", OPENMETRICS),
        ("Application/OpenMetrics-Text;version=1.0.0;q=0.75,text/plain;version=0.0.4;q=0.5", OPENMETRICS),
        ("text/plain;version=0.0.4;q=0.6,application/openmetrics-text;version=1.0.0;q=0.5", OPENMETRICS),
        ("application/openmetrics-text;q=nan;q=x", OPENMETRICS),
        (",;q=,;;", PLAIN),
    ],
)
async def test_openmetrics_is_for_whoever_names_it(accept: str, kind: str) -> None:
    assert (await Rendering(CollectorRegistry()).render(accept))[1].startswith(kind)


async def test_names_are_the_same_in_each_format() -> None:
    registry = CollectorRegistry()
    Gauge("baton_running", "x", ["model"], registry=registry).labels("m").set(1)
    Counter("baton_tokens", "x", registry=registry).inc()
    Histogram("baton_wait_seconds", "x", registry=registry).observe(1)
    Info("baton", "x", registry=registry).info({"a": "b"})
    names = {"baton_running": ("vllm:running",), "baton_tokens": ("vllm:tokens",), "baton_wait_seconds": ("vllm:wait",)}
    Aliases(registry, names, {"engine": "0"})
    rendering = Rendering(registry)
    strict = list(parse_openmetrics((await rendering.render(OPENMETRICS))[0].decode()))
    plain = parse_plain_text((await rendering.render(""))[0].decode())
    told = {sample.name for family in strict for sample in family.samples}
    assert {"vllm:running", "vllm:tokens_total", "vllm:wait_bucket", "baton_info"} <= told
    assert told == {sample.name for family in plain for sample in family.samples}
    assert all(sample.name.startswith(family.name) for family in strict for sample in family.samples)
