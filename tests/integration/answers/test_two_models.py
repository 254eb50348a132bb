"""Tests two models behind one router, the second brought by its workers: each is split, and each answers as it does
alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from baton.v1 import inference_pb2
from services.cli.status import text
from services.rpc.plain import plain
from tests.support.cluster import Answer, Cluster, greedy_request, receive, running_cluster
from tests.support.http_client import HTTP, address
from tests.support.models import tiny_model
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMES = ("tiny-llama", "tiny-qwen2")
PROMPT = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("two")
    return {name: tiny_model(name.removeprefix("tiny-"), folder) for name in NAMES}


async def alone(model: Path) -> list[int]:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        return (await cluster.greedy(PROMPT, 12)).token_ids


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def expected(models: dict[str, Path]) -> dict[str, list[int]]:
    return {name: await alone(model) for name, model in models.items()}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(models: dict[str, Path]) -> Any:
    own, other = NAMES
    each = [{}, {}, *[{"model": str(models[other]), "served_model_name": other}] * 2]
    async with running_cluster(models[own], [PREFILL, DECODE, PREFILL, DECODE], router=HTTP, each=each) as cluster:
        yield cluster


async def ask(cluster: Cluster, **fields: Any) -> Answer:
    return await receive(cluster.inference.GenerateStream(greedy_request(PROMPT, 12, **fields)))


@pytest.mark.parametrize("name", [*NAMES, None])
async def test_grpc(cluster: Cluster, expected: dict[str, list[int]], name: str | None) -> None:
    assert expected[NAMES[0]] != expected[NAMES[1]], "the models must differ for the test to say anything"
    answer = await ask(cluster, **({} if name is None else {"model": name}))
    assert answer.token_ids == expected[name or NAMES[0]]
    assert answer.prompt_info is not None
    assert answer.prompt_info.model == (name or NAMES[0])
    assert answer.prompt_info.prefill_worker == ("w2" if name == NAMES[1] else "w0")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_http_answers_as_grpc_does(cluster: Cluster, name: str, path: str) -> None:
    body: dict[str, Any] = {"model": name, "max_tokens": 12, "temperature": 0, "logprobs": path == "chat/completions"}
    request = inference_pb2.GenerateRequest(model=name)
    request.sampling.temperature, request.stopping.max_tokens = 0.0, 12
    if path == "completions":
        body |= {"prompt": "The baton is passed", "logprobs": 1}
        request.text = "The baton is passed"
    else:
        body["messages"] = [{"role": "user", "content": "What is a lease?"}]
        request.messages.messages.add(role="user", content="What is a lease?")
    over_grpc = await receive(cluster.inference.GenerateStream(request))
    async with httpx2.AsyncClient(trust_env=False) as client:
        answer = (await client.post(f"{address(cluster)}/v1/{path}", json=body, timeout=30.0)).json()
    choice = answer["choices"][0]
    assert answer["model"] == name
    assert (choice["text"] if path == "completions" else choice["message"]["content"]) == over_grpc.text
    assert choice["logprobs"], "its tokens as texts come from its own tokenizer"


async def test_both_are_listed(cluster: Cluster, models: dict[str, Path]) -> None:
    listed = (await cluster.inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert [(model.id, model.ready) for model in listed] == [(name, True) for name in NAMES]
    async with httpx2.AsyncClient(trust_env=False) as client:
        page = (await client.get(f"{address(cluster)}/v1/models")).json()
        one = (await client.get(f"{address(cluster)}/v1/models/{NAMES[1]}")).json()
        missing = await client.get(f"{address(cluster)}/v1/models/none")
        refused = await client.post(f"{address(cluster)}/v1/completions", json={"model": "none", "prompt": "x"})
        metrics = (await client.get(f"{address(cluster)}/metrics")).text
    assert [model["id"] for model in page["data"]] == list(NAMES)
    assert one == page["data"][1]
    assert one["max_model_len"] == listed[1].max_model_len
    assert (missing.status_code, refused.status_code) == (404, 404)
    assert all(name in refused.json()["error"]["message"] for name in NAMES), "it says which are served"
    for name in NAMES:
        assert f'baton_model_ready{{model="{name}"}} 1.0' in metrics
        assert f'vllm:num_requests_waiting{{model_name="{name}"}} 0.0' in metrics


async def test_the_status_tells_them_apart(cluster: Cluster) -> None:
    status = await cluster.status()
    assert [(model.model_id, model.ready, model.num_workers) for model in status.models] == [
        (name, True, 2) for name in NAMES
    ]
    assert {(pair.prefill, pair.decode) for pair in status.pairs} == {("w0", "w1"), ("w2", "w3")}
    shown = text("there", plain(status))
    assert "models tiny-llama, tiny-qwen2" in shown
    assert "cannot pair" not in shown, "workers of different models are not expected to"
    for name, workers in zip(NAMES, (("w0", "w1"), ("w2", "w3")), strict=True):
        for worker in workers:
            assert any(line.split()[:2] == [worker, name] for line in shown.splitlines())
