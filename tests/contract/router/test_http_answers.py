"""Tests what every HTTP answer of a router has, whatever it answers, and its small endpoints."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from importlib.metadata import version
from typing import Any

import httpx2
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_plain_text

from baton.v1 import control_pb2
from tests.support.cluster import CONFIG, Cluster
from tests.support.scripted_worker import MODEL_ID
from tests.support.tenants import http_client

APP = "https://app.example"
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GOOD = b'{"prompt": "hi", "max_tokens": 2, "stream": true}'
JSON = {"content-type": "application/json"}
PROMETHEUS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.fixture
async def cluster(model: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(
        replace(CONFIG, model=model, http_port=0, http_cors_origin=(APP,), http_allowed_host=("localhost",))
    )
    await cluster.start()
    yield cluster
    await cluster.idle()
    await cluster.stop()


@pytest.fixture
async def http(cluster: Cluster, pair: Any) -> AsyncIterator[httpx2.AsyncClient]:
    async with http_client(cluster) as http:
        yield http


ASKED: list[tuple[str, str, dict[str, str], bytes, int]] = [
    ("GET", "/health", {}, b"", 200),
    ("HEAD", "/health", {}, b"", 200),
    ("GET", "/health/live", {}, b"", 200),
    ("GET", "/ping", {}, b"", 200),
    ("GET", "/version", {}, b"", 200),
    ("GET", "/v1/models", {}, b"", 200),
    ("GET", "/v1/models/none", {}, b"", 404),
    ("GET", "/metrics", {}, b"", 200),
    ("GET", "/none", {}, b"", 404),
    ("GET", COMPLETIONS, {}, b"", 405),
    ("GET", "/v1/models", {"host": "evil.example"}, b"", 403),
    ("POST", COMPLETIONS, JSON, GOOD, 200),
    ("POST", COMPLETIONS, JSON, b"{", 400),
    ("POST", CHAT, JSON, b"{}", 400),
    ("POST", CHAT, {}, b"{}", 415),
    ("POST", "/v1/responses", JSON, b"[]", 400),
    ("POST", "/tokenize", JSON, b'{"prompt": "hi"}', 200),
    ("POST", "/detokenize", JSON, b"x", 400),
    ("GET", "/v1/models", {"x-padding": "x" * 70_000}, b"", 431),
]


@pytest.mark.parametrize(
    ("method", "path", "headers", "body", "status"), ASKED, ids=[f"{each[0]} {each[1]} {each[4]}" for each in ASKED]
)
async def test_every_answer_has_the_requests_id_and_can_be_read_by_a_page(
    http: httpx2.AsyncClient, method: str, path: str, headers: dict[str, str], body: bytes, status: int
) -> None:
    answer = await http.request(
        method, path, content=body, headers={"x-request-id": "mine-1", "origin": APP, **headers}
    )
    assert answer.status_code == status, answer.text
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert answer.headers["access-control-allow-origin"] == APP
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    nameless = await http.request(method, path, content=body, headers=headers)
    assert nameless.headers["x-request-id"].startswith("req-")
    if path == COMPLETIONS and status == 200:
        assert nameless.headers["x-request-id"] in nameless.text


@pytest.mark.parametrize("path", [each[1] for each in ASKED])
async def test_a_page_may_ask_first(http: httpx2.AsyncClient, path: str) -> None:
    asked = {"origin": APP, "access-control-request-method": "POST", "access-control-request-private-network": "true"}
    asked["access-control-request-headers"] = "authorization,content-type,x-request-id"
    answer = await http.options(path, headers=asked)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
    assert answer.headers["access-control-allow-headers"] == asked["access-control-request-headers"]
    assert answer.headers["access-control-allow-private-network"] == "true"
    assert answer.headers["x-request-id"]
    other = await http.options(path, headers={**asked, "origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize(
    ("given", "told"), [(b"a\x9bb", "a%9Bb"), (b"\xc3\xa9", "%C3%A9"), (b"a b~", "a b~"), (b"?", "?"), (b"", "")]
)
@pytest.mark.parametrize("path", ["/health", "/none", COMPLETIONS])
async def test_ids_that_cannot_stand_in_a_header_or_a_log(
    http: httpx2.AsyncClient, path: str, given: bytes, told: str
) -> None:
    answer = await http.get(path, headers=[(b"x-request-id", given)])
    seen = answer.headers["x-request-id"]
    assert seen == told if told else seen.startswith("req-")


async def test_small_endpoints(http: httpx2.AsyncClient) -> None:
    assert (await http.get("/version")).json() == {"version": version("baton-serving")}
    assert (await http.get("/ping")).status_code == 200
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert model["root"] == model["id"] == MODEL_ID


async def test_health_names_the_parts_of_the_cluster(cluster: Cluster, http: httpx2.AsyncClient) -> None:
    answer = await http.get("/health")
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ready",
        "components": {name: {"status": "ok"} for name in ("router", "prefill", "decode", "pairs", "queue", "kv")},
    }
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    assert {each.name for each in status.components} == set(answer.json()["components"])


async def test_metrics_in_both_formats(http: httpx2.AsyncClient) -> None:
    assert (await http.post(COMPLETIONS, content=GOOD, headers=JSON)).status_code == 200
    strict = await http.get("/metrics", headers={"accept": PROMETHEUS})
    assert strict.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in parse_openmetrics(strict.text)}
    assert {"vllm:num_requests_running", "vllm:generation_tokens", "vllm:e2e_request_latency_seconds"} <= set(families)
    for family in families.values():
        assert all(sample.name.startswith(family.name) for sample in family.samples)
    assert "vllm:generation_tokens_total" in {sample.name for sample in families["vllm:generation_tokens"].samples}
    plain = await http.get("/metrics", headers={"accept": "text/plain"})
    assert plain.headers["content-type"].startswith("text/plain; version=0.0.4")
    told = {sample.name for family in parse_plain_text(plain.text) for sample in family.samples}
    assert told >= {sample.name for family in families.values() for sample in family.samples if family.samples}
