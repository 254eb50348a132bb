"""Chooses where OTLP spans go, by the standard OTEL_* variables.

Owns: the choice of exporter and a limit on what the exporters log. Never: endpoints, headers, TLS, timeouts and
compression; the exporters read those variables themselves.
https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/
"""

from __future__ import annotations

import logging
import os
import time

from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExporter

from services.core.errors import ConfigError

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_NOISY = (
    "opentelemetry.exporter.otlp.proto.grpc.exporter",
    "opentelemetry.exporter.otlp.proto.http.trace_exporter",
    "opentelemetry.sdk._shared_internal",
)
_NOISE_INTERVAL_S = 60.0


def otlp_exporters() -> list[SpanExporter]:
    """Returns the exporters that OTEL_TRACES_EXPORTER names: "otlp", "console", "none", or a list of these.

    If it is not set, the default is "otlp" where an endpoint is set, else "none". Raises ConfigError for an unknown
    exporter or protocol.
    """
    default = "otlp" if any(os.environ.get(name) for name in _ENDPOINTS) else "none"
    wanted = os.environ.get("OTEL_TRACES_EXPORTER") or default
    kinds = {kind.strip().lower() for kind in wanted.split(",")} - {"none", ""}
    if unknown := kinds - {"otlp", "console"}:
        raise ConfigError(f"OTEL_TRACES_EXPORTER: {unknown.pop()!r} is not one of otlp, console, none")
    exporters: list[SpanExporter] = []
    if "otlp" in kinds:
        exporters.append(_otlp())
    if "console" in kinds:
        exporters.append(ConsoleSpanExporter())
    return exporters


def _otlp() -> SpanExporter:
    for name in _NOISY:
        quiet = logging.getLogger(name)
        if not any(isinstance(known, _Sparse) for known in quiet.filters):
            quiet.addFilter(_Sparse())
    name, protocol = next(((name, os.environ[name]) for name in _PROTOCOLS if os.environ.get(name)), ("", "grpc"))
    # Imported here, since each of the two loads a client library, which takes a while.
    if protocol == "grpc":
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter

        return GrpcExporter()
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpExporter

        return HttpExporter()
    raise ConfigError(f"{name}: {protocol!r} is not one of grpc, http/protobuf")


class _Sparse(logging.Filter):
    """Passes one record a minute: an exporter without its collector would otherwise fill the log."""

    def __init__(self) -> None:
        super().__init__()
        self._next_s = 0.0

    def filter(self, record: logging.LogRecord) -> bool:
        now = time.monotonic()
        if now < self._next_s:
            return False
        self._next_s = now + _NOISE_INTERVAL_S
        return True
