"""Spans with explicit times: to the file, to real collectors, and to none."""

from __future__ import annotations

import asyncio
import base64
import http.server
import json
import logging
import os
import resource
import socket
import threading

import grpc
import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

from services.core.clock import epoch_ns
from services.core.errors import ConfigError, NoWorker
from services.rpc import names, telemetry, trace_export
from services.rpc.telemetry import TraceFileExporter, Tracer, configure_tracing
from tests.support.patience import HANG_S

Request = trace_service_pb2.ExportTraceServiceRequest


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name in trace_export._NOISY:  # each test has its own minute
        logging.getLogger(name).filters.clear()


def make_spans(tracer: Tracer, request_id: str = "req-1") -> str:
    """A root, a child, and a failed child of a remote parent; returns the root's traceparent."""
    root = tracer.start(names.Span.REQUEST, request_id=request_id, start_s=10.0, server=True)
    tracer.span(
        names.Span.PREFILL_COMPUTE,
        request_id=request_id,
        start_s=10.25,
        end_s=10.5,
        parent=root.traceparent,
        attributes={names.Attr.NUM_TOKENS: 1 << 40, names.Attr.MEAN_BATCH_SIZE: 1.5, names.Attr.LEG: None},
        events=[(names.Event.CHUNK, 10.375, {names.Attr.NUM_TOKENS: 512})],
    )
    tracer.span(
        names.Span.DECODE,
        request_id=request_id,
        start_s=10.5,
        end_s=10.75,
        parent=root.traceparent,
        error=NoWorker("none is ready"),
    )
    root.event(names.Event.FIRST_TOKEN, 10.5)
    root.set({names.Attr.FINISH_REASONS: ["stop"], names.Attr.REQUEST_STREAM: True})
    root.end(11.0)
    return root.traceparent


def parse_line(line: str) -> Request:
    """OTLP JSON to the message by protobuf's own parser, once the ids are what proto3 JSON wants: base64."""

    def convert(node):
        if isinstance(node, list):
            return [convert(item) for item in node]
        if not isinstance(node, dict):
            return node
        ids = ("traceId", "spanId", "parentSpanId")
        return {
            key: base64.b64encode(bytes.fromhex(value)).decode() if key in ids else convert(value)
            for key, value in node.items()
        }

    return json_format.ParseDict(convert(json.loads(line)), Request())


def spans_of(*requests: Request) -> dict:
    return {
        span.name: span
        for request in requests
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    }


def attributes(owner) -> dict:
    return {pair.key: pair.value for pair in owner.attributes}


def check(spans: dict, traceparent: str) -> None:
    root, compute, decode = spans["baton.request"], spans["prefill.compute"], spans["decode"]
    _, trace_id, span_id, _ = traceparent.split("-")
    assert {span.trace_id.hex() for span in spans.values()} == {trace_id}
    assert root.span_id.hex() == span_id == compute.parent_span_id.hex() == decode.parent_span_id.hex()
    assert not root.parent_span_id
    assert (root.start_time_unix_nano, root.end_time_unix_nano) == (epoch_ns(10.0), epoch_ns(11.0))
    assert compute.end_time_unix_nano - compute.start_time_unix_nano == 250_000_000
    assert all(attributes(span)["baton.request_id"].string_value == "req-1" for span in spans.values())
    assert attributes(compute)["baton.num_tokens"].int_value == 1 << 40
    assert names.Attr.LEG not in attributes(compute)
    (chunk,) = compute.events
    assert (chunk.name, chunk.time_unix_nano) == ("chunk", epoch_ns(10.375))
    assert decode.status.code == decode.status.STATUS_CODE_ERROR
    assert attributes(decode)["error.type"].string_value == "NO_WORKER"


def test_the_file_is_otlp_json(tmp_path):
    path = tmp_path / "trace.jsonl"
    tracer = configure_tracing("baton-router", "router-0", str(path))
    traceparent = make_spans(tracer)
    tracer.shutdown()
    lines = path.read_text().splitlines()
    requests = [parse_line(line) for line in lines]
    check(spans_of(*requests), traceparent)
    resource = attributes(requests[0].resource_spans[0].resource)
    assert resource["service.name"].string_value == "baton-router"
    assert resource["service.instance.id"].string_value == "router-0"
    raw = json.loads(lines[0])["resourceSpans"][0]["scopeSpans"][0]["spans"][0]
    assert raw["traceId"] == traceparent.split("-")[1]
    assert isinstance(raw["kind"], int)
    assert isinstance(raw["startTimeUnixNano"], str)
    assert raw["attributes"][1]["value"] == {"intValue": str(1 << 40)}


