"""Reads OTLP JSON lines, of any number of processes, into one `RecordedRequest` per request.

Owns: reading the file format, and which span belongs to which request. Never: what the spans mean.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from services.core.errors import ConfigError
from services.rpc.names import Attr, Span

_STATUS_ERROR = 2
_BEGIN = '{"resourceSpans"'
"""Begins a line. One that a full disk has torn has no end of its own: the next whole one stands behind it."""


@dataclasses.dataclass(frozen=True)
class SpanEvent:
    name: str
    at_ns: int
    attributes: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class SpanRecord:
    """Records one finished span. Times are Unix nanoseconds."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[SpanEvent, ...]
    failed: bool
    message: str

    @property
    def request_id(self) -> str:
        return str(self.attributes.get(Attr.REQUEST_ID, ""))

    @property
    def duration_ms(self) -> float:
        return (self.end_ns - self.start_ns) / 1e6


@dataclasses.dataclass(frozen=True)
class RecordedRequest:
    """Holds all spans of one request in order of their start. `root` is missing while the request runs."""

    request_id: str
    trace_id: str
    root: SpanRecord | None
    spans: tuple[SpanRecord, ...]

    @property
    def start_ns(self) -> int:
        return min(span.start_ns for span in self.spans)

    @property
    def end_ns(self) -> int:
        return max(span.end_ns for span in self.spans)

    def named(self, name: str) -> list[SpanRecord]:
        return [span for span in self.spans if span.name == name]

    def missing(self) -> list[str]:
        """Returns the workers' spans that a request which succeeded has, and that are not there; a request that runs
        still lacks nothing."""
        if self.root is None or self.root.failed:
            return []
        due, about = [Span.PREFILL_COMPUTE], self.root.attributes
        workers = (about.get(Attr.PREFILL_WORKER), about.get(Attr.DECODE_WORKER))
        if all(workers) and workers[0] != workers[1] and about.get(Attr.OUTPUT_TOKENS, 0) > 1:
            due += [Span.KV_TRANSFER, Span.DECODE_RUN]
        return [name for name in due if not self.named(name)]

    def tree(self) -> list[tuple[int, SpanRecord]]:
        """Returns (depth, span), parents before children. A span whose parent is missing is placed under the root."""
        by_parent: dict[str, list[SpanRecord]] = {}
        known = {span.span_id for span in self.spans}
        fallback_id = self.root.span_id if self.root else ""
        for span in self.spans:
            if span is not self.root:
                by_parent.setdefault(span.parent_id if span.parent_id in known else fallback_id, []).append(span)
        rows: list[tuple[int, SpanRecord]] = []
        pending = [(0, span) for span in reversed([self.root] if self.root else by_parent.get("", []))]
        while pending:
            depth, span = pending.pop()
            rows.append((depth, span))
            pending.extend((depth + 1, child) for child in reversed(by_parent.get(span.span_id, [])))
        return rows


def read_requests(path: str) -> list[RecordedRequest]:
    """Returns all requests of the file, the latest last.

    Raises ConfigError if it cannot be read or is not OTLP JSON lines.
    """
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return group(span for number, line in enumerate(lines, 1) for span in _spans(path, number, line))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error


def group(spans: Iterable[SpanRecord]) -> list[RecordedRequest]:
    """Groups spans by trace, request id and root, the earliest request first: clients use an id as they like."""
    pairs: dict[tuple[str, str], list[SpanRecord]] = {}
    for span in spans:
        if span.request_id:
            pairs.setdefault((span.trace_id, span.request_id), []).append(span)
    requests = [request for members in pairs.values() for request in _split(sorted(members, key=_order))]
    return sorted(requests, key=lambda request: request.start_ns)


def _order(span: SpanRecord) -> tuple[int, int]:
    """Orders spans by start; of two that start together the longer one, which is the parent, comes first."""
    return span.start_ns, -span.end_ns


def _split(members: Sequence[SpanRecord]) -> Iterator[RecordedRequest]:
    """Gives each root what is below it, and what hangs below no root to the last one that had begun, or the first."""
    known = {span.span_id: span for span in members}
    own: dict[str, list[SpanRecord]] = {span.span_id: [] for span in members if span.name == Span.REQUEST}
    newest = next(iter(own), "")
    for span in members:
        above = span
        while above.span_id not in own and above.parent_id in known:
            above = known[above.parent_id]
        if span.span_id in own:
            newest = span.span_id
        own.setdefault(above.span_id if above.span_id in own else newest, []).append(span)
    for root_id, spans in own.items():
        yield RecordedRequest(members[0].request_id, members[0].trace_id, known.get(root_id), tuple(spans))


def _spans(path: str, number: int, line: str) -> Iterator[SpanRecord]:
    if not line.endswith("\n") or not line.strip():  # the line is still being written
        return
    try:
        for resource in json.loads(line[max(0, line.rfind(_BEGIN)) :])["resourceSpans"]:
            about = _attributes(resource.get("resource", {}))
            for scope in resource.get("scopeSpans", ()):
                yield from [_span(span, about) for span in scope.get("spans", ())]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}, line {number}: not a line of OTLP JSON") from error


def _span(raw: dict[str, Any], about: dict[str, Any]) -> SpanRecord:
    status = raw.get("status", {})
    return SpanRecord(
        name=raw["name"],
        trace_id=raw["traceId"],
        span_id=raw["spanId"],
        parent_id=raw.get("parentSpanId", ""),
        service=str(about.get("service.name", "")),
        instance=str(about.get("service.instance.id", "")),
        start_ns=int(raw["startTimeUnixNano"]),
        end_ns=int(raw["endTimeUnixNano"]),
        attributes=_attributes(raw),
        events=tuple(
            SpanEvent(event["name"], int(event["timeUnixNano"]), _attributes(event)) for event in raw.get("events", ())
        ),
        failed=status.get("code") == _STATUS_ERROR,
        message=status.get("message", ""),
    )


def _attributes(owner: dict[str, Any]) -> dict[str, Any]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in owner.get("attributes", ())}


def _value(raw: dict[str, Any]) -> Any:
    """Returns the value of an OTLP AnyValue. 64-bit integers are strings in JSON."""
    for kind, value in raw.items():
        if kind == "intValue":
            return int(value)
        if kind == "arrayValue":
            return [_value(item) for item in value.get("values", ())]
        return value
    return None
