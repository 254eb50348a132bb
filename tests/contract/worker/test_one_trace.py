"""Tests that one trace tells a request's whole way: parents complete, phases in order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.rpc.names import Attr, Event, Span
from services.rpc.telemetry import configure_tracing
from tests.support.cluster import greedy_request, running_cluster
from tests.support.models import tiny_model
from tests.support.recording import recording_tracer
from tests.support.span_tree import PARENTS
from tests.support.workers import DECODE, MIXED, PREFILL

PROMPT = [5 + n % 300 for n in range(200)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("trace"))


async def spans_of(model: Path, roles: list[Any], **fields: Any) -> dict[str, ReadableSpan]:
    memory = InMemorySpanExporter()
    async with running_cluster(
        model, roles, tracer=recording_tracer(memory), max_num_batched_tokens=64, **fields
    ) as cluster:
        await cluster.stream(greedy_request(PROMPT, 20, request_id="traced"))
    spans = memory.get_finished_spans()
    assert len({span.context.trace_id for span in spans}) == 1
    by_name = {span.name: span for span in spans}
    assert len(by_name) == len(spans), "one attempt each"
    return by_name


def interval(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    assert span.start_time <= span.end_time
    return span.start_time, span.end_time


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_the_split(model: Path, transport: str) -> None:
    spans = await spans_of(model, [PREFILL, DECODE], transport=transport)
    assert spans.keys() == PARENTS.keys() | {Span.REQUEST}
    for name, parent in PARENTS.items():
        span = spans[name]
        assert span.parent is not None
        assert span.parent.span_id == spans[parent].context.span_id, f"{name} under {parent}"
        assert span.attributes is not None
        assert span.attributes[Attr.REQUEST_ID] == "traced"
    transfer = spans[Span.KV_TRANSFER].attributes
    assert transfer is not None
    assert transfer[Attr.TRANSFER_TRANSPORT] == transport
    assert transfer[Attr.TRANSFER_BLOCKS] == 13
    assert transfer[Attr.TRANSFER_BLOCKS_NOT_MOVED] == 0
    assert transfer[Attr.TRANSFER_BYTES] == 13 * 3 * 2 * 16 * 2 * 16 * 4
    # The critical path: what waits for what.
    path = [Span.TOKENIZE, Span.QUEUE, Span.PREFILL_WAIT, Span.PREFILL_COMPUTE, Span.DECODE_WAIT, Span.DECODE_RUN]
    begins = [interval(spans[name])[0] for name in path]
    assert begins == sorted(begins)


async def test_in_place(model: Path) -> None:
    spans = await spans_of(model, [MIXED])
    assert spans.keys() == PARENTS.keys() | {Span.REQUEST}
    transfer = spans[Span.KV_TRANSFER].attributes
    assert transfer is not None
    assert transfer[Attr.TRANSFER_TRANSPORT] == "local"


async def test_prefill_on_a_decode_worker(model: Path) -> None:
    spans = await spans_of(model, [DECODE])
    assert {Span.PREFILL_COMPUTE, Span.DECODE_RUN} <= spans.keys()
    assert Span.KV_TRANSFER not in spans


async def test_preemptions_stand_on_the_run(model: Path) -> None:
    """Two sequences of 16 blocks are run in a pool of 24: one has to give way, and says so."""
    memory = InMemorySpanExporter()
    async with running_cluster(model, [DECODE], tracer=recording_tracer(memory), kv_blocks=24) as cluster:
        requests = [greedy_request(PROMPT[n : n + 100], 150, request_id=f"r{n}") for n in range(2)]
        await asyncio.gather(*map(cluster.stream, requests))
        (worker,) = (await cluster.status()).workers
    runs = [span for span in memory.get_finished_spans() if span.name == Span.DECODE_RUN]
    told = [dict(run.attributes or {}).get(Attr.NUM_PREEMPTIONS, 0) for run in runs]
    assert sum(told) == worker.load.num_preemptions > 0
    for run, number in zip(runs, told, strict=True):
        start, end = interval(run)
        events = [event for event in run.events if event.name == Event.PREEMPTED]
        assert len(events) == number
        assert all(start <= event.timestamp <= end for event in events)


async def test_workers_begin_no_trace_of_their_own(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the router makes no trace, what they would record belongs to nothing."""
    memory = InMemorySpanExporter()
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    untraced = configure_tracing("baton-router", "router")
    async with running_cluster(
        model, [PREFILL, DECODE], tracer=untraced, worker_tracer=recording_tracer(memory), max_num_batched_tokens=64
    ) as cluster:
        await cluster.stream(greedy_request(PROMPT, 20, request_id="untraced"))
    assert memory.get_finished_spans() == ()
