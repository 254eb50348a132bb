"""Tests ControlService.ListRecentRequests over real grpc.aio: what has ended, its lengths and times, and no text."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2
from tests.support.cluster import Cluster, code_of, read, request
from tests.support.scripted_worker import TEXT


async def recent(cluster: Cluster, **fields: Any) -> list[control_pb2.RecentRequest]:
    answer = await cluster.control.ListRecentRequests(control_pb2.ListRecentRequestsRequest(**fields))
    return list(answer.requests)


async def test_an_answer_and_a_refusal_are_remembered(cluster: Cluster, pair: Any) -> None:
    assert await recent(cluster) == []
    assert (await read(cluster.inference.GenerateStream(request(priority=3))))[1] == TEXT
    too_long = request()
    too_long.stopping.max_tokens = 1 << 30
    with pytest.raises(grpc.aio.AioRpcError):
        await read(cluster.inference.GenerateStream(too_long))
    answered, *others = await recent(cluster)
    assert answered.prompt_tokens > 0
    assert answered.output_tokens > 0
    assert 0 < answered.ttft_us <= answered.total_us <= answered.age_us
    assert (answered.priority, answered.failed) == (3, False)
    assert all(other.failed for other in others)
    assert {field.name for field in answered.DESCRIPTOR.fields if field.type in (9, 12)} == set(), "no text, no bytes"


async def test_only_those_within_the_time_asked_for(cluster: Cluster, pair: Any) -> None:
    await read(cluster.inference.GenerateStream(request()))
    assert len(await recent(cluster, within_ms=60_000)) == 1
    assert await recent(cluster, within_ms=0) == []
    assert len(await recent(cluster, within_ms=(1 << 63) - 1)) == 1


@pytest.mark.parametrize(
    ("fields", "code"),
    [({"within_ms": -1}, grpc.StatusCode.INVALID_ARGUMENT), ({"model": "nobody"}, grpc.StatusCode.NOT_FOUND)],
)
async def test_what_makes_no_sense_is_refused(cluster: Cluster, fields: dict[str, Any], code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await recent(cluster, **fields)
    assert code_of(refused.value) is code
