"""Tests tenants at a running router, over gRPC and HTTP: who gets in, what is refused and in which words, and that
tenants do not meet."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import openai
import pytest
from google.rpc import error_details_pb2

from baton.v1 import inference_pb2, types_pb2
from services.core.lifecycle import Lifecycle
from services.router import main
from services.router.main import Router
from services.router.tenants.gate import Gate
from services.rpc.names import Attr, Span
from services.rpc.status import status_of_call
from tests.support.certificates import written
from tests.support.cluster import CONFIG, Cluster, code_of, read, request
from tests.support.patience import HANG_S
from tests.support.scripted_worker import MODEL_ID, OUTPUT, TEXT, TOKENIZER
from tests.support.tenants import Metadata, TenantsFile, as_a_client

Code = grpc.StatusCode
COMPLETIONS = "/v1/completions"
BODY = {"prompt": "hello", "max_tokens": 4}
NUM_PROMPT = len(TOKENIZER.encode("hello").ids)
MOST_OUTPUT = 12 - NUM_PROMPT
"""What the tenants `poor` and `brief` may have with that prompt."""


@pytest.fixture
def file(tmp_path: Path) -> TenantsFile:
    file = TenantsFile(tmp_path)
    file.write(
        acme={},
        other={},
        narrow={"models": ["another"], "priority": {"max": -1}},
        one={"limits": {"concurrent_requests": 1}},
        slow={"limits": {"requests_per_s": 0.1, "burst_requests": 1}},
        pairs={"limits": {"requests_per_s": 2.0, "burst_requests": 2}},
        poor={"limits": {"tokens_per_min": 6, "burst_tokens": 12}},
        brief={"limits": {"tokens_per_min": 6000, "burst_tokens": 12}},
        short={"limits": {"max_output_tokens": 3, "max_input_tokens": 8}},
    )
    return file


async def refused(cluster: Cluster, metadata: Metadata, asked: inference_pb2.GenerateRequest) -> Any:
    """Returns the gRPC error that ends a call."""
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await cluster.inference.Generate(asked, metadata=metadata)
    return error.value


def detail(error: grpc.aio.AioRpcError, kind: Any) -> Any:
    (found,) = [each for each in status_of_call(error).details if each.Is(kind.DESCRIPTOR)]
    unpacked = kind()
    found.Unpack(unpacked)
    return unpacked


def reason(error: grpc.aio.AioRpcError) -> str:
    return str(detail(error, error_details_pb2.ErrorInfo).reason)


async def test_a_key_opens_both_fronts(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    answer = await cluster.inference.Generate(request(), metadata=file.metadata("acme"))
    assert answer.output.text == TEXT
    reply = await http.post(COMPLETIONS, json=BODY, headers=file.headers("acme"))
    assert reply.status_code == 200
    roots = [span for span in cluster.spans.get_finished_spans() if span.name == Span.REQUEST]
    assert {(span.attributes or {}).get(Attr.TENANT) for span in roots} == {"acme"}
    key, address = file.keys["acme"], str(http.base_url)
    async with openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == [MODEL_ID]


@pytest.mark.parametrize("authorization", [None, "", "Bearer none", "Bearer bk_aaaa_" + "a" * 43, "Basic YTpi"])
async def test_without_a_key_nothing_opens(cluster: Cluster, pair: Any, http: Any, authorization: str | None) -> None:
    metadata = () if authorization is None else (("authorization", authorization),)
    headers = {} if authorization is None else {"authorization": authorization}
    error = await refused(cluster, metadata, request())
    assert (code_of(error), reason(error)) == (Code.UNAUTHENTICATED, "INVALID_API_KEY")
    with pytest.raises(grpc.aio.AioRpcError) as error_of_stream:
        await read(cluster.inference.GenerateStream(request(), metadata=metadata))
    assert code_of(error_of_stream.value) is Code.UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as error_of_list:
        await cluster.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    assert code_of(error_of_list.value) is Code.UNAUTHENTICATED
    for method, path in (
        *(
            ("POST", path)
            for path in (COMPLETIONS, "/v1/chat/completions", "/v1/responses", "/tokenize", "/detokenize")
        ),
        *(("GET", path) for path in ("/v1/models", f"/v1/models/{MODEL_ID}", "/v1/models/%0a")),
    ):
        reply = await http.request(method, path, headers=headers, **({"json": BODY} if method == "POST" else {}))
        told = reply.json()["error"]
        assert (reply.status_code, told["code"], told["type"]) == (401, "invalid_api_key", "invalid_request_error")
        assert reply.headers["www-authenticate"] == "Bearer"
    health = await http.get("/health")
    assert health.status_code == 200, "load balancers have no key"
    assert health.json() == {"status": "ready"}, "the parts are for operators"
    assert (await http.get("/metrics")).status_code == 404, "they tell of all tenants"
    assert (await http.get("/")).status_code == 404, "and so does the console"
    assert not pair[0].commands


async def test_a_model_that_is_not_allowed(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    """A tenant does not learn whether a model is served that it may not use."""
    metadata, headers = file.metadata("narrow"), file.headers("narrow")
    for name in (MODEL_ID, "nowhere"):
        error = await refused(cluster, metadata, request(model=name))
        assert (code_of(error), reason(error)) == (Code.PERMISSION_DENIED, "MODEL_NOT_ALLOWED")
        reply = await http.post(COMPLETIONS, json=BODY | {"model": name}, headers=headers)
        told = reply.json()["error"]
        assert (reply.status_code, told["code"], told["param"]) == (403, "model_not_found", "model")
        assert told["message"] == f"tenant narrow does not have access to model {name!r}"
        assert (await http.get(f"/v1/models/{name}", headers=headers)).status_code == 403
    error = await refused(cluster, metadata, request(model="another"))
    assert code_of(error) is Code.NOT_FOUND
    assert MODEL_ID not in error.details()
    assert (await http.get("/v1/models", headers=headers)).json()["data"] == []
    models = await cluster.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=metadata)
    assert not models.models
    assert not pair[0].commands


async def test_requests_by_the_second(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    await cluster.inference.Generate(request(), metadata=file.metadata("slow"))
    error = await refused(cluster, file.metadata("slow"), request())
    assert (code_of(error), reason(error)) == (Code.RESOURCE_EXHAUSTED, "QUOTA_EXCEEDED")
    (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
    assert (violation.subject, violation.quota_id) == ("tenant:slow", "requests_per_s")
    assert 8 < detail(error, error_details_pb2.RetryInfo).retry_delay.seconds <= 10
    reply = await http.post(COMPLETIONS, json=BODY, headers=file.headers("slow"))
    told = reply.json()["error"]
    assert (reply.status_code, told["type"], told["code"]) == (429, "requests", "rate_limit_exceeded")
    assert 8 <= int(reply.headers["retry-after"]) <= 10
    assert (await http.post("/tokenize", json={"prompt": "x"}, headers=file.headers("slow"))).status_code == 429
    await cluster.inference.Generate(request(), metadata=file.metadata("acme"))


async def test_tokens_by_the_minute(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    """What is reserved and not used is given back; what a client asks for that could never be is its mistake."""
    metadata = file.metadata("poor")
    stopping = types_pb2.StoppingParams(max_tokens=MOST_OUTPUT)
    error = await refused(cluster, metadata, request(stopping=types_pb2.StoppingParams(max_tokens=MOST_OUTPUT + 1)))
    assert code_of(error) is Code.INVALID_ARGUMENT
    pair[0].prefill_gate.clear()
    waiting = cluster.inference.Generate(request(stopping=stopping), metadata=metadata)
    await cluster.until(lambda: asyncio.sleep(0, bool(pair[0].commands)))
    error = await refused(cluster, metadata, request(stopping=stopping))
    assert code_of(error) is Code.RESOURCE_EXHAUSTED
    (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
    assert violation.quota_id == "tokens_per_min"
    reply = await http.post(COMPLETIONS, json=BODY, headers=file.headers("poor"))
    told = reply.json()["error"]
    assert (reply.status_code, told["type"], told["code"]) == (429, "tokens", "rate_limit_exceeded")
    waiting.cancel()
    pair[0].prefill_gate.set()
    await cluster.idle()
    # The prompt was charged if its worker had begun; the output was not.
    few = types_pb2.StoppingParams(max_tokens=MOST_OUTPUT - NUM_PROMPT)
    answer = await cluster.inference.Generate(request(stopping=few), metadata=metadata)
    assert answer.prompt_info.prompt_tokens == NUM_PROMPT


async def test_an_output_ends_where_the_burst_does(cluster: Cluster, pair: Any, file: TenantsFile) -> None:
    answer = await cluster.inference.Generate(request(), metadata=file.metadata("brief"))
    assert list(answer.output.token_ids) == OUTPUT[:MOST_OUTPUT]
    assert answer.completion.finish_reason == types_pb2.FINISH_REASON_LENGTH


async def test_requests_at_once(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    pair[0].prefill_gate.clear()
    waiting = cluster.inference.Generate(request(), metadata=file.metadata("one"))
    await cluster.until(lambda: asyncio.sleep(0, bool(pair[0].commands)))
    error = await refused(cluster, file.metadata("one"), request())
    (violation,) = detail(error, error_details_pb2.QuotaFailure).violations
    assert (code_of(error), violation.quota_id) == (Code.RESOURCE_EXHAUSTED, "concurrent_requests")
    reply = await http.post(COMPLETIONS, json=BODY, headers=file.headers("one"))
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    pair[0].prefill_gate.set()
    await waiting
    await cluster.inference.Generate(request(), metadata=file.metadata("one"))
    reply = await http.post(COMPLETIONS, json=BODY | {"prompt": ["a", "b"]}, headers=file.headers("one"))
    assert reply.status_code == 400, "two prompts are never let in together: to try again is of no use"


async def test_several_prompts_in_one_call_get_in_together(
    cluster: Cluster, pair: Any, http: Any, file: TenantsFile
) -> None:
    """A call that is refused takes nothing of what it waits for, and none of its prompts begins."""
    body, headers = BODY | {"prompt": ["hello", "hello"]}, file.headers("pairs")
    assert (await http.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
    for _ in range(3):
        assert (await http.post(COMPLETIONS, json=body, headers=headers)).status_code == 429
    reply = await http.post(COMPLETIONS, json=body, headers=headers)
    await asyncio.sleep(float(reply.headers["retry-after"]))
    assert (await http.post(COMPLETIONS, json=body, headers=headers)).status_code == 200
    begun = len(pair[0].commands)
    assert (await http.post(COMPLETIONS, json=body, headers=headers)).status_code == 429
    await cluster.idle()
    assert len(pair[0].commands) == begun


async def test_a_key_that_is_taken_away_while_a_body_comes_opens_nothing(
    cluster: Cluster, pair: Any, http: Any, file: TenantsFile
) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b'{"prompt": "hello", '
        file.write(other={})
        cluster.router.gate.reload_soon()
        async with asyncio.timeout(HANG_S):
            while (await http.get("/v1/models", headers=file.headers("acme"))).status_code != 401:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        yield b'"max_tokens": 4}'

    headers = file.headers("acme") | {"content-type": "application/json"}
    assert (await http.post(COMPLETIONS, content=body(), headers=headers)).status_code == 401
    assert not pair[0].commands


async def test_caps_of_prompts_and_outputs(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    metadata, headers = file.metadata("short"), file.headers("short")
    answer = await cluster.inference.Generate(request(), metadata=metadata)
    assert list(answer.output.token_ids) == OUTPUT[:3]
    error = await refused(cluster, metadata, request("a prompt that is long"))
    assert code_of(error) is Code.INVALID_ARGUMENT
    assert "tenant short may have 8" in error.details()
    reply = await http.post(COMPLETIONS, json=BODY, headers=headers)
    told = reply.json()["error"]
    assert (reply.status_code, told["param"]) == (400, "max_tokens")
    assert "tenant short may have 3" in told["message"]


async def test_priorities_of_a_tenant(cluster: Cluster, pair: Any, file: TenantsFile) -> None:
    file.write(low={"priority": {"max": -1}})
    cluster.router.gate.reload_soon()

    async def opens() -> bool:
        try:
            await cluster.inference.ListModels(inference_pb2.ListModelsRequest(), metadata=file.metadata("low"))
        except grpc.aio.AioRpcError:
            return False
        return True

    await cluster.until(opens)
    await cluster.inference.Generate(request(), metadata=file.metadata("low"))
    assert pair[0].commands[-1].priority == -1, "the nearest to 0"
    error = await refused(cluster, file.metadata("low"), request(priority=0))
    assert code_of(error) is Code.INVALID_ARGUMENT
    assert "priority: is 0; tenant low may have -100 to -1" in error.details()
    error = await refused(cluster, file.metadata("acme"), request())
    assert code_of(error) is Code.UNAUTHENTICATED, "its tenant is gone"


async def test_a_new_file_ends_no_request(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    """A tenant is taken away while it has a request on each front: both are answered, and nothing more is."""
    pair[0].prefill_gate.clear()
    by_grpc = cluster.inference.Generate(request(), metadata=file.metadata("acme"))
    by_http = asyncio.create_task(http.post(COMPLETIONS, json=BODY, headers=file.headers("acme")))
    await cluster.until(lambda: asyncio.sleep(0, len(pair[0].commands) == 2))
    file.write(other={})
    cluster.router.gate.reload_soon()

    async def is_out() -> bool:
        return bool((await http.get("/v1/models", headers=file.headers("acme"))).status_code == 401)

    await cluster.until(is_out)
    pair[0].prefill_gate.set()
    assert (await by_grpc).output.text == TEXT
    assert (await by_http).status_code == 200
    error = await refused(cluster, file.metadata("acme"), request())
    assert code_of(error) is Code.UNAUTHENTICATED


async def test_request_ids_and_caches_of_tenants_do_not_meet(
    cluster: Cluster, pair: Any, http: Any, file: TenantsFile
) -> None:
    """The same id lives twice, each client sees its own, and the first one's end is not the other's."""
    pair[0].prefill_gate.clear()
    asked = request(request_id="r", cache_salt="s")
    first = cluster.inference.Generate(asked, metadata=file.metadata("acme"))
    await cluster.until(lambda: asyncio.sleep(0, len(pair[0].commands) == 1))
    second = cluster.inference.Generate(asked, metadata=file.metadata("other"))
    await cluster.until(lambda: asyncio.sleep(0, len(pair[0].commands) == 2))
    salts = [command.cache_salt for command in pair[0].commands]
    assert salts == ["tenant:acme\0s", "tenant:other\0s"]
    first.cancel()
    pair[0].prefill_gate.set()
    answer = await second
    assert (answer.prompt_info.request_id, answer.output.text) == ("r", TEXT)
    reply = await http.post(COMPLETIONS, json=BODY, headers=file.headers("acme") | {"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    assert "acme/" not in reply.text


async def test_prompts_of_a_tenant_that_says_so_are_not_logged(
    model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = TenantsFile(tmp_path)
    file.write(acme={}, quiet={"log_prompts": False})
    cluster = Cluster(replace(CONFIG, model=model, tenants=str(file.path), log_prompts=True))
    await cluster.start()
    for role in ("prefill", "decode"):
        await cluster.add(role)
    caplog.set_level("INFO")
    async with as_a_client(cluster):
        for name in ("acme", "quiet"):
            await cluster.inference.Generate(request(f"said by {name}"), metadata=file.metadata(name))
    assert "said by acme" in caplog.text
    assert "said by quiet" not in caplog.text
    await cluster.idle()
    await cluster.stop()


@pytest.mark.parametrize(
    ("has_tenants", "has_tls", "expected"),
    [(False, False, "ANYONE WHO REACHES"), (False, True, "ANYONE WHO REACHES"), (True, False, "IN THE CLEAR")],
)
async def test_a_router_that_others_reach_says_so(
    model: str, file: TenantsFile, caplog: pytest.LogCaptureFixture, has_tenants: bool, has_tls: bool, expected: str
) -> None:
    folder = written(file.path.parent / "certificates")
    config = replace(CONFIG, model=model, tenants=str(file.path) if has_tenants else "", host="0.0.0.0")
    if has_tls:
        shown = {"public_tls_cert": str(folder / "router.pem"), "public_tls_key": str(folder / "router.key")}
        config = replace(config, **shown)  # type: ignore[arg-type]
    cluster = Cluster(config)
    await cluster.router.start()
    (line,) = [each for each in caplog.records if expected in each.message]
    assert line.levelname == "WARNING"
    assert cluster.router.address in line.message
    assert ("in the clear" in line.message.lower()) is not has_tls
    await cluster.router.stop()


async def test_a_hangup_has_the_file_read_and_ends_no_router_that_starts(
    model: str, file: TenantsFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever has replaced the file does not know how far the router is."""
    asked, disposition = asyncio.Event(), signal.getsignal(signal.SIGHUP)
    monkeypatch.setattr(Gate, "reload_soon", lambda gate: asked.set())

    class Signalled(Router):
        def __init__(self, *args: Any) -> None:
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            super().__init__(*args)

        async def serve_until(self, stopping: asyncio.Event) -> None:
            assert callable(signal.getsignal(signal.SIGHUP)), "else the next line would end the tests"
            os.kill(os.getpid(), signal.SIGHUP)
            async with asyncio.timeout(HANG_S):
                await asked.wait()

    monkeypatch.setattr(main, "Router", Signalled)
    try:
        await main.serve(replace(CONFIG, model=model, tenants=str(file.path)), Lifecycle(drain_s=0.0))
    finally:
        asyncio.get_running_loop().remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, disposition)
