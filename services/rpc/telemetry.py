"""Makes traces: spans with explicit times, whose context is passed on as W3C `traceparent` strings.

Owns: the tracer of a process and where its spans go (OTLP by the standard OTEL_* variables, the trace file, both or
nowhere), and the trace file: OTLP JSON lines, which Jaeger's UI opens unchanged. Each batch is one line, an
ExportTraceServiceRequest, and one `write` with O_APPEND, so several processes may share the file. Never: ambient
context, automatic instrumentation, waiting for a collector (without one, spans are lost), or reading the file (`baton
trace` does).
"""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider, sampling
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.core.clock import epoch_ns
from services.core.errors import BatonError, ConfigError
from services.rpc import names
from services.rpc.trace_export import otlp_exporters

logger = logging.getLogger(__name__)

Value = str | bool | int | float | Sequence[str] | Sequence[int] | Sequence[float]
Attributes = Mapping[str, Value | None]
"""Attributes of a span. A value of None means that it is not known: the attribute is left out."""

FILE_DELAY_MS = 200
_SHUTDOWN_S = 2.0
_CUT_SHORT_S = 0.5
_MAX_TRACEPARENT_CHARS = 128
"""The standard's has 55; later versions may append fields to it."""
_W3C = TraceContextTextMapPropagator()
_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


class OpenSpan:
    """Represents a span that has begun. Set what becomes known, then `end` it; a span that is never ended is never
    exported."""

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self.traceparent = _traceparent(span.get_span_context())
        """The parent of child spans, here or in another process. Empty when tracing is disabled."""

    @property
    def trace_id(self) -> str:
        """Returns 32 hex digits, for logs; empty when tracing is disabled."""
        return trace_id_of(self.traceparent)

    @property
    def is_recorded(self) -> bool:
        """Returns whether anybody will see its attributes: costly ones need not be computed otherwise."""
        return self._span.is_recording()

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes(_known(attributes))

    def event(self, name: str, at_s: float, attributes: Attributes | None = None) -> None:
        """Adds an event to the span. `at_s` is in monotonic seconds, like all times here."""
        self._span.add_event(name, _known(attributes or {}), timestamp=epoch_ns(at_s))

    def fail(self, error: BaseException) -> None:
        """Marks the span as failed, with the error's reason as error.type."""
        self._span.set_attribute(names.Attr.ERROR_TYPE, error_type(error))
        self._span.set_status(trace.StatusCode.ERROR, str(error))

    def end(self, end_s: float) -> None:
        self._span.end(end_time=epoch_ns(end_s))


UNTRACED = f"00-{1:032x}-{1:016x}-00"
"""A traceparent whose children are not recorded, here or in another process."""


class Tracer:
    """Makes spans. Times are monotonic seconds of `core.clock.MonotonicClock`. Any thread may call it."""

    def __init__(self, provider: TracerProvider, exporters: Sequence[SpanExporter] = ()) -> None:
        """`exporters` are those that the provider's processors feed; `shutdown` needs them to cut an export short."""
        self._provider = provider
        self._exporters = exporters
        self._tracer = provider.get_tracer("baton")

    def start(
        self,
        name: str,
        *,
        request_id: str,
        start_s: float,
        parent: str = "",
        attributes: Attributes | None = None,
        server: bool = False,
    ) -> OpenSpan:
        """Begins a span under `parent`, a traceparent; an empty or malformed one begins a new trace.

        `server` marks the root, which serves an RPC.
        """
        # The library would log a line for each one that is too long.
        is_parent = 0 < len(parent) <= _MAX_TRACEPARENT_CHARS
        context = _W3C.extract({"traceparent": parent}, Context()) if is_parent else Context()
        span = self._tracer.start_span(
            name,
            context=context,
            kind=trace.SpanKind.SERVER if server else trace.SpanKind.INTERNAL,
            attributes={names.Attr.REQUEST_ID: request_id, **_known(attributes or {})},
            start_time=epoch_ns(start_s),
        )
        return OpenSpan(span)

    def span(
        self,
        name: str,
        *,
        request_id: str,
        start_s: float,
        end_s: float,
        parent: str,
        attributes: Attributes | None = None,
        events: Sequence[tuple[str, float, Attributes]] = (),
        error: BaseException | None = None,
    ) -> str:
        """Makes a whole span after the fact and returns its traceparent.

        `events` are (name, monotonic seconds, attributes).
        """
        span = self.start(name, request_id=request_id, start_s=start_s, parent=parent, attributes=attributes)
        for event in events:
            span.event(*event)
        if error is not None:
            span.fail(error)
        span.end(end_s)
        return span.traceparent

    def shutdown(self) -> None:
        """Exports pending spans and closes the exporters.

        A collector that does not answer delays it by 2.5 s at most.
        """
        # The SDK waits for a batch under way, with all its retries. Closing the exporters meanwhile ends that wait.
        thread = threading.Thread(target=self._provider.shutdown, name="trace-shutdown", daemon=True)
        thread.start()
        thread.join(_SHUTDOWN_S)
        if thread.is_alive():
            for exporter in self._exporters:
                exporter.shutdown()
            thread.join(_CUT_SHORT_S)


