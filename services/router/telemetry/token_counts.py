"""Counts output tokens and the times between them, for Prometheus.

The library's own counters take a lock for each of three values, which costs as much as all the rest that the router
counts of a token. These are plain numbers that the event loop alone changes; a scrape, in another thread, copies them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from services.rpc import names
from services.rpc.prometheus import INTER_TOKEN_BUCKETS

_BOUNDS = (*map(str, INTER_TOKEN_BUCKETS), "+Inf")


_NONE = [0] * len(_BOUNDS)


class ModelTokenCounts:
    """Counts one model's tokens. Use it on the event loop only."""

    def __init__(self) -> None:
        self.num_tokens = 0
        self.buckets = [0] * len(_BOUNDS)
        """How many times between tokens fall between a bound and the one before it."""
        self.sum_s = 0.0

    def add(self, num_tokens: int, gap_s: float | None) -> None:
        """Counts tokens of an answer that came together, `gap_s` seconds after the one before them; None if there is
        none. The time between them counts as 0."""
        self.num_tokens += num_tokens
        self.buckets[0] += num_tokens - 1
        if gap_s is not None:
            self.buckets[bisect_left(INTER_TOKEN_BUCKETS, gap_s)] += 1
            self.sum_s += gap_s


class TokenCounts(Collector):
    def __init__(self, registry: CollectorRegistry, label: str) -> None:
        """`label` is the one that names the model."""
        self._models: dict[str, ModelTokenCounts] = {}
        self._label = label
        registry.register(self)

    def of(self, model_id: str) -> ModelTokenCounts:
        return self._models.setdefault(model_id, ModelTokenCounts())

    def buckets(self) -> list[int]:
        """Returns how many times between tokens of any model fall between a bound (`INTER_TOKEN_BUCKETS`, then none)
        and the one before it."""
        return [sum(counts) for counts in zip(_NONE, *(each.buckets for each in self._models.values()), strict=True)]

    def forget(self, model_id: str) -> None:
        self._models.pop(model_id, None)

    def describe(self) -> Iterator[Metric]:
        yield from self._families({})

    def collect(self) -> Iterator[Metric]:
        yield from self._families(dict(self._models))

    def _families(self, models: dict[str, ModelTokenCounts]) -> tuple[Metric, Metric]:
        tokens = CounterMetricFamily(
            names.Metric.OUTPUT_TOKENS, "Output tokens passed on to clients", labels=[self._label]
        )
        between = HistogramMetricFamily(
            names.Metric.INTER_TOKEN_SECONDS, "Between one token and the next, seconds", labels=[self._label]
        )
        for model_id, counts in models.items():
            tokens.add_metric([model_id], counts.num_tokens)
            cumulative = accumulate(list(counts.buckets))
            between.add_metric([model_id], list(zip(_BOUNDS, cumulative, strict=True)), counts.sum_s)
        return tokens, between
