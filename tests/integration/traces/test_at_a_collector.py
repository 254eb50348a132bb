"""Traces of real processes, as a real OTLP collector receives them: complete, each span from its process, in order."""

from __future__ import annotations

import os
import random
import signal
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
"""What waits for what."""
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


def ask(stub: Stub, request_id: str, max_tokens: int = OUTPUT_TOKENS, traceparent: str = "") -> None:
    prompt = random.Random(request_id).choices(range(3, 300), k=PROMPT_TOKENS)
    metadata = [("traceparent", traceparent)] if traceparent else []
    request = greedy_request(prompt, max_tokens, request_id=request_id)
    answer: inference_pb2.GenerateResponse = stub.Generate(request, timeout=100, metadata=metadata)
    assert answer.completion.usage.output_tokens == max_tokens


def complete(collector: OtlpReceiver, request_id: str) -> dict[str, ReceivedSpan]:
    what = f"all spans of {request_id}; there are {sorted(span.name for span in collector.of(request_id))}"
    whole = (NAMES, NAMES - TRANSFERRED)
    collector.wait(lambda: {span.name for span in collector.of(request_id)} in whole, what)
    spans = {span.name: span for span in collector.of(request_id)}
    assert len(collector.of(request_id)) == len(spans), "each once"
    return spans


def check_tree(spans: dict[str, ReceivedSpan]) -> None:
    """Asserts that there is one trace, every parent is there, and each span comes from the process that it should be
    from."""
    assert len({span.trace_id for span in spans.values()}) == 1
    for name, parent_name in PARENTS.items():
        assert spans[name].parent_id == spans[parent_name].span_id, f"{name} under {parent_name}"
    for service, names in WRITERS.items():
        assert {name for name in NAMES if spans[name].resource["service.name"] == service} == names
    assert len({span.resource["process.pid"] for span in spans.values()}) == len(WRITERS)


def check_transfer(spans: dict[str, ReceivedSpan]) -> None:
    """Asserts that it is split at SEALED."""
    transfer = spans[Span.KV_TRANSFER]
    overlapped, exposed = (
        transfer.attributes[name] for name in (Attr.TRANSFER_OVERLAPPED_MS, Attr.TRANSFER_EXPOSED_MS)
    )
    ((_, sealed_ns),) = [event for event in transfer.events if event[0] == Event.SEALED]
    assert exposed > 0
    assert overlapped == pytest.approx((sealed_ns - transfer.start_ns) / 1e6, abs=0.01)
    assert exposed == pytest.approx((transfer.end_ns - sealed_ns) / 1e6, abs=0.01)


def test_every_requests_trace_is_whole(collector: OtlpReceiver, model: Path, tmp_path: Path) -> None:
    """The requests are sent eight at once."""
    with Up(model, tmp_path, "--kv-blocks", "1024") as up:
        up.read_until("^ready$")
        names = [f"together-{n}" for n in range(8)]
        with grpc.insecure_channel(up.target()) as channel, ThreadPoolExecutor(8) as clients:
            ask(Stub(channel), "warm", 4)
            list(clients.map(lambda name: ask(Stub(channel), name), names))
        traces = {name: complete(collector, name) for name in names}
        split = [spans for spans in traces.values() if spans.keys() == NAMES]
        assert len(split) > len(names) / 2, "these are long enough to be worth two workers"
        for spans in split:
            check_tree(spans)
            check_transfer(spans)
            begins = [spans[name].start_ns for name in ORDER]
            assert begins == sorted(begins), spans
        assert {span.request_id for span in collector.spans()} == {"warm", *names}, "no canary is among them"
        assert len({span.trace_id for span in collector.spans()}) == len(names) + 1
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
