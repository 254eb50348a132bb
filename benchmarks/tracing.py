"""Measures what tracing costs: CPU-seconds of router and workers per output token, with every request traced and with
none.

One cluster of real processes sends its spans to a collector in this process, which is not counted. Whether a run's
requests are traced, their `traceparent` decides, so both kinds of run have the same processes: two clusters that do the
same work differ by more than what is looked for. The runs alternate, in pairs whose order alternates too, so that what
else the machine does meets both alike. CPU-seconds, not wall time, for the same reason.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
import psutil
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from benchmarks.cluster import cluster, make_request
from benchmarks.figure import Figure
from benchmarks.precision import Precision
from services.rpc.names import Span

PAIRS = 8
_EXPORT_DELAY_MS = 1000
"""The SDK has 5000: fewer, larger batches, which cost less."""
# After a run, traced or not: longer than the export delay, so that a run pays for its own spans.
_SETTLE_S = 1.5


@dataclass(frozen=True)
class Work:
    """Describes the load: all requests at once, so that they share every step."""

    num_requests: int
    prompt_tokens: int
    output_tokens: int

    def __str__(self) -> str:
        return f"{self.num_requests} x ({self.prompt_tokens} in, {self.output_tokens} out) at once"


USUAL = Work(16, 128, 32)
WORST = Work(16, 128, 4)
"""Answers of a few tokens: a request's spans are shared by the fewest."""


def measure(model: str, precision: Precision, repeats: int) -> list[Figure]:
    """Measures at least PAIRS pairs of runs, one traced and one not."""
    pairs = max(PAIRS, repeats)
    with _collecting() as collector, _running(model, precision, collector) as processes:
        return _compare("tracing", USUAL, processes, collector, pairs, "<= 2 (median)") + _compare(
            "tracing, short answers", WORST, processes, collector, pairs, ""
        )


def _compare(
    name: str, work: Work, processes: _Processes, collector: _Collector, pairs: int, target: str
) -> list[Figure]:
    used: dict[bool, list[float]] = {True: [], False: []}
    for number in range(-1, pairs):  # the first pair warms up
        for traced in (True, False) if number % 2 else (False, True):
            seen = collector.num_traces
            used[traced].append(processes.cpu_ms_per_token(work, f"{work} {number} {traced}", traced=traced))
            expected = work.num_requests if traced else 0
            if collector.num_traces - seen != expected:
                raise RuntimeError(f"{collector.num_traces - seen} traces arrived, not {expected}")
    on, off = used[True][1:], used[False][1:]
    costs = tuple(100 * (with_it / without - 1) for without, with_it in zip(off, on, strict=True))
    per_request_ms = tuple((with_it - without) * work.output_tokens for without, with_it in zip(off, on, strict=True))
    return [
        Figure(f"{name}: {work}, cost in CPU-seconds per token", "%", costs, target),
        Figure("  quartiles of the cost", "%", tuple(statistics.quantiles(costs, n=4))),
        Figure("  CPU per output token, none traced", "ms", tuple(off)),
        Figure("  CPU per output token, all traced", "ms", tuple(on)),
        Figure("  CPU of tracing one request", "ms", per_request_ms),
    ]


class _Processes:
    """Holds router and workers."""

    def __init__(self, channel: grpc.Channel, processes: list[psutil.Process]) -> None:
        self._stub = inference_pb2_grpc.InferenceServiceStub(channel)
        self._processes = processes

    def cpu_ms_per_token(self, work: Work, seed: str, *, traced: bool) -> float:
        requests = [make_request((seed, n), work.prompt_tokens, work.output_tokens) for n in range(work.num_requests)]
        with ThreadPoolExecutor(work.num_requests) as clients:
            began_s = self._cpu_s()
            answers = list(clients.map(lambda request: self._ask(request, traced), requests))
            time.sleep(_SETTLE_S)
            used_s = self._cpu_s() - began_s
        return used_s * 1000 / sum(answer.completion.usage.output_tokens for answer in answers)

    def _ask(self, request: inference_pb2.GenerateRequest, traced: bool) -> inference_pb2.GenerateResponse:
        traceparent = f"00-{secrets.token_hex(16)}-{secrets.token_hex(8)}-{traced:02x}"
        return self._stub.Generate(request, metadata=[("traceparent", traceparent)])

    def _cpu_s(self) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)


@contextlib.contextmanager
def _running(model: str, precision: Precision, collector: _Collector) -> Iterator[_Processes]:
    """Runs a cluster with one thread for each worker: threads that spin for one another would count as work."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint,
        "OTEL_BSP_SCHEDULE_DELAY": str(_EXPORT_DELAY_MS),
    }
    before = set(psutil.Process().children())
    with contextlib.ExitStack() as stack:
        with _environment(variables):
            address = stack.enter_context(cluster(model, precision, "--threads", "1", "--http-port", "-1")).address
        (up,) = set(psutil.Process().children()) - before
        channel = stack.enter_context(grpc.insecure_channel(address))
        yield _Processes(channel, up.children())


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets what processes started inside inherit: no other OTEL_* variables than these."""
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        del os.environ[name]
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self.endpoint = ""
        self.num_traces = 0

    def Export(self, request: Any, context: Any) -> Any:
        scopes = itertools.chain.from_iterable(resource.scope_spans for resource in request.resource_spans)
        self.num_traces += sum(span.name == Span.REQUEST for scope in scopes for span in scope.spans)
        return trace_service_pb2.ExportTraceServiceResponse()


@contextlib.contextmanager
def _collecting() -> Iterator[_Collector]:
    collector = _Collector()
    with ThreadPoolExecutor(1) as thread:
        server = grpc.server(thread)
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
        collector.endpoint = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        server.start()
        try:
            yield collector
        finally:
            server.stop(None).wait()
