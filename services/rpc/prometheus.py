"""Serves the Prometheus metrics of a process: it makes the registry and the endpoint.

Owns: the registry's common parts (process figures, `vllm:*` aliases) and the HTTP thread. Never: the metrics
themselves; services declare those on the registry, under names from `names.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector
from prometheus_client import generate_latest as as_plain_text
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, ThreadingWSGIServer
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from services.core.addresses import bare_host, host_names
from services.core.listening import cannot_listen
from services.rpc import names

if TYPE_CHECKING:
    from services.rpc.certificates import Certificates

log = logging.getLogger(__name__)

_EXPIRES = "Seconds until a certificate expires: the cluster's own, or the public one that clients are shown"
_MOST_CONNECTIONS = 16
SCRAPE_EVERY_S = 0.1
"""A rendering holds the interpreter for milliseconds, so whoever asks all the time would delay the process's work."""

# Bucket boundaries in seconds, from the OpenTelemetry GenAI conventions.
DURATION_BUCKETS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
PER_TOKEN_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
# Baton's own boundaries, in seconds, fine where decode steps are fast.
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5)


def new_registry(service: str, instance_id: str) -> CollectorRegistry:
    """Returns a registry separate from the library's global one, with `process_*` and `baton_info` in it."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Info("baton", "What this process is", registry=registry).info({"service": service, "instance": instance_id})
    return registry


def tell_expiry(registry: CollectorRegistry, held: Mapping[str, Certificates | None]) -> None:
    """Adds how long certificates last, by what they are for; those that are None are left out."""
    gauge = Gauge(names.Metric.CERTIFICATE_EXPIRES, _EXPIRES, ["certificate"], registry=registry)
    for name, certificates in held.items():
        if certificates is not None:
            gauge.labels(name).set_function(certificates.expires_in_s)


class Aliases(Collector):
    """Serves the same figures under further names.

    For each metric of `registry` named in `aliases` it makes a copy with the alias's name, the extra `labels`, and
    those labels that are in `renamed` under their other name. Register it on the registry that is served; it reads only
    the metrics it copies.
    """

    def __init__(
        self,
        registry: CollectorRegistry,
        aliases: Mapping[str, Sequence[str]],
        labels: Mapping[str, str] | None = None,
        *,
        renamed: Mapping[str, str] | None = None,
    ) -> None:
        self._registry = registry
        self._aliases = dict(aliases)
        self._labels = dict(labels or {})
        self._renamed = dict(renamed or {})
        registry.register(self)

    def describe(self) -> Iterator[Metric]:
        """Returns nothing: names are not checked for duplicates, and collecting here would recurse on registration."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        for source in self._registry.restricted_registry(self._sample_names()).collect():
            for alias in self._aliases.get(source.name, ()):
                yield self._copy(source, alias)

    def _copy(self, source: Metric, alias: str) -> Metric:
        copy = Metric(alias, source.documentation, source.type)
        for sample in source.samples:
            name = alias + sample.name.removeprefix(source.name)
            labels = {self._renamed.get(label, label): value for label, value in sample.labels.items()}
            copy.samples.append(sample._replace(name=name, labels={**labels, **self._labels}))
        return copy

    def _sample_names(self) -> list[str]:
        suffixes = ("", "_total", "_created", "_bucket", "_sum", "_count")
        return [name + suffix for name in self._aliases for suffix in suffixes]


class MetricsServer(ThreadingWSGIServer):
    """Serves `/metrics` over HTTP, from one daemon thread and one more for each connection, which carries one scrape.

    There are at most 16 connections: a new one takes the place of the oldest. `port` is the port that was bound.
    """

    block_on_close = False
    request_queue_size = 128

    def __init__(self, registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0) -> None:
        """Starts listening. Raises ConfigError if the port cannot be bound."""
        self._open: dict[socket.socket, None] = {}
        """Keeps the open connections, the oldest first."""
        self._lock = threading.Lock()
        try:
            self.address_family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            super().__init__((host, port), _Scrape)
        except OSError as error:
            raise cannot_listen("--metrics-port", host, port, error) from error
        self.port = self.server_port
        self.set_app(_app(registry, host_names(host)))
        self._thread = threading.Thread(target=self.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and joins the thread. It does not wait for a scrape under way."""
        self.shutdown()
        self.server_close()
        self._thread.join()

    def server_bind(self) -> None:
        """Binds without the name server lookup of its own host name that the library's version makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._open) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # which wakes the thread that waits in it; that thread closes it
            self._open[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs at debug level only: the peer went away, or its connection was ended here."""
        log.debug("a scrape failed", exc_info=True)


class _Scrape(WSGIRequestHandler):
    timeout = 5.0
    """Limit for each read and each write, in seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing; the library's own handler does the same."""


def _app(registry: CollectorRegistry, names: frozenset[str] | None) -> WSGIApplication:
    """Returns an app that tells the registry's metrics to whoever asks for a host of these `names`; None: any."""
    rendering = Rendering(registry)

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        if names is not None and host is not None and bare_host(host) not in names:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"unknown host\n"]
        body, content_type = rendering.ask(environ.get("HTTP_ACCEPT", "")).result()
        start_response("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [b"" if environ["REQUEST_METHOD"] == "HEAD" else body]

    return answer


class Rendering:
    """Renders a registry's metrics for all who wait, on a thread of its own and at most once in `SCRAPE_EVERY_S`.

    So whoever asks waits for that long and one rendering of each format, however many ask.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._newest: dict[bool, tuple[float, bytes]] = {}
        """By whether it is OpenMetrics, when the newest rendering began, and its text."""
        self._begun_s = -math.inf

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Returns metrics no older than this call, and their content type; `accept` is the header."""
        return await asyncio.wrap_future(self.ask(accept))

    def ask(self, accept: str) -> Future[tuple[bytes, str]]:
        """Returns the future of what `render` returns."""
        return self._thread.submit(self._render, "application/openmetrics-text" in accept.lower(), time.monotonic())

    def _render(self, strict: bool, asked_s: float) -> tuple[bytes, str]:
        begun_s, text = self._newest.get(strict, (-math.inf, b""))
        if begun_s < asked_s:
            time.sleep(max(0.0, self._begun_s + SCRAPE_EVERY_S - time.monotonic()))
            self._begun_s = time.monotonic()
            text = _as_openmetrics(self._registry) if strict else as_plain_text(self._registry)
            self._newest[strict] = (self._begun_s, text)
        return text, openmetrics.CONTENT_TYPE_LATEST if strict else CONTENT_TYPE_PLAIN_0_0_4


def _as_openmetrics(registry: CollectorRegistry) -> bytes:
    """Returns the metrics with their names as they are, which the library would change where they have a colon."""
    text: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
    return text
