"""Tests that verdicts cross the sessions, and that commands are named by them."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from baton.v1 import control_pb2
from tests.support.cluster import Cluster, begun, read, request
from tests.support.scripted_worker import TEXT


async def test_a_verdict_that_a_worker_tells_of_is_told_to_all_others(cluster: Cluster, pair: Any) -> None:
    prefill, decode = pair
    assert not prefill.verdicts_heard
    decode.verdicts = {77: 2}
    await prefill.until(lambda: prefill.verdicts_heard == {77: 2})


async def test_blocks_have_other_names_from_a_verdict_on(cluster: Cluster, pair: Any) -> None:
    prefill, decode = pair
    _, text = await read(cluster.inference.GenerateStream(request()))
    assert {command.cache_salt for command in (*prefill.commands, *decode.commands)} == {""}
    prefill.verdicts = {77: 1}
    await decode.until(lambda: decode.verdicts_heard)
    _, again = await read(cluster.inference.GenerateStream(request()))
    assert text == again == TEXT
    (salt,) = {command.cache_salt for command in (prefill.commands[-1], decode.commands[-1])}
    assert salt != ""


async def test_a_stream_from_a_worker_that_is_found_wrong_ends_with_data_loss(cluster: Cluster, pair: Any) -> None:
    prefill, decode = pair
    decode.decode_gate.clear()
    events = await begun(cluster.inference.GenerateStream(request()))  # what was sent cannot be taken back
    await decode.until(lambda: decode.commands)
    decode.verdicts = {prefill.incarnation: 1}
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await read(events)
    assert raised.value.code() is grpc.StatusCode.DATA_LOSS
    assert "found to compute wrong" in str(raised.value.details())
    status = await cluster.control.GetStatus(control_pb2.GetStatusRequest())
    wrong = next(worker for worker in status.workers if worker.worker.worker_id == prefill.worker_id)
    assert "wrong answer" in wrong.reason
