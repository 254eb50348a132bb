"""The router over real grpc.aio, with scripted workers behind it."""

from __future__ import annotations

import asyncio
import pathlib
from dataclasses import replace
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from router_harness import CONFIG, OUTPUT, PATIENCE_S, TEXT, TOKENIZER, Cluster, code_of, read, request
from scripted_worker import MODEL_ID, ScriptedWorker

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, types_pb2
from services.core.errors import Draining, StepFailed
from services.core.lifecycle import Lifecycle
from services.router.main import serve
from services.rpc.names import Span
from services.rpc.status import status_of_call

# Answers


async def test_a_streamed_answer(cluster: Cluster, pair: tuple[ScriptedWorker, ScriptedWorker]) -> None:
    prefill, decode = pair
    asked = request(response=inference_pb2.ResponseOptions(logprobs=0, echo_token_ids=True), request_id="mine")
    events, text = await read(cluster.inference.GenerateStream(asked))
    info, completion = events[0].prompt_info, events[-1].completion
    prompt = TOKENIZER.encode("hello").ids
    assert (info.request_id, info.model, info.prefill_worker, info.cached_tokens) == ("mine", MODEL_ID, "prefill", 3)
    assert list(info.token_ids) == prompt
    assert info.prompt_tokens == len(prompt)
    assert text == TEXT
    chunks = [event.chunk for event in events[1:-1]]
    assert [token for chunk in chunks for token in chunk.token_ids] == decode.output
    assert sum(len(chunk.logprobs) for chunk in chunks) == len(decode.output)
    assert completion.finish_reason == types_pb2.FINISH_REASON_STOP
    assert completion.stop_token_id == 2
    assert (completion.usage.prompt_tokens, completion.usage.output_tokens) == (len(prompt), len(decode.output))
    assert (completion.workers.prefill, completion.workers.decode) == ("prefill", "decode")
    timings = completion.timings
    assert (timings.prefill_compute_ms, timings.decode_run_ms) == (7.0, 5.0)
    assert 0 < timings.ttft_ms <= timings.total_ms
    command = prefill.commands[0]
    assert command.sampling.HasField("seed")
    assert command.stopping.max_tokens == 512 - len(prompt)
    assert decode.commands[0].handoff.lease_id == command.leg.to_bytes(16, "big")


async def test_a_unary_answer_to_messages(cluster: Cluster, pair: Any) -> None:
    messages = inference_pb2.ChatMessages(messages=[inference_pb2.ChatMessage(role="user", content="hi")])
    asked = inference_pb2.GenerateRequest(messages=messages, stopping=types_pb2.StoppingParams(max_tokens=3))
    answer = await cluster.inference.Generate(asked)
    assert list(answer.output.token_ids) == OUTPUT[:3]
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert TOKENIZER.decode(pair[0].commands[0].token_ids, skip_special_tokens=False).endswith("assistant\n")


async def test_token_ids_are_used_as_they_are(cluster: Cluster, pair: Any) -> None:
    await cluster.inference.Generate(
        inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[7, 8]), priority=3, cache_salt="s")
    )
    command = pair[0].commands[0]
    assert (list(command.token_ids), command.priority, command.cache_salt) == ([7, 8], 3, "s")


async def test_a_stop_string_ends_the_sequence_on_its_worker(cluster: Cluster, pair: Any) -> None:
    asked = request(stopping=types_pb2.StoppingParams(stop=["is pass", "zzz"]))
    answer = await cluster.inference.Generate(asked)
    assert answer.output.text == "the baton "
    assert answer.completion.stop_string == "is pass"
    assert answer.completion.usage.output_tokens == len(answer.output.token_ids) <= len(OUTPUT)
    assert TOKENIZER.decode(list(answer.output.token_ids)).startswith("the baton is pass")


async def test_truncation_only_when_asked_for(cluster: Cluster, pair: Any) -> None:
    ids = inference_pb2.TokenIds(ids=[5] * 600)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(inference_pb2.GenerateRequest(token_ids=ids))
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
    stopping = types_pb2.StoppingParams(max_tokens=12)
    answer = await cluster.inference.Generate(
        inference_pb2.GenerateRequest(token_ids=ids, truncate_prompt=True, stopping=stopping)
    )
    assert answer.prompt_info.prompt_tokens == 512 - 12


async def test_mixed_workers_serve_alone(cluster: Cluster) -> None:
    worker = await cluster.add("mixed")
    answer = await cluster.inference.Generate(request())
    assert answer.output.text == TEXT
    assert len(worker.commands) == 2
    assert answer.completion.workers.decode == "mixed"


# Errors