def configure_tracing(service_name: str, instance_id: str, trace_file: str | None = None) -> Tracer:
    """Returns the tracer of this process.

    OTEL_* variables decide the rest, resource names included; call it once, in `main`.

    Raises ConfigError if the trace file cannot be written, or if a variable names an unknown exporter or protocol.
    """
    ours: dict[str, str | int] = {
        "service.name": service_name,
        "service.instance.id": instance_id,
        "process.pid": os.getpid(),
    }
    resource = Resource.create(ours).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    # Whether a request is traced is decided once, at its root or by its caller: else the samplers `always_on` and
    # `traceidratio` in a worker would record parts of requests that the router does not trace.
    provider.sampler = sampling.ParentBased(provider.sampler)
    if os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Tracer(provider)
    exporters = otlp_exporters()
    # The file comes first: processors shut down in this order, and the file never has to wait.
    if trace_file:
        file_exporter = TraceFileExporter(trace_file)
        provider.add_span_processor(BatchSpanProcessor(file_exporter, schedule_delay_millis=FILE_DELAY_MS))
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter))
    return Tracer(provider, exporters)


def trace_id_of(traceparent: str) -> str:
    """Returns the 32 hex digits of the trace id in a traceparent, or an empty string if there is none."""
    parts = traceparent.split("-")
    return parts[1] if len(parts) >= 4 else ""


def error_type(error: BaseException) -> str:
    return error.reason if isinstance(error, BatonError) else type(error).__qualname__


def _traceparent(context: trace.SpanContext) -> str:
    """Returns the text that the W3C propagator writes, at a tenth of its cost: every span needs it.

    Empty if not valid.
    """
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"


def _known(attributes: Attributes) -> dict[str, Value]:
    return {name: value for name, value in attributes.items() if value is not None}


def otlp_json(request: Message) -> str:
    """Returns an ExportTraceServiceRequest as one line of OTLP JSON.

    https://opentelemetry.io/docs/specs/otlp/#json-protobuf-encoding: proto3 JSON with lowerCamelCase keys and 64-bit
    integers as strings, but ids in hex and enums as integers.
    """
    document: dict[str, Any] = MessageToDict(request, use_integers_for_enums=True)
    for resource in document.get("resourceSpans", ()):
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                for owner in (span, *span.get("links", ())):
                    for field in _ID_FIELDS:
                        if field in owner:
                            owner[field] = base64.b64decode(owner[field]).hex()
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


class TraceFileExporter(SpanExporter):
    def __init__(self, path: str) -> None:
        """Opens or creates the file. Raises a ConfigError that names --trace-file if it cannot be written."""
        try:
            self._fd: int | None = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"--trace-file: cannot write {path}: {error.strerror}") from error
        self._path = path
        self._num_lost = 0
        """Spans since the last batch that was written."""

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._fd is None:
            return SpanExportResult.FAILURE
        line = otlp_json(encode_spans(spans)).encode() + b"\n"
        try:
            reason = "" if os.write(self._fd, line) == len(line) else os.strerror(errno.ENOSPC)
        except OSError as error:
            reason = str(error.strerror)
        if reason:
            if not self._num_lost:
                logger.error("trace file %s: %s; spans are lost until it can be written again", self._path, reason)
            self._num_lost += len(spans)
            return SpanExportResult.FAILURE
        if self._num_lost:
            logger.warning("trace file %s: can be written again; %d spans were lost", self._path, self._num_lost)
            self._num_lost = 0
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
