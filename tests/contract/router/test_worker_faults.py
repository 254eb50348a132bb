"""Tests workers behind a real router that are lost, refuse or leave, and what its operators see."""

from __future__ import annotations

import asyncio
import pathlib
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import control_pb2, inference_pb2
from services.core.errors import Draining, StepFailed
from services.core.lifecycle import Lifecycle
from services.router.main import serve
from services.rpc.names import Span
from tests.support.cluster import CONFIG, Cluster, code_of, read, request
from tests.support.patience import HANG_S
from tests.support.scripted_worker import MODEL_ID, OUTPUT, TEXT


async def test_a_lost_decode_worker_is_invisible_to_the_client(cluster: Cluster, pair: Any) -> None:
    _, decode = pair
    decode.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await decode.until(lambda: decode.commands)
    other = await cluster.add("decode", worker_id="other")
    decode.cut()
    events, text = await read(call)
    assert text == TEXT
    assert events[-1].completion.workers.decode == "other"
    assert events[-1].completion.workers.retries == 1
    replay = other.commands[-1]
    assert replay.output_base == 1
    assert replay.token_ids[-1] == OUTPUT[0]


async def test_a_worker_that_rejoins_is_used_again(cluster: Cluster, pair: Any) -> None:
    prefill, _ = pair
    prefill.cut(orderly=True)
    await prefill.until(lambda: not prefill._sessions)
    await cluster.join(prefill)
    assert (await cluster.inference.Generate(request())).completion.workers.prefill == "prefill"


@pytest.mark.parametrize("failure", [StepFailed("out of memory"), Draining("bye")])
async def test_a_failed_prompt_runs_elsewhere(cluster: Cluster, pair: Any, failure: Any) -> None:
    pair[0].failure = failure
    await cluster.add("prefill", worker_id="prefill-2")
    answer = await cluster.inference.Generate(request())
    assert answer.output.text == TEXT
    assert answer.prompt_info.prefill_worker == "prefill-2"


async def test_a_refused_handoff_is_parked_and_its_lease_held(cluster: Cluster, pair: Any) -> None:
    _, decode = pair
    decode.num_refusals = 3
    call = cluster.inference.GenerateStream(request())
    assert (await read(call))[1] == TEXT
    assert len(decode.commands) == 4
    assert decode.commands[-1].age_ms > 0


async def test_held_leases_are_in_the_heartbeats(cluster: Cluster, pair: Any) -> None:
    prefill, decode = pair
    decode.num_refusals = 1_000_000
    call = cluster.inference.GenerateStream(request())
    await prefill.until(lambda: prefill.held_leases)
    assert prefill.held_leases == [prefill.commands[0].leg.to_bytes(16, "big")]
    call.cancel()
    await prefill.until(lambda: not prefill.held_leases)


# Operators


async def test_status_models_and_health(cluster: Cluster) -> None:
    health = health_pb2_grpc.HealthStub(cluster.channel)

    async def serving(service: str) -> bool:
        answer = await health.Check(health_pb2.HealthCheckRequest(service=service))
        return answer.status == health_pb2.HealthCheckResponse.SERVING

    assert await serving("")
    assert not await serving("baton.v1.InferenceService")
    models = await cluster.inference.ListModels(inference_pb2.ListModelsRequest())
    assert (models.models[0].id, models.models[0].ready, models.models[0].max_model_len) == (MODEL_ID, False, 512)
    await cluster.add("prefill")
    await cluster.add("decode")
    await cluster.until(lambda: serving("baton.v1.InferenceService"))
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    assert (status.ready, len(status.workers)) == (True, 2)
    assert [(model.model_id, model.ready, model.num_workers) for model in status.models] == [(MODEL_ID, True, 2)]
    worker = status.workers[0]
    assert (worker.worker.worker_id, worker.has_session, worker.load.blocks_free) == ("prefill", True, 32)
    assert 0 <= worker.load_age_ms < 5_000


async def test_one_trace_per_request(cluster: Cluster, pair: Any) -> None:
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    call = cluster.inference.GenerateStream(request(), metadata=(("traceparent", parent),))
    await read(call)
    spans = {span.name: span for span in cluster.spans.get_finished_spans()}
    assert set(spans) == {Span.REQUEST, Span.TOKENIZE, Span.QUEUE, Span.PLACE, Span.PREFILL, Span.DECODE}
    root = spans[Span.REQUEST]
    assert f"{root.context.trace_id:032x}" == parent.split("-")[1]
    for name, span in spans.items():
        assert span.context.trace_id == root.context.trace_id
        if name != Span.REQUEST:
            assert span.parent is not None
            assert span.parent.span_id == root.context.span_id
            assert root.start_time <= span.start_time <= span.end_time <= root.end_time
    prefill = pair[0].commands[0].traceparent
    assert prefill.split("-")[2] == f"{spans[Span.PREFILL].context.span_id:016x}"
    assert [event.name for event in root.events] == ["first_token"]


async def test_metrics(model: str) -> None:
    cluster = Cluster(replace(CONFIG, model=model, metrics_port=0))
    await cluster.start()
    await cluster.add("prefill")
    await cluster.add("decode")
    await cluster.inference.Generate(request())

    async def scraped() -> bool:
        reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.metrics_port)
        writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
        page = (await reader.read(-1)).decode()
        writer.close()
        return all(
            line in page
            for line in (
                'baton_requests_total{model="tiny",outcome="stop"} 1.0',
                'baton_workers{model="tiny",role="prefill",state="ready"} 1.0',
                'baton_requests_live{model="tiny",phase="queued"} 0.0',
                "gen_ai_server_time_to_first_token_seconds_count",
                "vllm:generation_tokens_total",
            )
        )

    await cluster.until(scraped)
    await cluster.stop()


async def test_a_stopping_router_drains_and_sends_the_rest_elsewhere(model: str) -> None:
    cluster = Cluster(replace(CONFIG, model=model))
    await cluster.start()
    prefill, decode = await cluster.add("prefill"), await cluster.add("decode")
    decode.decode_gate.clear()
    call = aiter(cluster.inference.GenerateStream(request()))
    await anext(call)
    draining = asyncio.create_task(cluster.router.drain(0.5))
    await asyncio.sleep(0)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(request())
    assert code_of(refused.value) is grpc.StatusCode.UNAVAILABLE
    await draining
    await cluster.router.stop()
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await read(call)
    assert code_of(ended.value) is grpc.StatusCode.UNAVAILABLE
    await prefill.until(lambda: not prefill.num_legs)
    await decode.until(lambda: not decode.num_legs)
    await cluster.stop()


async def test_a_router_process_serves_drains_and_stops(model: str, tmp_path: pathlib.Path) -> None:
    lifecycle = Lifecycle(drain_s=0.2)
    trace_file = tmp_path / "trace.jsonl"
    serving = asyncio.create_task(serve(replace(CONFIG, model=model, trace_file=str(trace_file)), lifecycle))
    await asyncio.sleep(0)
    lifecycle.stop("test")
    async with asyncio.timeout(HANG_S):
        await serving
