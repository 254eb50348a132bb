"""Provides a collector: a real gRPC server of OTLP's TraceService, which keeps what processes send it, by request.

Owns: the server and the spans. Never: what a test expects of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from tests.support.patience import Patience

_LOOK_EVERY_S = 0.5


@dataclass(frozen=True)
class ReceivedSpan:
    """Times are Unix nanoseconds, ids hex."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    kind: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, int], ...]
    resource: dict[str, Any] = field(repr=False)

    @property
    def ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6

    @property
    def request_id(self) -> str:
        return self.attributes["baton.request_id"]


class OtlpReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """`endpoint` is what OTEL_EXPORTER_OTLP_ENDPOINT takes."""

    def __init__(self) -> None:
        self.endpoint = ""
        self._spans: list[ReceivedSpan] = []
        self._changed = threading.Condition()

    def Export(self, request: Any, context: Any) -> Any:
        with self._changed:
            for resource in request.resource_spans:
                about = _attributes(resource.resource)
                self._spans += [_received(span, about) for scope in resource.scope_spans for span in scope.spans]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def spans(self) -> list[ReceivedSpan]:
        with self._changed:
            return list(self._spans)

    def of(self, request_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans() if span.request_id == request_id]

    def wait(self, condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
        patience = Patience(seconds)
        with self._changed:
            while not self._changed.wait_for(condition, _LOOK_EVERY_S):
                assert not patience.is_over(), f"not within {seconds} s: {what}"


@contextlib.contextmanager
def receiving() -> Iterator[OtlpReceiver]:
    receiver = OtlpReceiver()
    with ThreadPoolExecutor(4) as threads:
        server = grpc.server(threads)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(receiver, server)
        receiver.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield receiver
        finally:
            server.stop(None).wait()


def _received(span: Any, resource: dict[str, Any]) -> ReceivedSpan:
    return ReceivedSpan(
        name=span.name,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        kind=span.kind,
        attributes=_attributes(span),
        events=tuple((event.name, event.time_unix_nano) for event in span.events),
        resource=resource,
    )


def _attributes(owner: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in owner.attributes}
