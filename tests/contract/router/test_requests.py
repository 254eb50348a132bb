"""Tests the router over real grpc.aio, with scripted workers behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2, worker_pb2
from services.rpc import call_limits
from services.rpc.status import status_of_call
from tests.support.bad_peers import HTTP2_PREFACE, HTTP2_SETTINGS, NO_WINDOW, grpc_frames, grpc_request
from tests.support.cluster import CONFIG, Cluster, code_of, read, request
from tests.support.kv_harness import until
from tests.support.scripted_worker import MODEL_ID, OUTPUT, TEXT, TOKENIZER, ScriptedWorker
from tests.support.text_model import write_model

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


@pytest.fixture
async def long_cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    """Yields a router whose model was made for long sequences."""
    cluster = Cluster(replace(CONFIG, model=str(write_model(tmp_path, context_tokens=1 << 16))))
    await cluster.start()
    yield cluster
    await cluster.idle()
    await cluster.stop()


async def test_a_slow_reader_gets_what_waited_in_messages_it_takes(long_cluster: Cluster) -> None:
    """Twenty thousand tokens are sent while it does not read, each with 20 log-probabilities. The client's runtime
    takes no message above its default of 4 MiB."""
    cluster = long_cluster
    await cluster.add("prefill", num_blocks=4096)
    decode = await cluster.add("decode", num_blocks=4096)
    decode.decode_gate.clear()
    most = 20_000
    asked = request(response=inference_pb2.ResponseOptions(logprobs=20))
    asked.stopping.max_tokens, asked.stopping.ignore_eos = most + 1, True
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(asked)
        await decode.until(lambda: decode.commands)
        top = [types_pb2.TopLogprob(token_id=number, logprob=-1.5) for number in range(256, 276)]
        leg, part = decode.commands[-1].leg, 2000
        for position in range(1, most + 1, part):
            said = types_pb2.SequenceTokens(leg=leg, position=position, token_ids=[OUTPUT[1]] * part)
            said.logprobs.extend([types_pb2.TokenLogprobs(logprob=-1.0, top=top)] * part)
            if position + part > most:
                said.finish.reason = types_pb2.FINISH_REASON_LENGTH
            decode.say(worker_pb2.LegEvent(tokens=said))
        events, text = await read(call)
    chunks = [event.chunk for event in events if event.WhichOneof("event") == "chunk"]
    assert max(chunk.ByteSize() for chunk in chunks) < 1 << 20
    token_ids = [token for chunk in chunks for token in chunk.token_ids]
    assert token_ids == [OUTPUT[0], *[OUTPUT[1]] * most]
    assert sum(len(chunk.logprobs) for chunk in chunks) == len(token_ids)
    assert text == TOKENIZER.decode(token_ids)
    decode.decode_gate.set()


async def test_an_answer_that_nobody_reads_is_given_up(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection stays, answers pings and never lets a byte of data through; the request itself has ended."""
    monkeypatch.setattr(call_limits, "WRITE_WITHIN_S", 0.5)
    await cluster.add("prefill")
    await cluster.add("decode")
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
    asked = request(stopping=types_pb2.StoppingParams(max_tokens=4)).SerializeToString()
    call = grpc_request("/baton.v1.InferenceService/GenerateStream", asked, {}).removeprefix(
        HTTP2_PREFACE + HTTP2_SETTINGS
    )
    writer.write(HTTP2_PREFACE + NO_WINDOW + call)
    reading = asyncio.create_task(grpc_frames(reader, writer))
    await until(lambda: cluster.router.byte_budget.used_bytes > 0)
    await until(lambda: cluster.router.byte_budget.used_bytes == 0)
    reading.cancel()
    writer.close()
    assert (await cluster.inference.Generate(request())).output.text == TEXT


async def test_a_whole_answer_that_no_client_would_take_is_refused_before_it_is_computed(long_cluster: Cluster) -> None:
    """The same as a stream is served (above)."""
    cluster = long_cluster
    prefill = await cluster.add("prefill", num_blocks=4096)
    await cluster.add("decode", num_blocks=4096)
    asked = request(response=inference_pb2.ResponseOptions(logprobs=20))
    asked.stopping.max_tokens = 20_000
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(asked)
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert "response.logprobs" in str(refused.value.details())
    assert not prefill.commands


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


async def test_no_worker_in_time(model: str) -> None:
    cluster = Cluster(replace(CONFIG, model=model, no_worker_timeout_s=0.2))
    await cluster.start()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(request())
    assert code_of(refused.value) is grpc.StatusCode.UNAVAILABLE
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_of_call(refused.value).details)
    await cluster.stop()


async def test_a_worker_whose_models_text_cannot_be_had_may_not_join(cluster: Cluster) -> None:
    worker = ScriptedWorker("prefill", OUTPUT)
    await worker.start()
    stub = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    description = worker.description()
    description.layout.model_id = "other"
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await stub.Register(control_pb2.RegisterRequest(worker=description))
    assert code_of(refused.value) is grpc.StatusCode.FAILED_PRECONDITION
    description.ClearField("worker_id")
    assert await field_of(stub.Register(control_pb2.RegisterRequest(worker=description))) == "worker.worker_id"
    await worker.stop()


