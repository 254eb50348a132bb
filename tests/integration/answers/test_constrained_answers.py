"""Tests answers with constraints in a whole cluster: split is unsplit, batched or alone, and after a preemption; and
what is refused, by name."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2, types_pb2
from tests.support.cluster import Answer, Cluster, running_cluster
from tests.support.models import tiny_model
from tests.support.workers import DECODE, PREFILL

CODE = "[a-d]{4,30}(-[0-9]{1,3}){2,4}"
CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["town", "city"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
CONSTRAINTS = {
    "json_schema": types_pb2.Constraint(json_schema=json.dumps(CITY)),
    "regex": types_pb2.Constraint(regex=CODE),
    "choices": types_pb2.Constraint(choices=types_pb2.Choices(texts=["north by northwest", "south", "a|b (c)"])),
    "grammar": types_pb2.Constraint(grammar='root ::= "(" [xyz]+ tail\ntail ::= ")" | ", " root'),
}
PROMPTS = [[5 + (7 * at + 11 * which) % 300 for at in range(20 + 9 * which)] for which in range(6)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("constrained"))


def request(prompt: list[int], kind: str, seed: int | None = None) -> inference_pb2.GenerateRequest:
    sampling = types_pb2.SamplingParams(temperature=0.0)
    if seed is not None:
        sampling = types_pb2.SamplingParams(temperature=0.9, seed=seed, top_p=0.95, presence_penalty=0.3)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=sampling,
        stopping=types_pb2.StoppingParams(max_tokens=90),
        constraint=CONSTRAINTS[kind],
    )


def requests() -> list[inference_pb2.GenerateRequest]:
    return [
        request(prompt, kind, seed)
        for kind in CONSTRAINTS
        for prompt, seed in zip(PROMPTS, (None, None, None, 1, 2, 3), strict=True)
    ]


def check(kind: str, answer: Answer) -> bool:
    """Asserts that the answer is what was asked for; returns whether it is whole."""
    assert answer.completion is not None
    if answer.completion.finish_reason != types_pb2.FINISH_REASON_STOP:
        return False
    match kind:
        case "json_schema":
            city = json.loads(answer.text)
            assert city.keys() == CITY["properties"].keys()  # type: ignore[attr-defined]
            assert city["kind"] in ("town", "city")
            assert 0 <= city["size"] <= 99
            assert len(city["name"]) <= 12
        case "regex":
            assert re.fullmatch(CODE, answer.text)
        case "choices":
            assert answer.text in CONSTRAINTS["choices"].choices.texts
        case _:
            assert re.fullmatch(r"(\([xyz]+, )*\([xyz]+\)", answer.text)
    return True


async def all_of(cluster: Cluster) -> list[Answer]:
    return await asyncio.gather(*(cluster.stream(each) for each in requests()))


async def test_split_is_unsplit_and_valid(model: Path) -> None:
    async with running_cluster(model, [PREFILL, DECODE], kv_blocks=400) as cluster:
        split = await all_of(cluster)
        alone = [await cluster.stream(each) for each in requests()[::5]]
    async with running_cluster(model, [DECODE], kv_blocks=400) as cluster:
        unsplit = await all_of(cluster)
    # Random weights whose logits are far apart in float32: there are no ties that a batch could decide otherwise.
    assert [each.token_ids for each in split] == [each.token_ids for each in unsplit]
    assert [each.token_ids for each in alone] == [each.token_ids for each in split[::5]]
    kinds = [each.constraint.WhichOneof("kind") for each in requests()]
    whole = [check(str(kind), answer) for kind, answer in zip(kinds, split, strict=True)]
    assert sum(whole) >= 0.8 * len(whole)


async def test_after_preemption(model: Path) -> None:
    """The pool is too small for all: victims recompute, and their constraints go on where they were."""
    async with running_cluster(model, [PREFILL, DECODE], each=[{"kv_blocks": 400}, {"kv_blocks": 30}]) as cluster:
        found = await asyncio.gather(*(cluster.stream(each) for each in requests()[:12]))
        assert cluster.workers[1].engine.stats().num_preemptions > 0
    async with running_cluster(model, [DECODE], kv_blocks=400) as cluster:
        expected = await asyncio.gather(*(cluster.stream(each) for each in requests()[:12]))
    assert [each.token_ids for each in found] == [each.token_ids for each in expected]


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (types_pb2.Constraint(regex="(a|b"), "constraint.regex"),
        (
            types_pb2.Constraint(json_schema='{"type": "object", "unevaluatedProperties": false}'),
            "constraint.json_schema",
        ),
        (types_pb2.Constraint(grammar="start: nothing"), "constraint.grammar"),
    ],
)
async def test_what_is_no_constraint_is_an_invalid_argument(
    model: Path, constraint: types_pb2.Constraint, field: str
) -> None:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        asked = request(PROMPTS[0], "regex")
        asked.constraint.CopyFrom(constraint)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stream(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert field in str(caught.value.details())


async def test_an_output_that_cannot_end_is_an_invalid_argument_and_no_worker_s_fault(model: Path) -> None:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        asked = request(PROMPTS[0], "choices")
        asked.stopping.ignore_eos = True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stream(asked)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "ignore_eos" in str(caught.value.details())
        assert (await cluster.stream(request(PROMPTS[0], "choices"))).completion is not None
