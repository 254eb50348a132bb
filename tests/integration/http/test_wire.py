"""HTTP as it is on the wire: events, statuses, headers; what a client that leaves, dawdles or never reads does."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from services.router.coordinator.request import Phase
from services.rpc.names import Span
from tests.support.cluster import Cluster, running_cluster
from tests.support.http_client import HTTP, bare_client, events, raw_request
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.recording import recording_tracer
from tests.support.workers import DECODE, PREFILL, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = random.Random(0).choices(range(3, VOCAB_SIZE), k=700)
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ASKED: dict[str, Any] = {"prompt": "The baton", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
ENDLESS: dict[str, Any] = {**ASKED, "prompt": LONG, "max_tokens": 300}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def spans() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory, spans: InMemorySpanExporter) -> Any:
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("wire"))
    flags = {**HTTP, "max_message_bytes": 100_000}
    async with running_cluster(
        model, [PREFILL, DECODE], router=flags, tracer=recording_tracer(spans), kv_blocks=160, max_num_batched_tokens=16
    ) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def quiet(cluster: Cluster) -> Any:
    yield
    await cluster.idle()


async def post(cluster: Cluster, path: str, body: Any, headers: dict[str, str] | None = None) -> Any:
    async with bare_client(cluster) as client:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await client.post(path, content=content, headers={"content-type": "application/json", **(headers or {})})


async def test_events_of_a_chat(cluster: Cluster) -> None:
    asked = {**ASKED, "messages": [{"role": "user", "content": "hi"}], "stream": True}
    answer = await post(cluster, CHAT, {**asked, "stream_options": {"include_usage": True}})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    first, *tokens, closing, usage, done = events(answer.text)
    assert done == "[DONE]"
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    assert first["choices"] == [{**choice, "delta": {"role": "assistant", "content": ""}}]
    assert all(set(event["choices"][0]["delta"]) == {"content"} for event in tokens)
    assert closing["choices"] == [{**choice, "delta": {}, "finish_reason": "length", "stop_reason": None}]
    assert [event["usage"] for event in (first, *tokens, closing)] == [None] * (len(tokens) + 2)
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 5)
    envelopes = {(e["id"], e["object"], e["created"], e["model"]) for e in (first, *tokens, closing, usage)}
    assert len(envelopes) == 1
    assert first["object"] == "chat.completion.chunk"
    without = events((await post(cluster, CHAT, asked)).text)
    assert not any("usage" in event for event in without[:-1])


async def test_usage_in_every_event(cluster: Cluster) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = await post(cluster, COMPLETIONS, {**ASKED, "stream": True, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events(answer.text)[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 5


async def test_ids_and_traces_come_through(cluster: Cluster, spans: InMemorySpanExporter) -> None:
    spans.clear()
    headers = {"x-request-id": "mine-1", "traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"}
    answer = await post(cluster, COMPLETIONS, ASKED, headers)
    assert (answer.json()["id"], answer.headers["x-request-id"]) == ("cmpl-mine-1", "mine-1")
    await cluster.idle()
    finished = spans.get_finished_spans()
    assert {f"{span.context.trace_id:032x}" for span in finished} == {TRACE_ID}
    assert {span.name for span in finished} >= {Span.REQUEST, Span.TOKENIZE, Span.KV_TRANSFER, Span.DECODE_RUN}


async def test_what_is_refused_says_so(cluster: Cluster) -> None:
    async def refused(body: Any, status: int, param: str | None, path: str = COMPLETIONS, **headers: str) -> Any:
        answer = await post(cluster, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        error = answer.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert (answer.status_code, error["param"]) == (status, param), error
        assert answer.headers["x-request-id"]
        return error

    fields = json.dumps(dict.fromkeys(map(str, range(257)))).encode()
    for body in (
        b"",
        b"{",
        b"[]",
        b"\xff",
        b"null",
        b"[" * 90_000,
        b'{"prompt": NaN}',
        b'{"seed": ' + b"9" * 9000,
        fields,
    ):
        assert (await refused(body, 400, None))["code"] == "malformed_message"
    assert (await refused(b'{"prompt": "' + b"x" * 100_000, 413, None))["code"] == "message_too_large"
    await refused({}, 400, "prompt")
    await refused({**ASKED, "prompt": "\ud800"}, 400, "prompt")
    await refused({**ASKED, "prompt": ["a", [1]]}, 400, "prompt[1]")
    await refused({**ASKED, "prompt": ["a", ""]}, 400, "prompt[1]")
    await refused({**ASKED, "prompt": [[1], [1, -1], [1]], "echo": True}, 400, "prompt[1]")
    await refused({**ASKED, "prompt": ["a"] * 65}, 400, "prompt")
    await refused({**ASKED, "prompt": [1, -1], "echo": True}, 400, "prompt")
    await refused({**ASKED, "prompt": [1, "a"]}, 400, "prompt[1]")
    await refused({**ASKED, "prompt": LONG * 2}, 400, "prompt")
    await refused({**ASKED, "max_tokens": 0}, 400, "max_tokens")
    await refused({**ASKED, "max_tokens": 1 << 40}, 400, "max_tokens")
    await refused({**ASKED, "temperature": 1e999}, 400, None)
    await refused({**ASKED, "temperature": "hot"}, 400, "temperature")
    await refused({**ASKED, "stream": 1}, 400, "stream")
    await refused({**ASKED, "stop": [""]}, 400, "stop[0]")
    await refused({**ASKED, "logprobs": 21}, 400, "logprobs")
    await refused({**ASKED, "logprobs": 21, "echo": True}, 400, "logprobs")
    await refused({**ASKED, "prompt_logprobs": 21}, 400, "prompt_logprobs")
    await refused({**ASKED, "prompt_logprobs": -1}, 400, "prompt_logprobs")
    await refused({**ASKED, "prompt_logprobs": True}, 400, "prompt_logprobs")
    await refused({**ASKED, "prompt_logprobs": 1, "stream": True}, 400, "prompt_logprobs")
    for key in ("x", "1.0", "-1", "", "\u0661", "\u00b9"):
        await refused({**ASKED, "logit_bias": {key: 1}}, 400, "logit_bias")
    await refused({**ASKED, "stream_options": {}}, 400, "stream_options")
    await refused(
        {**ASKED, "stream": True, "stream_options": {"include_usage": 1}}, 400, "stream_options.include_usage"
    )
    await refused({**ASKED, "priority": 101}, 400, "priority")
    await refused(ASKED, 400, "x-request-id", x_request_id="x" * 129)
    await refused({**ASKED, "prompt": ["a", "b"]}, 400, "x-request-id", x_request_id="x" * 127)
    await refused(ASKED, 400, "x-request-timeout", x_request_timeout="soon")
    await refused({}, 400, "messages", CHAT)
    await refused({"messages": []}, 400, "messages", CHAT)
    await refused({"messages": [{"role": "wizard", "content": ""}]}, 400, "messages[0].role", CHAT)
    await refused({"messages": [{"role": "tool", "content": ""}]}, 400, "messages[0].role", CHAT)
    await refused({"messages": [{"role": "user"}]}, 400, "messages[0].content", CHAT)
    image = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {}}]}
    await refused({"messages": [image]}, 400, "messages[0].content[1].type", CHAT)
    hi = {"messages": [{"role": "user", "content": "hi"}]}
    await refused({**hi, "max_completion_tokens": 0}, 400, "max_completion_tokens", CHAT)
    await refused({**hi, "top_logprobs": 2}, 400, "top_logprobs", CHAT)
    await refused({**hi, "logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", CHAT)


async def test_paths_that_do_not_exist(cluster: Cluster) -> None:
    async with bare_client(cluster) as client:
        for answer, status in [(await client.post("/v1/embeddings"), 404), (await client.get(COMPLETIONS), 405)]:
            assert (answer.status_code, answer.json()["error"]["type"]) == (status, "invalid_request_error")


async def test_health_and_metrics(cluster: Cluster) -> None:
    async with bare_client(cluster) as client:
        assert ((health := await client.get("/health")).status_code, health.json()["status"]) == (200, "ready")
        before = (await client.get("/metrics")).text
        await post(cluster, COMPLETIONS, {**ASKED, "max_tokens": 0})
        await cluster.idle()
        after = await client.get("/metrics")
    assert after.headers["content-type"].startswith("text/plain; version=")
    assert "process_resident_memory_bytes" in after.text
    assert _count(after.text, "invalid_parameter") == _count(before, "invalid_parameter") + 1


def _count(metrics: str, outcome: str) -> float:
    start = f'baton_requests_total{{model="tiny-llama",outcome="{outcome}"}} '
    return next((float(line.removeprefix(start)) for line in metrics.splitlines() if line.startswith(start)), 0.0)


PHASES: dict[str, Callable[[Cluster], bool]] = {
    "prefilling": lambda cluster: cluster.router.coordinator.phases()[Phase.PREFILLING] > 0,
    "importing": lambda cluster: len(cluster.workers[1].imports) > 0,
    "decoding": lambda cluster: cluster.workers[1].engine.stats().num_running > 0,
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("phase", PHASES)
async def test_a_client_that_disconnects(cluster: Cluster, phase: str, stream: bool) -> None:
    asked = {**ENDLESS, "stream": stream, "cache_salt": f"{phase} {stream}"}
    _, writer = await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
    writer.write(raw_request(COMPLETIONS, asked))
    await until(lambda: PHASES[phase](cluster), f"a request is {phase}", 30.0, pause_s=0)
    writer.close()
    await cluster.idle()
    steps = await cluster.steps_at_rest()
    assert (await post(cluster, COMPLETIONS, {**ASKED, "max_tokens": 3})).status_code == 200
    # A chunk and two tokens, and no step of the one who had left.
    assert [worker.engine.stats().num_steps for worker in cluster.workers] == [steps[0] + 1, steps[1] + 2]


async def test_a_storm_of_disconnects_leaves_nothing(cluster: Cluster) -> None:
    """Clients give up at random moments, of streams and of whole answers."""
    dice = random.Random(1)

    async def impatient(client: Any, number: int) -> bool:
        asked = {**ASKED, "prompt": LONG[number : number + 60], "max_tokens": 40, "stream": number % 2 == 0}
        try:
            async with asyncio.timeout(dice.uniform(0.01, 2.0)):
                return bool((await client.post(COMPLETIONS, json=asked)).status_code == 200)
        except TimeoutError:
            return False

    async with bare_client(cluster) as client:
        answered = await asyncio.gather(*(impatient(client, number) for number in range(100)))
        assert not all(answered)
        await cluster.idle()
        assert (await client.post(COMPLETIONS, json=ASKED)).status_code == 200


async def test_a_client_that_never_reads_delays_no_one(cluster: Cluster) -> None:
    asked = {**ASKED, "prompt": [9] * 20, "max_tokens": 900, "logprobs": 20, "stream": True}
    with socket.socket() as mute:
        mute.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        mute.connect(("127.0.0.1", cluster.router.http_port))
        mute.sendall(raw_request(COMPLETIONS, asked))
        await until(lambda: PHASES["decoding"](cluster), "it decodes")
        assert (await post(cluster, COMPLETIONS, ASKED)).status_code == 200
        await until(lambda: cluster.router.coordinator.num_live == 0, "it is done without its reader", 240.0)
    await cluster.idle()


async def test_a_stream_that_fails_says_so_and_is_not_done(tmp_path: Path) -> None:
    async with running_cluster(tiny_model("llama", tmp_path), [PREFILL, DECODE], router=HTTP) as cluster:
        async with bare_client(cluster) as client:
            asked = {**ASKED, "max_tokens": 900, "stream": True}
            async with client.stream("POST", COMPLETIONS, json=asked) as answer:
                lines = answer.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                await cluster.router.stop()  # without draining
                *_, last = [json.loads(line.removeprefix("data: ")) async for line in lines if line]
        assert last["error"]["code"] == "draining"
        assert last["error"]["type"] == "service_unavailable_error"


async def test_a_stopping_router_finishes_streams_and_sends_the_rest_elsewhere(tmp_path: Path) -> None:
    async with running_cluster(tiny_model("llama", tmp_path), [PREFILL, DECODE], router=HTTP) as cluster:
        asked = {**ASKED, "max_tokens": 300, "stream": True}
        running = asyncio.create_task(post(cluster, COMPLETIONS, asked))
        await until(lambda: PHASES["decoding"](cluster), "it decodes")
        draining = asyncio.create_task(cluster.router.drain(240.0))
        await until(lambda: not cluster.router.coordinator.ready, "it admits nothing")
        refused = await post(cluster, COMPLETIONS, ASKED)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["retry-after"]
        async with bare_client(cluster) as client:
            assert (await client.get("/health")).status_code == 503
            assert (await client.get("/health/live")).status_code == 200
        await draining
        await cluster.router.stop()
        answered = events((await running).text)
        assert answered[-1] == "[DONE]"
        assert answered[-2]["choices"][0]["finish_reason"] == "length"
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", cluster.router.http_port)
