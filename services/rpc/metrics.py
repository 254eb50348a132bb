"""Serves the Prometheus metrics of a process: it makes the registry and the endpoint.

Owns: the registry's common parts (process figures, `vllm:*` aliases) and the HTTP thread. Never: the metrics
themselves; services declare those on the registry, under names from `names.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import re
import socket
import socketserver
import threading
import time
import wsgiref.simple_server
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Gauge, Info, ProcessCollector
from prometheus_client import generate_latest as as_plain_text
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8, CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.registry import Collector

from services.core.addresses import bare_host, host_names
from services.core.listening import cannot_listen
from services.rpc import names

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

    from services.rpc.certificates import Certificates

log = logging.getLogger(__name__)

_OPEN_METRICS, _PLAIN_TEXT = "application/openmetrics-text", "text/plain"
_WEIGHT = re.compile(r"q=[01](\.[0-9]{0,3})?", re.ASCII)
_EXPIRES = "Seconds until a certificate expires: the cluster's own, or the public one that clients are shown"
_MAX_SCRAPES = 16
_SCRAPE_WITHIN_S = 15.0
"""Longest life of a connection, in seconds. A connection carries one scrape."""
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


class MetricsServer:
    """Serves `/metrics` over HTTP, from one daemon thread and one more for each connection.

    Connections are limited to a few: a new one takes the place of the oldest. `port` is the port that was bound.
    """

    def __init__(self, registry: CollectorRegistry, host: str = "127.0.0.1", port: int = 0) -> None:
        """Starts listening. Raises ConfigError if the port cannot be bound."""
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
            self._server = _Listener(host, port, family, registry)
        except OSError as error:
            raise cannot_listen("--metrics-port", host, port, error) from error
        self.port: int = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stops listening and joins the thread. It does not wait for a scrape under way."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Listener(socketserver.ThreadingMixIn, wsgiref.simple_server.WSGIServer):
    """Listens for scrapes. Its thread accepts connections and ends those that are too old."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, host: str, port: int, family: int, registry: CollectorRegistry) -> None:
        self.address_family = family
        self._open: dict[socket.socket, float] = {}
        """Open connections, oldest first, each with the monotonic second at which it must end."""
        self._lock = threading.Lock()
        super().__init__((host, port), _Scrape)
        self.set_app(_answering_to(host_names(host), Rendering(registry)))

    def server_bind(self) -> None:
        """Binds without the name server lookup of its own host name that the library's version makes."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            while len(self._open) >= _MAX_SCRAPES:
                self._hang_up(next(iter(self._open)))
            self._open[request] = time.monotonic() + _SCRAPE_WITHIN_S
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Ends connections that are too old. The library calls this twice a second."""
        now = time.monotonic()
        with self._lock:
            for request in [request for request, until_s in self._open.items() if until_s < now]:
                self._hang_up(request)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Logs at debug level only: the peer went away, or its connection was ended here."""
        log.debug("a scrape failed", exc_info=True)

    def _hang_up(self, request: socket.socket) -> None:
        """Shuts the connection down, which wakes the thread that waits in it; that thread closes it. Hold the lock."""
        del self._open[request]
        with contextlib.suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)


def _answering_to(names: frozenset[str] | None, app: WSGIApplication) -> WSGIApplication:
    """Returns the app with a check of the host that a request names. `names` None: any."""

    def answer(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST")
        if names is not None and host is not None and bare_host(host) not in names:
            start_response("403 Forbidden", [("Content-Type", "text/plain")])
            return [b"unknown host\n"]
        return app(environ, start_response)

    return answer


class Rendering:
    """Renders a registry's metrics for all who wait, on a thread of its own and at most once in `SCRAPE_EVERY_S`.

    So whoever asks waits for that long and one rendering of each format, however many ask. It is also a WSGI app.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metrics")
        self._lock = threading.Lock()
        self._asked: dict[str, Future[tuple[bytes, str]]] = {}
        """By format, the renderings that have not begun."""
        self._begun_s = -math.inf

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Returns metrics no older than this call, and their content type; `accept` is the header."""
        return await asyncio.shield(asyncio.wrap_future(self._ask(accept)))  # others wait for it too

    def _ask(self, accept: str) -> Future[tuple[bytes, str]]:
        form = known_format(accept)
        with self._lock:
            if form not in self._asked:
                self._asked[form] = self._thread.submit(self._render, form)
            return self._asked[form]

    def _render(self, form: str) -> tuple[bytes, str]:
        time.sleep(max(0.0, self._begun_s + SCRAPE_EVERY_S - time.monotonic()))
        with self._lock:
            del self._asked[form]  # whoever asks from now on needs a newer one
        self._begun_s = time.monotonic()
        if form == _OPEN_METRICS:
            # As the names are: all can stand in either format, those with colons too.
            text: bytes = as_openmetrics(self._registry, escaping=ALLOWUTF8)  # type: ignore[no-untyped-call]
            return text, CONTENT_TYPE_LATEST
        return as_plain_text(self._registry), CONTENT_TYPE_PLAIN_0_0_4

    def __call__(self, environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        method = environ.get("REQUEST_METHOD")
        if method not in ("GET", "HEAD"):
            start_response("405 Method Not Allowed", [("Allow", "GET, HEAD")])
            return [b""]
        body, content_type = self._ask(environ.get("HTTP_ACCEPT", "")).result()
        start_response("200 OK", [("Content-Type", content_type), ("Content-Length", str(len(body)))])
        return [body if method == "GET" else b""]


def known_format(accept: str) -> str:
    """Returns the media type of the format that `accept` prefers, of the two that there are; plain text if it prefers
    neither."""
    weights = {_OPEN_METRICS: 0.0, _PLAIN_TEXT: 0.0}
    for kind in accept.lower().split(","):
        name, *parameters = (part.strip() for part in kind.split(";"))
        found = next((part for part in parameters if _WEIGHT.fullmatch(part)), "q=1")
        weights[name] = max(weights.get(name, 0.0), float(found[2:]))
    return _OPEN_METRICS if 0 < weights[_OPEN_METRICS] >= weights[_PLAIN_TEXT] else _PLAIN_TEXT


class _Scrape(wsgiref.simple_server.WSGIRequestHandler):
    timeout = 5.0
    """Limit for each read and each write, in seconds."""

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing; the library's own handler does the same."""
