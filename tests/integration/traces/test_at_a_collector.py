"""Traces of real processes, as a real OTLP collector receives them: complete, nested, in order, and adding up."""

from __future__ import annotations

import itertools
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.rpc.names import Attr, Event, Span
from tests.support.cluster import greedy_request
from tests.support.models import tiny_model
from tests.support.otlp_receiver import OtlpReceiver, ReceivedSpan, receiving
from tests.support.patience import slowness
from tests.support.processes import Up
from tests.support.span_tree import PARENTS

pytestmark = [pytest.mark.process, pytest.mark.long]

NAMES = {Span.REQUEST, *PARENTS}
TRANSFERRED = {Span.PLACE, Span.PREFILL, Span.KV_TRANSFER, Span.DECODE_WAIT}
"""What a request has not that the router placed whole on the decode worker, as it may a first one."""
WRITERS = {
    "baton-router": {Span.REQUEST, Span.TOKENIZE, Span.QUEUE, Span.PLACE, Span.PREFILL, Span.DECODE},
    "baton-prefill": {Span.PREFILL_WAIT, Span.PREFILL_COMPUTE},
    "baton-decode": {Span.KV_TRANSFER, Span.DECODE_WAIT, Span.DECODE_RUN},
}
ORDER = (
    Span.TOKENIZE,
    Span.QUEUE,
    Span.PREFILL_WAIT,
    Span.PREFILL_COMPUTE,
    Span.DECODE_WAIT,
    Span.DECODE_RUN,
)
"""What waits for what. Between the prompt's end and decode.wait lies the exposed part of the transfer."""
SLACK_NS = 1_000_000
"""Between the clocks of two processes on one host."""
PROMPT_TOKENS, OUTPUT_TOKENS = 600, 300
Stub = inference_pb2_grpc.InferenceServiceStub


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # Of more layers than others: on a fast CPU what is computed must take long beside messages between processes.
    return tiny_model("llama", tmp_path_factory.mktemp("model"), num_hidden_layers=8)


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.endpoint)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
        yield receiver


def ask(stub: Stub, request_id: str, max_tokens: int = OUTPUT_TOKENS, traceparent: str = "") -> float:
    """Returns the client's wall time in ms."""
    prompt = random.Random(request_id).choices(range(3, 300), k=PROMPT_TOKENS)
    metadata = [("traceparent", traceparent)] if traceparent else []
    request = greedy_request(prompt, max_tokens, request_id=request_id)
    began_s = time.perf_counter()
    answer: inference_pb2.GenerateResponse = stub.Generate(request, timeout=100, metadata=metadata)
    wall_ms = (time.perf_counter() - began_s) * 1000
    assert answer.completion.usage.output_tokens == max_tokens
    return wall_ms


def complete(collector: OtlpReceiver, request_id: str) -> dict[str, ReceivedSpan]:
    what = f"all spans of {request_id}; there are {sorted(span.name for span in collector.of(request_id))}"
    whole = (NAMES, NAMES - TRANSFERRED)
    collector.wait(lambda: {span.name for span in collector.of(request_id)} in whole, what)
    spans = {span.name: span for span in collector.of(request_id)}
    assert len(collector.of(request_id)) == len(spans), "each once"
    return spans


def check_tree(spans: dict[str, ReceivedSpan]) -> None:
    """Asserts that there is one trace, every parent is there, every span lies within its parent, and each comes from
    the process that it should be from."""
    assert len({span.trace_id for span in spans.values()}) == 1
    for name, parent_name in PARENTS.items():
        span, parent = spans[name], spans[parent_name]
        assert span.parent_id == parent.span_id, f"{name} under {parent_name}"
        assert parent.start_ns - SLACK_NS <= span.start_ns <= span.end_ns <= parent.end_ns + SLACK_NS, name
    for service, names in WRITERS.items():
        assert {name for name in NAMES if spans[name].resource["service.name"] == service} == names
    assert len({span.resource["process.pid"] for span in spans.values()}) == len(WRITERS)


def check_transfer(spans: dict[str, ReceivedSpan]) -> float:
    """It is split at SEALED; the exposed part's ms."""
    transfer, compute = spans[Span.KV_TRANSFER], spans[Span.PREFILL_COMPUTE]
    overlapped, exposed = (
        transfer.attributes[name] for name in (Attr.TRANSFER_OVERLAPPED_MS, Attr.TRANSFER_EXPOSED_MS)
    )
    ((_, sealed_ns),) = [event for event in transfer.events if event[0] == Event.SEALED]
    assert exposed > 0
    assert overlapped == pytest.approx((sealed_ns - transfer.start_ns) / 1e6, abs=0.01)
    assert exposed == pytest.approx((transfer.end_ns - sealed_ns) / 1e6, abs=0.01)
    assert sealed_ns >= compute.end_ns - SLACK_NS, "sealed when the prompt has been read"
    return exposed