def test_several_tracers_share_one_file(tmp_path):
    path = tmp_path / "trace.jsonl"
    tracers = [configure_tracing("baton-decode", f"decode-{index}", str(path)) for index in range(4)]

    def work(tracer: Tracer) -> None:
        for index in range(100):
            tracer.span("step", request_id=f"r{index}", start_s=1, end_s=2, parent="", attributes={"pad": "x" * 500})
        tracer.shutdown()

    threads = [threading.Thread(target=work, args=(tracer,)) for tracer in tracers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = path.read_text().splitlines()
    total = sum(len(scope["spans"]) for line in lines for scope in json.loads(line)["resourceSpans"][0]["scopeSpans"])
    assert total == 400


def test_a_full_disk_is_told_of_once_and_what_comes_later_is_written(tmp_path, caplog):
    path = tmp_path / "trace.jsonl"
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(TraceFileExporter(str(path))))
    tracer = provider.get_tracer("test")
    tracer.start_span("before").end()
    size, limits = path.stat().st_size, resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size * 3 // 2, limits[1]))
    try:
        for _ in range(3):
            tracer.start_span("lost").end()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.stat().st_size == size * 3 // 2, "of the first that is lost there was room for a part"
    tracer.start_span("after").end()
    assert [record.levelname for record in caplog.records] == ["ERROR", "WARNING"]
    assert "3 spans were lost" in caplog.text
    assert path.read_text().endswith("\n")
    assert '"after"' in path.read_text()


def test_a_trace_file_that_cannot_be_written_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="--trace-file"):
        configure_tracing("baton-router", "router-0", str(tmp_path / "missing" / "trace.jsonl"))


def test_a_parent_from_outside_is_honoured_and_a_malformed_one_ignored(caplog):
    tracer = configure_tracing("baton-router", "router-0")
    trace_id = "0af7651916cd43dd8448eb211c80319c"
    inherited = tracer.start("x", request_id="r", start_s=1, parent=f"00-{trace_id}-b7ad6b7169203331-01")
    assert inherited.trace_id == trace_id
    unsampled = tracer.start("x", request_id="r", start_s=1, parent=f"00-{trace_id}-b7ad6b7169203331-00")
    assert int(unsampled.traceparent[-2:], 16) & 1 == 0
    assert trace_id not in tracer.start("x", request_id="r", start_s=1, parent="nonsense").traceparent
    # A client chooses it, so the library's own line about it would come with each of its requests.
    too_long = f"00-{trace_id}-b7ad6b7169203331-01-" + "x" * 60_000
    assert trace_id not in tracer.start("x", request_id="r", start_s=1, parent=too_long).traceparent
    assert not caplog.records
    tracer.shutdown()


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.requests: list[Request] = []

    async def Export(self, request, context):
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_a_grpc_collector_gets_the_spans(monkeypatch):
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    tracer = configure_tracing("baton-router", "router-0")
    traceparent = make_spans(tracer)
    await asyncio.to_thread(tracer.shutdown)
    await server.stop(None)
    check(spans_of(*collector.requests), traceparent)
    resource = attributes(collector.requests[0].resource_spans[0].resource)
    assert resource["deployment.environment"].string_value == "test"


