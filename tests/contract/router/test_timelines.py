"""Tests ControlService.ListTimelines over real grpc.aio: where requests spend their time, live and ended."""

from __future__ import annotations

import dataclasses
from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2
from tests.support.cluster import CONFIG, Cluster, code_of, read, request
from tests.support.scripted_worker import TEXT

Phase = control_pb2.RequestPhase


async def timelines(cluster: Cluster, **fields: Any) -> control_pb2.ListTimelinesResponse:
    answer: control_pb2.ListTimelinesResponse = await cluster.control.ListTimelines(
        control_pb2.ListTimelinesRequest(**fields)
    )
    return answer


async def test_an_answered_request_has_its_stages_and_times(cluster: Cluster, pair: Any) -> None:
    prefill, decode = pair
    assert (await read(cluster.inference.GenerateStream(request(request_id="r", priority=2))))[1] == TEXT
    answer = await timelines(cluster)
    (found,) = answer.timelines
    assert (found.request_id, found.phase, found.outcome) == ("r", Phase.REQUEST_PHASE_ENDED, "stop")
    assert (found.prefill_worker, found.decode_worker) == (prefill.worker_id, decode.worker_id)
    assert (found.priority, found.prompt, found.failure, found.num_retries) == (2, "", "", 0)
    assert found.prompt_tokens > 0
    assert found.output_tokens > 1
    assert 0 < found.ttft_us <= found.total_us <= found.age_us
    assert found.tpot_us <= found.longest_itl_us
    assert found.timings.ttft_ms == pytest.approx(found.ttft_us / 1000, abs=50)
    names = [stage.name for stage in found.stages]
    assert names[:3] == ["tokenize", "queue", "prefill"]
    assert {"place", "decode"} < set(names)
    for stage in found.stages:
        assert 0 <= stage.start_us <= stage.end_us <= found.age_us
        assert stage.outcome
        assert bool(stage.leg) == (stage.name in ("prefill", "decode"))
    assert answer.objectives.ttft_ms > 0
    assert (
        answer.router_incarnation
        == (await cluster.control.GetStatus(control_pb2.GetStatusRequest())).router_incarnation
    )


async def test_a_request_that_waits_says_for_what(cluster: Cluster) -> None:
    await cluster.add("prefill")
    call = cluster.inference.GenerateStream(request(request_id="waits"))

    async def queued() -> bool:
        found = (await timelines(cluster)).timelines
        return bool(found) and bool(found[0].stages) and found[0].stages[-1].name == "queue"

    await cluster.until(queued)
    (found,) = (await timelines(cluster)).timelines
    assert (found.phase, found.outcome) == (Phase.REQUEST_PHASE_QUEUED, "")
    assert not found.HasField("total_us")
    assert not found.HasField("ttft_us")
    assert not found.stages[-1].HasField("end_us")
    call.cancel()

    async def ended() -> bool:
        return (await timelines(cluster)).timelines[0].phase == Phase.REQUEST_PHASE_ENDED

    await cluster.until(ended)
    (found,) = (await timelines(cluster)).timelines
    assert found.outcome == "cancelled"
    assert all(stage.HasField("end_us") for stage in found.stages)


async def test_only_what_has_changed_since(cluster: Cluster, pair: Any) -> None:
    await read(cluster.inference.GenerateStream(request(request_id="a")))
    first = await timelines(cluster)
    assert not (await timelines(cluster, after=first.newest)).timelines
    await read(cluster.inference.GenerateStream(request(request_id="b")))
    second = await timelines(cluster, after=first.newest)
    assert [each.request_id for each in second.timelines] == ["b"]
    assert [each.request_id for each in (await timelines(cluster, most=1)).timelines] == ["b"]
    assert second.newest > first.newest


@pytest.mark.parametrize("log_prompts", [False, True])
async def test_text_is_kept_only_where_prompts_are_logged(model: str, log_prompts: bool) -> None:
    cluster = Cluster(dataclasses.replace(CONFIG, model=model, log_prompts=log_prompts))
    await cluster.start()
    try:
        await cluster.add("prefill")
        await cluster.add("decode")
        await read(cluster.inference.GenerateStream(request("a secret")))
        (found,) = (await timelines(cluster)).timelines
        assert (found.prompt, found.output) == (('"a secret"', TEXT) if log_prompts else ("", ""))
    finally:
        await cluster.stop()


async def test_a_refused_request_says_what_its_client_was_told(cluster: Cluster, pair: Any) -> None:
    too_long = request(request_id="long")
    too_long.stopping.max_tokens = 1 << 30
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(cluster.inference.GenerateStream(too_long))
    (found,) = (await timelines(cluster)).timelines
    assert (found.request_id, found.phase) == ("long", Phase.REQUEST_PHASE_ENDED)
    assert found.failure == refused.value.details()
    assert found.outcome


@pytest.mark.parametrize("most", [0, -1, 4097])
async def test_what_makes_no_sense_is_refused(cluster: Cluster, most: int) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await timelines(cluster, most=most)
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