def untold_ms(spans: dict[str, ReceivedSpan], wall_ms: float) -> float:
    """Returns what of the client's wait no phase on the critical path tells, in ms. The path has no negative gap."""
    exposed_ms = check_transfer(spans)
    for earlier, later in itertools.pairwise(ORDER):
        assert spans[later].start_ns >= spans[earlier].end_ns - SLACK_NS, f"{later} follows {earlier}"
    rest_ms = wall_ms - exposed_ms - sum(spans[name].ms for name in ORDER)
    assert rest_ms > 0, f"the phases are longer than the client's wait: {spans}"
    return rest_ms


def test_every_requests_trace_is_whole_and_adds_up(collector: OtlpReceiver, model: Path, tmp_path: Path) -> None:
    """The requests are sent one at a time, then eight at once."""
    with Up(model, tmp_path, "--kv-blocks", "1024") as up:
        up.read_until("^ready$")
        with grpc.insecure_channel(up.target()) as channel, ThreadPoolExecutor(8) as clients:
            stub = Stub(channel)
            ask(stub, "warm", 4)
            slow = slowness()
            walls = {name: ask(stub, name) for name in ("alone-0", "alone-1", "alone-2")}
            together = [f"together-{n}" for n in range(8)]
            walls |= dict(zip(together, clients.map(lambda name: ask(stub, name), together), strict=True))
        traces = {name: complete(collector, name) for name in walls}
        split = {name for name, spans in traces.items() if spans.keys() == NAMES}
        assert len(split) > len(walls) / 2, "these are long enough to be worth two workers"
        for name in split:
            check_tree(traces[name])
        # A message between processes waits its turn where others use the machine too: as much longer as it is slow.
        slow = max(slow, slowness())
        for group in (split - set(together), split & set(together)):
            told = {name: (untold_ms(traces[name], walls[name]), walls[name]) for name in group}
            shares = [rest_ms / max(0.05 * wall_ms, 10.0) for rest_ms, wall_ms in told.values()]
            assert statistics.median(shares) <= slow, f"the phases make up the client's wait: {told}"
        overlapped = [
            span.attributes[Attr.TRANSFER_OVERLAPPED_MS] for span in collector.spans() if span.name == Span.KV_TRANSFER
        ]
        assert max(overlapped) > 0, "a prompt of two chunks moves the first beside the second"
        assert {span.request_id for span in collector.spans()} == {"warm", *walls}, "no canary is among them"
        assert len({span.trace_id for span in collector.spans()}) == len(walls) + 1
        up.stop(signal.SIGTERM)


def test_one_decision_for_each_request_holds_in_all_processes(
    collector: OtlpReceiver, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A caller's decision is honoured; without one the share decides. Never is half a request recorded."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-backend")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test,service.version=7")
    chosen, left_out = [f"chosen-{n}" for n in range(4)], [f"left-out-{n}" for n in range(4)]
    free = [f"free-{n}" for n in range(32)]
    with Up(model, tmp_path, "--kv-blocks", "1024") as up:
        up.read_until("^ready$")
        with grpc.insecure_channel(up.target()) as channel:
            stub = Stub(channel)
            # The share alone would decide otherwise: ids all ones are never in it, ids all zeros always.
            for n, name in enumerate(chosen):
                ask(stub, name, 2, f"00-{'f' * 31}{n:x}-00f067aa0ba902b7-01")
            for n, name in enumerate(left_out):
                ask(stub, name, 2, f"00-{1:x}{'0' * 30}{n:x}-00f067aa0ba902b7-00")
            for name in free:
                ask(stub, name, 2)
        up.stop(signal.SIGTERM)
    recorded = {span.request_id for span in collector.spans()}
    assert set(chosen) <= recorded
    assert not recorded & set(left_out)
    assert 0 < len(recorded & set(free)) < len(free)
    for request_id in recorded:
        spans = complete(collector, request_id)
        root = spans[Span.REQUEST]
        if request_id in free:
            assert int(root.trace_id, 16) & (1 << 64) - 1 < 1 << 63
        assert root.parent_id == ("00f067aa0ba902b7" if request_id in chosen else "")
        for span in spans.values():
            assert span.resource["service.name"] == "chat-backend"
            assert span.resource["deployment.environment.name"] == "test"
            assert span.resource["service.version"] == "7"
        instances = {span.resource["service.instance.id"] for span in spans.values()}
        assert instances == {"router", "decode-0"} | ({"prefill-0"} if spans.keys() == NAMES else set())
