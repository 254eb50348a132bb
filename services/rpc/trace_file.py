"""Writes spans to a file of OTLP JSON lines, which Jaeger's UI opens unchanged.

Owns: one append-only descriptor and the OTLP JSON mapping. Each batch is one line, an ExportTraceServiceRequest, and
one `write` with O_APPEND, so several processes may share the file. Never: rotation, or reading (`baton trace` does).
"""

from __future__ import annotations

import base64
import errno
import json
import logging
import os
from collections.abc import Sequence
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from services.core.errors import ConfigError

logger = logging.getLogger(__name__)

_ID_FIELDS = ("traceId", "spanId", "parentSpanId")


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
