"""Tests what a router says of a worker that is slower than its peers, and where it sends requests meanwhile."""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from prometheus_client import generate_latest

from baton.v1 import control_pb2
from services.cli.status import text
from services.core.clock import ManualClock
from services.rpc.plain import plain
from tests.support.cluster import CONFIG, Cluster, read, request

CLOCK = ManualClock()


@pytest.fixture
async def cluster(model: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(replace(CONFIG, model=model, slow_factor=2.0), CLOCK)
    await cluster.start()
    yield cluster
    await cluster.idle()
    await cluster.stop()


_MS = {"slow": 80.0, "one": 20.0, "two": 20.0}


async def test_it_is_shown_logged_counted_and_explained(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    await cluster.add("prefill")
    for worker_id, ms in _MS.items():
        (await cluster.add("decode", worker_id=worker_id)).ms_per_decode_step = ms
    status = control_pb2.GetStatusResponse()

    async def ejected() -> bool:
        CLOCK.advance(0.4)
        status.CopyFrom(await cluster.control.GetStatus(control_pb2.GetStatusRequest()))
        return any(each.state == control_pb2.WORKER_STATE_EJECTED for each in status.workers)

    await cluster.until(ejected)
    (shown,) = [each for each in status.workers if each.state == control_pb2.WORKER_STATE_EJECTED]
    assert shown.worker.worker_id == "slow"
    what = "a decode step, of 1 tokens that attend to 100 each,"
    reason = rf"ejected for \d+ s: {what} takes 80 ms, the median of its peers 20 ms"
    assert re.fullmatch(reason, shown.reason)
    assert re.search(f"slow .* ejected .*\n(.*\n)*slow: {reason}", text("target", plain(status)))
    (line,) = [each.message for each in caplog.records if "ejected" in each.message]
    assert re.fullmatch(f"worker slow is {reason}", line)

    await read(cluster.inference.GenerateStream(request(request_id="r")))
    answer = await cluster.control.Explain(control_pb2.ExplainRequest(request_id="r"))
    handoff = answer.requests[0].choices[1]
    assert {each.worker_id for each in handoff.candidates} == {"one", "two"}
    (left_out,) = handoff.left_out
    assert (left_out.worker_id, left_out.reason) == ("slow", control_pb2.LEFT_OUT_REASON_EJECTED)

    metrics = generate_latest(cluster.metrics()).decode()
    assert re.search(r'baton_workers_ejected{[^}]*role="decode"} 1.0', metrics)
    assert re.search(r'baton_workers_ejected{[^}]*role="prefill"} 0.0', metrics)