@pytest.mark.parametrize(
    ("fingerprint", "field"),
    [
        ({}, "worker.fingerprint.kv"),
        ({"kv": "5c" * 15}, "worker.fingerprint.kv"),
        ({"kv": "5c" * 17}, "worker.fingerprint.kv"),
        ({"kv": "\x1b[2J" + "5c" * 14}, "worker.fingerprint.kv"),
    ],
)
async def test_a_fingerprint_has_a_digest(cluster: Cluster, fingerprint: dict[str, str], field: str) -> None:
    worker = ScriptedWorker("prefill", OUTPUT)
    await worker.start()
    description = worker.description()
    await worker.stop()
    stub = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    description.fingerprint.CopyFrom(types_pb2.Fingerprint(**fingerprint))
    assert await field_of(stub.Register(control_pb2.RegisterRequest(worker=description))) == field


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


# Texts


def response_options(**options: Any) -> inference_pb2.ResponseOptions:
    return inference_pb2.ResponseOptions(**options)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_prompts_text_comes_first_if_asked_for(cluster: Cluster, pair: Any, stream: bool) -> None:
    """A character that the prompt begins and the output ends is one; control tokens are shown where they are wanted."""
    begun = TOKENIZER.encode("🙂", add_special_tokens=False).ids[:2]
    prompt = [1, *TOKENIZER.encode("hi", add_special_tokens=False).ids]

    async def text_of(**fields: Any) -> str:
        asked = inference_pb2.GenerateRequest(**fields)
        if stream:
            return (await read(cluster.inference.GenerateStream(asked)))[1]
        return (await cluster.inference.Generate(asked)).output.text

    ids = inference_pb2.TokenIds(ids=prompt)
    assert await text_of(token_ids=ids, response=response_options(echo_text=True)) == "hi" + TEXT
    shown = response_options(echo_text=True, skip_special_tokens=False)
    assert await text_of(token_ids=ids, response=shown) == "<|im_start|>hi" + TEXT
    assert await text_of(text="<|im_end|> hi", response=response_options(echo_text=True)) == "<|im_end|> hi" + TEXT
    cut_off = inference_pb2.TokenIds(ids=[*prompt, *begun])
    assert (await text_of(token_ids=cut_off, response=response_options(echo_text=True))).startswith("hi\ufffd")
    assert await text_of(token_ids=cut_off) == TEXT, "without echo nothing of the prompt comes"
    only = {"response": response_options(echo_text=True), "stopping": types_pb2.StoppingParams(max_tokens=0)}
    assert await text_of(text="hello", **only) == "hello"


async def test_an_answer_that_is_the_prompt_alone_has_no_tokens(cluster: Cluster, pair: Any) -> None:
    only = {"response": response_options(echo_text=True), "stopping": types_pb2.StoppingParams(max_tokens=0)}
    answer = await cluster.inference.Generate(request(**only))
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_LENGTH
    assert (answer.completion.usage.output_tokens, list(answer.output.token_ids)) == (0, [])
    assert pair[0].commands[0].stopping.max_tokens == 1


@pytest.mark.parametrize(("shown", "end"), [({}, ""), ({"include_stop_text": True}, "<|im_end|>")])
async def test_the_stop_tokens_text_is_shown_only_if_asked_for(
    cluster: Cluster, pair: Any, shown: dict[str, bool], end: str
) -> None:
    asked = request(response=response_options(skip_special_tokens=False, **shown))
    answer = await cluster.inference.Generate(asked)
    assert answer.output.text == TEXT + end
    assert answer.completion.stop_token_id == 2
    assert (await read(cluster.inference.GenerateStream(asked)))[1] == TEXT + end


async def test_a_stop_string_is_found_across_a_replay(cluster: Cluster, pair: Any) -> None:
    """One that token 0 begins is completed by what another worker makes; min_tokens counts from the request's first."""
    _, decode = pair
    decode.decode_gate.clear()
    first = TOKENIZER.decode(OUTPUT[:1])
    stop = TEXT[len(first) - 1 : len(first) + 2]
    stopping = types_pb2.StoppingParams(stop=[stop, first], min_tokens=1)
    call = cluster.inference.GenerateStream(request(stopping=stopping))
    await decode.until(lambda: decode.commands)
    await cluster.add("decode", worker_id="other")
    decode.cut()
    events, text = await read(call)
    assert text == TEXT[: len(first) - 1]
    assert events[-1].completion.stop_string == stop
    assert events[-1].completion.workers.retries == 1


async def test_bad_words_reach_workers_as_tokens(cluster: Cluster, pair: Any) -> None:
    sampling = types_pb2.SamplingParams(bad_words=["baton"], allowed_token_ids=[7, 8], top_p=0.0)
    await cluster.inference.Generate(request(sampling=sampling))
    for worker in pair:
        sent = worker.commands[0].sampling
        assert not sent.bad_words
        assert list(sent.bad_token_ids[0].token_ids) == TOKENIZER.encode("baton", add_special_tokens=False).ids
        assert list(sent.allowed_token_ids) == [7, 8]
        assert sent.temperature == 0.0
        assert not sent.HasField("top_p")


async def test_a_prompts_last_tokens_are_kept(cluster: Cluster, pair: Any) -> None:
    ids = inference_pb2.TokenIds(ids=[*range(5, 255)] * 4)
    asked = inference_pb2.GenerateRequest(token_ids=ids, truncate_prompt_tokens=3)
    await cluster.inference.Generate(asked)
    assert list(pair[0].commands[0].token_ids) == [252, 253, 254]
    asked.truncate_prompt_tokens = 600
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await cluster.inference.Generate(asked)
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
