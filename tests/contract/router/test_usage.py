"""Tests what tenants' requests are counted as at a running router, over both fronts, however they end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from prometheus_client.parser import text_string_to_metric_families

from baton.v1 import types_pb2
from services.rpc.names import Attr, Span
from tests.support.cluster import Cluster, read, request
from tests.support.scripted_worker import MODEL_ID, OUTPUT, TOKENIZER
from tests.support.tenants import TenantsFile, http_client, serving

NUM_PROMPT = len(TOKENIZER.encode("hello").ids)
NUM_CACHED = 3  # as scripted workers say
PRICE = {"prompt": 1000.0, "cached": 100.0, "output": 10.0}
BODY = {"prompt": "hello", "max_tokens": 4}
COMPLETIONS = "/v1/completions"
_LABELS = ("tenant", "model", "outcome", "kind")


def cost_of(num_output: int) -> float:
    return (NUM_PROMPT - NUM_CACHED) * 1.0 + NUM_CACHED * 0.1 + num_output * 0.01


@pytest.fixture
def file(tmp_path: Path) -> TenantsFile:
    file = TenantsFile(tmp_path)
    file.write(
        acme={"price": PRICE},
        narrow={"models": ["another"]},
        slow={"limits": {"requests_per_s": 0.1, "burst_requests": 1}},
    )
    return file


@pytest.fixture
async def cluster(model: str, file: TenantsFile) -> AsyncIterator[Cluster]:
    log = str(file.path.with_name("usage.jsonl"))
    async with serving(model, file, usage_log=log, metrics_port=0) as cluster:
        yield cluster


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(cluster) as http:
        yield http


async def scraped(cluster: Cluster) -> dict[tuple[str, ...], float]:
    """Returns the samples of tenants, by their metric and the values of its labels: tenant, model, and what else."""
    async with httpx2.AsyncClient(trust_env=False) as http:
        reply = await http.get(f"http://127.0.0.1:{cluster.router.metrics_port}/metrics")
    samples = {}
    for family in text_string_to_metric_families(reply.text):
        name = family.name.removeprefix("baton_tenant_")
        if name == family.name:
            continue
        for sample in family.samples:
            if sample.name.endswith("_total"):
                labels = [
                    sample.labels[each] for each in ("tenant", "model", "outcome", "kind") if each in sample.labels
                ]
                samples[(name, *labels)] = sample.value
    return samples


async def has_cancelled(cluster: Cluster, number: int) -> bool:
    return (await scraped(cluster)).get(("requests", "acme", MODEL_ID, "cancelled")) == number


def tokens(samples: dict[tuple[str, ...], float], tenant: str) -> tuple[float, ...]:
    return tuple(samples[("tokens", tenant, MODEL_ID, kind)] for kind in ("prompt", "cached", "output"))


def root(cluster: Cluster) -> dict[str, Any]:
    """Returns the attributes of the newest root span."""
    return dict([span for span in cluster.spans.get_finished_spans() if span.name == Span.REQUEST][-1].attributes or {})


async def test_requests_of_both_fronts(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    stopping = types_pb2.StoppingParams(max_tokens=4)
    answer = await cluster.inference.Generate(request(stopping=stopping), metadata=file.metadata("acme"))
    told = answer.completion.usage
    assert (told.prompt_tokens, told.cached_tokens, told.output_tokens) == (NUM_PROMPT, NUM_CACHED, 4)
    attributes = root(cluster)
    assert (attributes[Attr.INPUT_TOKENS], attributes[Attr.CACHE_READ_INPUT_TOKENS]) == (NUM_PROMPT, NUM_CACHED)
    assert (attributes[Attr.OUTPUT_TOKENS], attributes[Attr.TENANT]) == (4, "acme")
    assert attributes[Attr.REQUEST_COST] == pytest.approx(cost_of(4))
    body = BODY | {"prompt": ["hello", "hello"]}
    assert (await http.post(COMPLETIONS, json=body, headers=file.headers("acme"))).status_code == 200
    samples = await scraped(cluster)
    assert samples[("requests", "acme", MODEL_ID, "length")] == 3, "each prompt is one"
    assert tokens(samples, "acme") == (3 * NUM_PROMPT, 3 * NUM_CACHED, 3 * 4)
    assert samples[("cost", "acme", MODEL_ID)] == pytest.approx(3 * cost_of(4))


async def test_the_usage_log_has_each_request_of_both_fronts(
    cluster: Cluster, pair: Any, http: Any, file: TenantsFile
) -> None:
    asked = request(request_id="by-grpc", stopping=types_pb2.StoppingParams(max_tokens=4))
    await cluster.inference.Generate(asked, metadata=file.metadata("acme"))
    headers = file.headers("acme") | {"x-request-id": "by-http"}
    assert (await http.post(COMPLETIONS, json=BODY, headers=headers)).status_code == 200
    headers = file.headers("narrow") | {"x-request-id": "refused"}
    assert (await http.post(COMPLETIONS, json=BODY, headers=headers)).status_code == 403
    path = file.path.with_name("usage.jsonl")

    async def is_written() -> bool:
        return path.read_text().count("\n") == 3

    await cluster.until(is_written)
    entries = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({entry["id"] for entry in entries}) == 3
    assert [(entry["request_id"], entry["tenant"], entry["model"], entry["outcome"]) for entry in entries] == [
        ("by-grpc", "acme", MODEL_ID, "length"),
        ("by-http", "acme", MODEL_ID, "length"),
        ("refused", "narrow", "", "model_not_allowed"),
    ]
    for entry in entries[:2]:
        assert (entry["prompt_tokens"], entry["cached_tokens"], entry["output_tokens"]) == (NUM_PROMPT, NUM_CACHED, 4)
        assert entry["cost"] == pytest.approx(cost_of(4))
    assert entries[2]["cost"] == entries[2]["prompt_tokens"] == 0


async def test_refusals_by_reason(cluster: Cluster, pair: Any, http: Any, file: TenantsFile) -> None:
    """They are counted once each, wherever they are found out, and cost nothing."""
    for _ in range(2):
        with pytest.raises(grpc.aio.AioRpcError):
            await cluster.inference.Generate(request(), metadata=file.metadata("narrow"))
    for body in (BODY, b"{"):
        content = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = file.headers("narrow") | {"content-type": "application/json"}
        assert (await http.post(COMPLETIONS, headers=headers, **content)).status_code in (400, 403)
    await cluster.inference.Generate(request(), metadata=file.metadata("slow"))
    with pytest.raises(grpc.aio.AioRpcError):
        await cluster.inference.Generate(request(), metadata=file.metadata("slow"))
    assert (await http.post(COMPLETIONS, json=BODY, headers=file.headers("slow"))).status_code == 429
    assert (await http.post(COMPLETIONS, json=BODY)).status_code == 401
    requests = {key[1:]: value for key, value in (await scraped(cluster)).items() if key[0] == "requests"}
    assert requests == {
        ("narrow", "", "model_not_allowed"): 3,
        ("narrow", "", "malformed_message"): 1,
        ("slow", MODEL_ID, "stop"): 1,
        ("slow", MODEL_ID, "quota_exceeded"): 1,
        ("slow", "", "quota_exceeded"): 1,
    }, "and a stranger is nobody's"


async def test_a_request_that_is_cancelled_is_charged_what_it_had(
    cluster: Cluster, pair: Any, file: TenantsFile
) -> None:
    """One that no worker has begun is charged nothing."""
    pair[1].decode_gate.clear()
    call = cluster.inference.GenerateStream(request(), metadata=file.metadata("acme"))
    async for event in call:
        if event.HasField("chunk"):
            break
    call.cancel()
    await cluster.idle()
    pair[1].decode_gate.set()

    await cluster.until(lambda: has_cancelled(cluster, 1))
    samples = await scraped(cluster)
    prompt, cached, num_output = tokens(samples, "acme")
    assert (prompt, cached) == (NUM_PROMPT, NUM_CACHED)
    assert 1 <= num_output <= 2
    assert samples[("cost", "acme", MODEL_ID)] == pytest.approx(cost_of(int(num_output)))
    attributes = root(cluster)
    assert (attributes[Attr.OUTPUT_TOKENS], attributes[Attr.CACHE_READ_INPUT_TOKENS]) == (num_output, cached)
    assert attributes[Attr.REQUEST_COST] == pytest.approx(cost_of(int(num_output)))
    pair[0].prefill_gate.clear()
    waiting = cluster.inference.Generate(request(), metadata=file.metadata("acme"))
    await cluster.until(lambda: asyncio.sleep(0, len(pair[0].commands) == 2))
    waiting.cancel()
    await cluster.until(lambda: has_cancelled(cluster, 2))
    pair[0].prefill_gate.set()
    assert tokens(await scraped(cluster), "acme") == (prompt, cached, num_output)


async def test_a_replayed_request_is_charged_once(cluster: Cluster, pair: Any, file: TenantsFile) -> None:
    _, decode = pair
    decode.decode_gate.clear()
    call = cluster.inference.GenerateStream(request(), metadata=file.metadata("acme"))
    await decode.until(lambda: decode.commands)
    await cluster.add("decode", worker_id="other")
    decode.cut()
    events, _ = await read(call)
    usage = events[-1].completion.usage
    assert events[-1].completion.workers.retries == 1
    samples = await scraped(cluster)
    assert samples[("requests", "acme", MODEL_ID, "stop")] == 1
    assert tokens(samples, "acme") == (usage.prompt_tokens, usage.cached_tokens, usage.output_tokens)
    assert (usage.prompt_tokens, usage.output_tokens) == (NUM_PROMPT, len(OUTPUT) + 1)
