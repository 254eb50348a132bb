"""Tests workers that look alive and are not, with real workers: a pair that cannot transfer, and a step that does not
end. What follows, and how a worker comes back: unit/router/test_canaries.py and test_unhealthy.py."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from baton.v1 import control_pb2, types_pb2
from services.cli import status as cli_status
from services.core.clock import ManualClock
from services.router.policy.health import Health
from services.rpc.plain import plain
from tests.support.cluster import Cluster, running_cluster
from tests.support.equality import GreedyReference
from tests.support.fake_runner import engine_of
from tests.support.held_runner import HeldRunner
from tests.support.models import tiny_model
from tests.support.recording import recording_tracer
from tests.support.workers import DECODE, MIXED, PREFILL, until

PROMPT = list(range(5, 60))
WITH_CANARIES = {"canaries": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


def pairs(status: control_pb2.GetStatusResponse) -> dict[tuple[str, str], int]:
    return {(pair.prefill, pair.decode): pair.state for pair in status.pairs}


async def all_checked(cluster: Cluster) -> None:
    """Waits until every worker and every pair has passed or failed, and the router is ready."""

    def checked() -> bool:
        workers = cluster.router.coordinator.workers.all()
        records = [worker.health for worker in workers]
        records += [pair.health for worker in workers for pair in worker.sources.all()]
        return cluster.router.coordinator.ready and all(record.state is not Health.NEW for record in records)

    await until(checked, "the canaries are over")


async def test_canaries_prove_everything_and_leave_nothing(model: Path, reference: GreedyReference) -> None:
    spans = InMemorySpanExporter()
    async with running_cluster(
        model, [PREFILL, DECODE, MIXED], router=WITH_CANARIES, tracer=recording_tracer(spans)
    ) as cluster:
        await all_checked(cluster)
        assert not spans.get_finished_spans(), "traces are for requests"
        assert not cluster.router.coordinator.num_live
        status = await cluster.status()
        proven = control_pb2.PAIR_STATE_PROVEN
        assert pairs(status) == {("w0", "w1"): proven, ("w0", "w2"): proven, ("w2", "w1"): proven}
        assert {pair.transport for pair in status.pairs} == {types_pb2.TRANSPORT_SHM}
        assert [worker.reason for worker in status.workers] == ["", "", ""]
        answer = await cluster.greedy(PROMPT, 8)
        reference.check(PROMPT, answer.token_ids)


async def test_a_pair_that_cannot_transfer_is_not_paired(model: Path, reference: GreedyReference) -> None:
    """Worker w1 is set to shared memory alone, which w0 does not offer; it is the one that would be chosen."""
    each = [{"transport": "grpc"}, {"transport": "shm"}, {"transport": "auto"}]
    async with running_cluster(model, [PREFILL, DECODE, DECODE], router=WITH_CANARIES, each=each) as cluster:
        await all_checked(cluster)
        status = await cluster.status()
        assert pairs(status) == {
            ("w0", "w1"): control_pb2.PAIR_STATE_BROKEN,
            ("w0", "w2"): control_pb2.PAIR_STATE_PROVEN,
        }
        for _ in range(3):
            answer = await cluster.greedy(PROMPT, 8)
            reference.check(PROMPT, answer.token_ids)
            assert answer.completion is not None
            assert (answer.completion.workers.decode, answer.completion.workers.retries) == ("w2", 0)
        text = cli_status.text("target", plain(status))
        assert "w0 -> w1: broken; down: TRANSFER_FAILED" in text
        assert all(worker.state == control_pb2.WORKER_STATE_READY for worker in status.workers)


async def test_a_stuck_step_is_noticed_although_heartbeats_go_on(model: Path, reference: GreedyReference) -> None:
    async with running_cluster(model, [PREFILL, DECODE, DECODE], heartbeat_s=0.1) as cluster:
        engine_of(cluster.workers[1])._clock = clock = ManualClock()
        device = HeldRunner(cluster.workers[1], lambda plan: True)
        asking = asyncio.create_task(cluster.greedy(PROMPT, 12))
        await until(device.is_holding.is_set, "the step is held")
        clock.advance(3600.0)
        answer = await asking
        reference.check(PROMPT, answer.token_ids)
        assert answer.completion is not None
        assert (answer.completion.workers.decode, answer.completion.workers.retries) == ("w2", 1)
        assert "w1" in cluster.router.conductor.links, "its session was never lost"
        worker = next(each for each in (await cluster.status()).workers if each.worker.worker_id == "w1")
        assert worker.state == control_pb2.WORKER_STATE_DOWN
        assert "a device step has run for 3600 s" in worker.reason
        device.release()
