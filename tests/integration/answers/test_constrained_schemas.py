"""Tests answers under drawn JSON Schemas in a running cluster, split and unsplit, over gRPC and HTTP: each that ends by
itself validates, and nearly all do."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from baton.v1 import inference_pb2, types_pb2
from baton_client import json_schema
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL
from tests.support.cluster import Cluster, running_cluster
from tests.support.examples import num_examples
from tests.support.http_client import HTTP, bare_client
from tests.support.models import tiny_model
from tests.support.schemas import drawn, schemas
from tests.support.workers import DECODE, MIXED, PREFILL

PROMPT = "Answer with a JSON document of the kind that was described."
SPLIT, UNSPLIT = [PREFILL, DECODE], [MIXED]
MOST_TOKENS = 400
ENOUGH = 0.8
"""The least share of answers that end by themselves."""

Found = tuple[str, bool]
"""An answer's text, and whether it ended by itself."""


def asked(seed: int) -> dict[str, Any]:
    """Returns what both fronts are asked for: an answer drawn from the model's whole distribution, or its likeliest."""
    return {"temperature": 1.0 if seed % 2 else 0.0, "seed": seed, "max_tokens": MOST_TOKENS}


async def over_grpc(cluster: Cluster, schema: dict[str, Any], seed: int) -> Found:
    wanted = asked(seed)
    request = inference_pb2.GenerateRequest(text=PROMPT, constraint=json_schema(schema))
    request.sampling.temperature, request.sampling.seed = wanted["temperature"], seed
    request.stopping.max_tokens = wanted["max_tokens"]
    answer = await cluster.stream(request)
    assert answer.completion is not None
    return answer.text, answer.completion.finish_reason == types_pb2.FINISH_REASON_STOP


async def over_http(cluster: Cluster, schema: dict[str, Any], seed: int) -> Found:
    format_ = {"type": "json_schema", "json_schema": {"name": "drawn", "schema": schema, "strict": True}}
    async with bare_client(cluster) as client:
        body = {"prompt": PROMPT, "response_format": format_, **asked(seed)}
        response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], choice["finish_reason"] == "stop"


async def answers(cluster: Cluster, wanted: Sequence[dict[str, Any]]) -> list[Found]:
    """Returns an answer for each schema; every other one over HTTP."""
    turns = asyncio.Semaphore(16)

    async def answer(seed: int, schema: dict[str, Any]) -> Found:
        async with turns:
            return await (over_http if seed % 4 > 1 else over_grpc)(cluster, schema, seed)

    return await asyncio.gather(*(answer(seed, schema) for seed, schema in enumerate(wanted)))


def check(wanted: Sequence[dict[str, Any]], found: Sequence[Found]) -> None:
    for schema, (text, ended) in zip(wanted, found, strict=True):
        if ended:
            Draft202012Validator(schema).validate(json.loads(text))
    num_ended = sum(ended for _, ended in found)
    assert num_ended >= ENOUGH * len(found), f"{num_ended} of {len(found)} ended by themselves"


async def test_a_random_model_split_and_unsplit(tmp_path: Path) -> None:
    model, wanted = tiny_model("llama", tmp_path), drawn(schemas(short=True), num_examples(120), seed=1)
    async with running_cluster(model, SPLIT, router=HTTP, kv_blocks=1000) as cluster:
        split = await answers(cluster, wanted)
        await cluster.idle()
    async with running_cluster(model, UNSPLIT, router=HTTP, kv_blocks=1000) as cluster:
        unsplit = await answers(cluster, wanted)
        await cluster.idle()
    check(wanted, split)
    assert unsplit == split, "there are no ties between random logits that are far apart"


@pytest.mark.default_model
@pytest.mark.parametrize("workers", [SPLIT, pytest.param(UNSPLIT, marks=pytest.mark.long)])
async def test_the_default_model(workers: Any) -> None:
    """Its answers are not compared: near ties in bfloat16 are decided by how sequences are batched."""
    wanted = drawn(schemas(short=True), num_examples(48), seed=2)
    async with running_cluster(
        resolve_model(DEFAULT_MODEL).path, workers, router={**HTTP, "silence_s": 60.0}
    ) as cluster:
        found = await answers(cluster, wanted)
        await cluster.idle()
    check(wanted, found)