async def field_of(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
    violation = error_details_pb2.BadRequest()
    details = [detail for detail in status_of_call(refused.value).details if detail.Unpack(violation)]
    assert details
    return violation.field_violations[0].field


async def test_bad_requests_name_their_field(cluster: Cluster, pair: Any) -> None:
    generate = cluster.inference.Generate
    assert await field_of(generate(request(""))) == "text"
    assert await field_of(generate(inference_pb2.GenerateRequest())) == "prompt"
    assert await field_of(generate(request(sampling=types_pb2.SamplingParams(top_p=float("nan"))))) == "sampling.top_p"
    stopping = types_pb2.StoppingParams(max_tokens=10_000)
    assert await field_of(generate(request(stopping=stopping))) == "stopping.max_tokens"
    assert (await generate(request())).output.text == TEXT, "the server is unharmed"


async def test_an_unknown_model(cluster: Cluster) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(request(model="other"))
    assert code_of(refused.value) is grpc.StatusCode.NOT_FOUND


async def test_a_duplicate_live_request_id(cluster: Cluster, pair: Any) -> None:
    pair[1].decode_gate.clear()
    first = aiter(cluster.inference.GenerateStream(request(request_id="same")))
    assert (await anext(first)).HasField("prompt_info")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(request(request_id="same"))
    assert code_of(refused.value) is grpc.StatusCode.ALREADY_EXISTS
    pair[1].decode_gate.set()
    assert (await read(first))[1] == TEXT


async def test_no_worker_in_time(model: str) -> None:
    cluster = Cluster(replace(CONFIG, model=model, no_worker_timeout_s=0.2))
    await cluster.start()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(request())
    assert code_of(refused.value) is grpc.StatusCode.UNAVAILABLE
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_of_call(refused.value).details)
    await cluster.stop()


async def test_a_worker_of_another_model_may_not_join(cluster: Cluster) -> None:
    worker = ScriptedWorker("prefill", OUTPUT)
    await worker.start()
    stub = control_pb2_grpc.RegistryServiceStub(cluster.channel)
    description = worker.description()
    description.layout.model_id = "other"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Register(control_pb2.RegisterRequest(worker=description))
    assert code_of(refused.value) is grpc.StatusCode.FAILED_PRECONDITION
    description.ClearField("worker_id")
    assert await field_of(stub.Register(control_pb2.RegisterRequest(worker=description))) == "worker.worker_id"
    await worker.stop()


# Cancellation and deadlines


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_a_client_that_goes_away_leaves_no_work(cluster: Cluster, pair: Any, phase: str, how: str) -> None:
    prefill, decode = pair
    (prefill.prefill_gate if phase == "prefill" else decode.decode_gate).clear()
    call = cluster.inference.GenerateStream(request(), timeout=0.5 if how == "deadline" else None)
    worker = prefill if phase == "prefill" else decode
    await worker.until(lambda: worker.commands)
    assert worker.commands[0].HasField("remaining_ms") == (how == "deadline")
    if how == "cancel":
        call.cancel()
    else:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await read(call)
        assert code_of(ended.value) is grpc.StatusCode.DEADLINE_EXCEEDED
    await worker.until(lambda: worker.cancelled)
    await prefill.until(lambda: not prefill.num_legs)
    await decode.until(lambda: not decode.num_legs)


async def test_a_client_that_never_reads_delays_no_one(cluster: Cluster, pair: Any) -> None:
    idle = cluster.inference.GenerateStream(request(request_id="idle"))
    assert (await cluster.inference.Generate(request())).output.text == TEXT
    assert (await read(idle))[1] == TEXT


# Faults


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


async def test_a_silent_worker_is_lost(cluster: Cluster, pair: Any) -> None:
    prefill, _ = pair
    prefill.prefill_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await prefill.until(lambda: prefill.commands)
    other = await cluster.add("prefill", worker_id="other")
    prefill.heartbeats = False
    for session in prefill._sessions:
        session.end()
    events, text = await read(call)
    assert text == TEXT
    assert events[0].prompt_info.prefill_worker == other.worker_id
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    lost = next(worker for worker in status.workers if worker.worker.worker_id == "prefill")
    assert (lost.state, lost.reason) == (control_pb2.WORKER_STATE_SUSPECT, "silent for 1 s")


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
    assert (status.ready, status.model_id, len(status.workers)) == (True, MODEL_ID, 2)
    worker = status.workers[0]
    assert (worker.worker.worker_id, worker.num_sessions, worker.load.blocks_free) == ("prefill", 1, 32)
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
                'baton_requests_total{outcome="stop"} 1.0',
                'baton_workers{role="prefill",state="ready"} 1.0',
                'baton_requests_live{phase="queued"} 0.0',
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
    async with asyncio.timeout(PATIENCE_S):
        await serving