def test_an_http_collector_gets_the_spans(monkeypatch):
    bodies: list[tuple[str, bytes]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Writes no line."""

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        tracer = configure_tracing("baton-router", "router-0")
        traceparent = make_spans(tracer)
        tracer.shutdown()
        server.shutdown()
        thread.join()
    assert bodies[0][0] == "/v1/traces"
    check(spans_of(*(Request.FromString(body) for _, body in bodies)), traceparent)


def test_a_collector_that_is_not_there_is_told_of_once(monkeypatch, caplog):
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    tracer = configure_tracing("baton-router", "router-0")
    for index in range(3000):  # more than one batch and more than the queue
        tracer.span("x", request_id=f"r{index}", start_s=1, end_s=2, parent="")
    tracer.shutdown()
    exporter = [record for record in caplog.records if ".exporter." in record.name]
    assert len(exporter) == 1


def test_nobody_waits_for_a_collector(monkeypatch):
    """Spans that do not fit the queue any more are dropped."""
    free, exported = threading.Event(), []

    class Held(SpanExporter):
        def export(self, spans):
            assert free.wait(HANG_S)
            exported.extend(spans)
            return SpanExportResult.SUCCESS

    monkeypatch.setattr(telemetry, "otlp_exporters", lambda: [Held()])
    tracer = configure_tracing("baton-router", "router-0")
    for index in range(10_000):
        tracer.span("x", request_id=f"r{index}", start_s=1, end_s=2, parent="")
    assert not exported, "all have ended, and none has gone"
    free.set()
    tracer.shutdown()
    assert 0 < len(exported) < 10_000


def test_a_collector_that_never_answers_is_given_up_at_shutdown(monkeypatch, tmp_path):
    """Else it would be asked for an hour. The trace file does not suffer."""
    path = tmp_path / "trace.jsonl"
    monkeypatch.setattr(telemetry, "_SHUTDOWN_S", 0.2)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracer = configure_tracing("baton-router", "router-0", str(path))
        traceparent = make_spans(tracer)
        tracer.shutdown()
    check(spans_of(*map(parse_line, path.read_text().splitlines())), traceparent)


@pytest.mark.parametrize(
    ("variables", "sampled"),
    [
        ({"OTEL_TRACES_SAMPLER": "always_off"}, 0),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, 0),
        ({}, 1),
    ],
)
def test_sampling_variables_are_honoured(monkeypatch, tmp_path, variables, sampled):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "trace.jsonl"
    tracer = configure_tracing("baton-router", "router-0", str(path))
    flags = int(make_spans(tracer)[-2:], 16)
    assert flags & 1 == sampled
    tracer.shutdown()
    assert bool(path.read_text()) == bool(sampled)


@pytest.mark.parametrize("sampler", ["always_on", "traceidratio", "parentbased_always_on"])
def test_what_the_root_left_out_is_left_out_everywhere(monkeypatch, tmp_path, sampler):
    """A worker's own variables change nothing, and a root follows its caller."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    path = tmp_path / "trace.jsonl"
    tracer = configure_tracing("baton-decode", "decode-0", str(path))
    left_out = f"00-{7:032x}-{8:016x}-00"
    for parent in (left_out, telemetry.UNTRACED):
        traceparent = tracer.span("x", request_id="r", start_s=1, end_s=2, parent=parent)
        assert traceparent.endswith("-00")
    root = tracer.start("x", request_id="r", start_s=1, parent=left_out, server=True)
    tracer.shutdown()
    assert path.read_text() == ""
    assert root.traceparent.endswith("-00")


@pytest.mark.parametrize("sampler", ["always_off", "traceidratio", "parentbased_always_off"])
def test_what_the_root_has_chosen_is_recorded_everywhere(monkeypatch, tmp_path, sampler):
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0")
    path = tmp_path / "trace.jsonl"
    tracer = configure_tracing("baton-decode", "decode-0", str(path))
    tracer.span("x", request_id="r", start_s=1, end_s=2, parent=f"00-{7:032x}-{8:016x}-01")
    tracer.shutdown()
    assert len(path.read_text().splitlines()) == 1


def test_a_disabled_sdk_makes_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    path = tmp_path / "trace.jsonl"
    tracer = configure_tracing("baton-router", "router-0", str(path))
    assert make_spans(tracer) == ""
    tracer.shutdown()
    assert not path.exists()


def test_exporters_follow_the_variables(monkeypatch):
    assert trace_export.otlp_exporters() == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:1")
    (exporter,) = trace_export.otlp_exporters()
    exporter.shutdown()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    assert trace_export.otlp_exporters() == []
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(ConfigError, match=r"OTEL_TRACES_EXPORTER: 'zipkin'"):
        trace_export.otlp_exporters()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json")
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_PROTOCOL"):
        trace_export.otlp_exporters()
