"""Tests what a running router's request log has of requests of both fronts: never more text than operator and tenant
allow, and the same ids as the usage log."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from baton.v1 import inference_pb2, types_pb2
from tests.support.cluster import Cluster, request
from tests.support.scripted_worker import MODEL_ID
from tests.support.tenants import TenantsFile, http_client, serving

COMPLETIONS = "/v1/completions"
HOSTILE = '\n\u2028\x00"}'
SECRET = "hello"


@contextlib.asynccontextmanager
async def logging_router(model: str, folder: Path, **config: Any) -> AsyncIterator[tuple[Cluster, TenantsFile]]:
    """Yields a router with a request log and a usage log, and with two workers."""
    file = TenantsFile(folder)
    file.write(acme={}, quiet={"log_prompts": False}, narrow={"models": ["another"]})
    logs = {"request_log": str(folder / "requests.jsonl"), "usage_log": str(folder / "usage.jsonl")}
    async with serving(model, file, **logs, **config) as cluster:
        for role in ("prefill", "decode"):
            await cluster.add(role)
        yield cluster, file


def entries(folder: Path, name: str = "requests") -> list[dict[str, Any]]:
    """Returns the lines of a log whose router has stopped."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


async def ask_both(cluster: Cluster, file: TenantsFile, tenant: str, text: str = SECRET) -> None:
    asked = request(request_id="by-grpc", text=text, stopping=types_pb2.StoppingParams(max_tokens=4), priority=3)
    await cluster.inference.Generate(asked, metadata=file.metadata(tenant))
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, "stream": True}
    async with http_client(cluster) as http:
        reply = await http.post("/v1/chat/completions", json=body, headers=file.headers(tenant))
    assert reply.status_code == 200, reply.text


async def test_a_line_says_how_a_request_went_over_either_front(model: str, tmp_path: Path) -> None:
    async with logging_router(model, tmp_path) as (cluster, file):
        await ask_both(cluster, file, "acme")
    by_grpc, by_http = entries(tmp_path)
    assert (by_grpc["front"], by_grpc["stream"], by_grpc["priority"]) == ("grpc", False, 3)
    assert (by_http["front"], by_http["stream"], by_http["priority"]) == ("http", True, 0)
    for entry in (by_grpc, by_http):
        assert (entry["tenant"], entry["model"], entry["outcome"]) == ("acme", MODEL_ID, "length")
        assert (entry["prefill_worker"], entry["decode_worker"]) == ("prefill", "decode")
        assert (entry["output_tokens"], entry["max_tokens"], entry["retries"]) == (4, 4, 0)
        assert 0 <= entry["queue_s"] <= entry["ttft_s"] <= entry["duration_s"]
        assert 0 <= entry["itl_mean_s"] <= entry["itl_max_s"]
        assert len(entry["trace_id"]) == 32
    assert "hello" not in (tmp_path / "requests.jsonl").read_text()
    assert [entry["id"] for entry in entries(tmp_path, "usage")] == [by_grpc["id"], by_http["id"]]


@pytest.mark.parametrize("tenant", ["acme", "quiet"])
@pytest.mark.parametrize("chars", [0, 3, 65_536])
@pytest.mark.parametrize("log_prompts", [False, True])
async def test_texts_are_there_only_if_operator_and_tenant_allow_it(
    model: str, tmp_path: Path, tenant: str, chars: int, log_prompts: bool
) -> None:
    """`--log-prompts`, which is for the log and the console, adds none, and takes none away."""
    flags = {"request_log_text_chars": chars, "log_prompts": log_prompts}
    async with logging_router(model, tmp_path, **flags) as (cluster, file):
        await ask_both(cluster, file, tenant, SECRET + HOSTILE)
        shown = [each.output for each in cluster.router._inference._intake._timelines.changed_since(0, 9)]
    by_grpc, by_http = entries(tmp_path)
    if tenant == "quiet" or not chars:
        assert not {"prompt", "answer"} & (by_grpc.keys() | by_http.keys())
        assert "hello" not in (tmp_path / "requests.jsonl").read_text()
    else:
        text = (SECRET + HOSTILE)[:chars]
        assert by_grpc["prompt"] == text
        assert by_http["prompt"] == [{"role": "user", "content": text}]
        assert 0 < len(by_grpc["answer"]) <= chars
    assert all(bool(output) == (log_prompts and tenant == "acme") for output in shown), "the console has its own rule"


async def test_refusals_say_what_the_client_was_told(model: str, tmp_path: Path) -> None:
    async with (
        logging_router(model, tmp_path, request_log_text_chars=100) as (cluster, file),
        http_client(cluster) as http,
    ):
        reply = await http.post(COMPLETIONS, json={"prompt": SECRET}, headers=file.headers("narrow"))
        assert reply.status_code == 403
        body = {"prompt": SECRET, "max_tokens": 10**9}
        assert (await http.post(COMPLETIONS, json=body, headers=file.headers("acme"))).status_code == 400
        with contextlib.suppress(Exception):
            await cluster.inference.Generate(inference_pb2.GenerateRequest(), metadata=file.metadata("acme"))
        assert (await http.post(COMPLETIONS, json={"prompt": SECRET})).status_code == 401
    denied, too_long, empty = entries(tmp_path)
    assert (denied["tenant"], denied["outcome"], denied["front"]) == ("narrow", "model_not_allowed", "http")
    assert "does not have access" in denied["error"]
    assert (too_long["outcome"], too_long["model"]) == ("context_length_exceeded", MODEL_ID)
    assert "max_tokens" in too_long["error"]
    assert (empty["front"], empty["outcome"]) == ("grpc", "invalid_parameter")
