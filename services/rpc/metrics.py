"""Prometheus metrics of a process: its registry and the endpoint that serves it.

Owns: the registry's common parts (process figures, `vllm:*` aliases) and the HTTP thread. Never: the metrics
themselves; services declare those on the registry, under names from `names.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, Info, ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.core.errors import ConfigError

# Bucket boundaries, seconds, as the OpenTelemetry GenAI conventions give them.
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Of ours, where decode steps are fast.
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)


def new_registry(service: str, instance_id: str) -> CollectorRegistry:
    """A registry of one's own (never the library's global one), with `process_*` and `baton_info` in it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("baton", "What this process is", registry=registry).info({"service": service, "instance": instance_id})
    return registry


class Aliases(Collector):
    """The same figures under further names: for each metric of `registry` named in `aliases`, a copy with that name
    and the extra labels. Register it on the registry that is served; it looks only at the metrics it copies.
    """

    def __init__(
        self, registry: CollectorRegistry, aliases: Mapping[str, Sequence[str]], labels: Mapping[str, str]
    ) -> None:
        self._registry = registry
        self._aliases = dict(aliases)
        self._labels = dict(labels)
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Nothing: names are not checked for duplicates, and collecting here would recurse while registering."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        for source in self._registry.restricted_registry(self._sample_names()).collect():
            for alias in self._aliases.get(source.name, ()):
                yield self._copy(source, alias)

    def _copy(self, source: Metric, alias: str) -> Metric:
        copy = Metric(alias, source.documentation, source.type)
        for sample in source.samples:
            name = alias + sample.name.removeprefix(source.name)
            copy.samples.append(sample._replace(name=name, labels={**sample.labels, **self._labels}))
        return copy

    def _sample_names(self) -> list[str]:
        suffixes = ("", "_total", "_created", "_bucket", "_sum", "_count")
        return [name + suffix for name in self._aliases for suffix in suffixes]


class MetricsServer:
    """`/metrics` over HTTP, from a daemon thread. `port` is the one bound."""

    def __init__(self, registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0) -> None:
        """Listens at once. ConfigError if the port is taken."""
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(f"--metrics-port: cannot listen on {host}:{port}: {error.strerror}") from error
        self.port: int = self._server.server_port

    def close(self) -> None:
        """Stops listening and joins the thread. A scrape under way is not waited for."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
