"""Steps that raise: only their own sequences feel it. A worker that cannot compute says so; one that never will again
ends.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import StepFailed, WorkerFailed
from services.core.lifecycle import Lifecycle
from services.kv.pool import Holder
from services.kvtransfer.endpoint import TRANSFER_SERVICE
from services.prefill.leg import PrefillPhase
from services.rpc.status import from_status, status_of_call
from services.worker.host import MAX_STEP_FAILURES, WorkerHost
from services.worker.main import serve
from services.worker.session import WORKER_SERVICE
from tests.support.cluster import Cluster, running_cluster
from tests.support.equality import GreedyReference
from tests.support.fake_runner import engine_of
from tests.support.faulty_runner import FaultyRunner, always, beyond
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.trusted import CLUSTER_TOKEN, dial
from tests.support.workers import DECODE, PREFILL, ScriptedRouter, running_worker, until, worker_config

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG_TOKENS = 400
KERNEL = RuntimeError("CUDA error: an illegal memory access was encountered")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("steps"))


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(model: Path) -> AsyncIterator[WorkerHost]:
    async with running_worker(worker_config(model), DECODE) as host:
        yield host


def prompts(*lengths: int, seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(3, VOCAB_SIZE), k=length) for length in lengths]


async def all_right(cluster: Cluster, reference: GreedyReference, work: list[list[int]], num_tokens: int = 20) -> int:
    """Asserts that every prompt is answered as if nothing had happened. Returns how often requests
    were placed again."""
    answers = await asyncio.gather(*(cluster.greedy(prompt, num_tokens) for prompt in work))
    for prompt, answer in zip(work, answers, strict=True):
        assert len(answer.token_ids) == num_tokens
        reference.check_at_once(prompt, answer.token_ids)
    return sum(answer.completion.workers.retries for answer in answers if answer.completion)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), MemoryError()], ids=["device", "host"])
async def test_an_allocation_fails_under_a_long_context(
    model: Path, reference: GreedyReference, error: Exception
) -> None:
    """It fails on one of two prefill workers: the long prompt runs on the other, and what shared its step is computed
    again."""
    async with running_cluster(model, [PREFILL, PREFILL, DECODE]) as cluster:
        small, large, _ = (FaultyRunner(worker) for worker in cluster.workers)
        small.fault = beyond(LONG_TOKENS, error)
        num_retries = 0
        for seed in range(10):  # by what steps have cost so far, all long prompts may go to the other
            work = prompts(LONG_TOKENS + 100, 20, 150, 33, LONG_TOKENS + 50, 64, LONG_TOKENS + 20, seed=seed)
            num_retries += await all_right(cluster, reference, work)
            if small.num_faults:
                break
        assert num_retries >= small.num_faults > 0
        assert large.num_faults == 0
        # What fits still runs there.
        engine = cluster.workers[0].engine
        assert engine.stats().num_steps > engine.tally.num_failed == small.num_faults


async def test_a_kernel_fails_once_in_the_token_loop(model: Path, reference: GreedyReference) -> None:
    """All that was in the batch goes on at its place, from what clients have received."""
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        decode = FaultyRunner(cluster.workers[1])
        decode.once(lambda plan: KERNEL if len(plan.sequences) == 3 else None)
        # So many that all three are in a step together, however fast they are.
        num_retries = await all_right(cluster, reference, prompts(40, 20, 70), num_tokens=150)
        assert (decode.num_faults, num_retries) == (1, 3)


async def test_a_prompt_that_fails_everywhere_fails_alone(model: Path, reference: GreedyReference) -> None:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        prefill = FaultyRunner(cluster.workers[0])
        prefill.fault = beyond(LONG_TOKENS, torch.OutOfMemoryError("no memory"))
        (poison, *others) = prompts(LONG_TOKENS + 1, 30, 40, 50)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await cluster.greedy(poison, 20)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        assert isinstance(from_status(status_of_call(failed.value)), WorkerFailed)
        assert prefill.num_faults == 3
        assert await all_right(cluster, reference, others) == 0


async def test_a_worker_whose_steps_keep_failing_says_so_until_one_succeeds(worker: WorkerHost) -> None:
    runner, scripted = FaultyRunner(worker), ScriptedRouter()
    async with dial(worker.address) as channel, scripted.session(worker) as session:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=WORKER_SERVICE))
        serving = health_pb2.HealthCheckResponse
        assert (await watch.read()).status == serving.SERVING
        runner.fault = always(KERNEL)
        for count in range(1, MAX_STEP_FAILURES + 1):
            failed = await run(session, scripted.new_leg(), "failed")
            assert isinstance(from_status(failed.status), StepFailed)
            assert session.loads[-1].consecutive_step_failures == count
        assert (await watch.read()).status == serving.NOT_SERVING
        transfer = await health.Check(health_pb2.HealthCheckRequest(service=TRANSFER_SERVICE))
        assert transfer.status == serving.SERVING  # what was prefilled can still be fetched
        runner.fault = None
        await run(session, scripted.new_leg(), "tokens")
        assert (await watch.read()).status == serving.SERVING
        assert session.loads[-1].consecutive_step_failures == 0
        watch.cancel()


async def run(session: Any, leg: int, kind: str) -> Any:
    """Returns what becomes of a prompt of one token."""
    stopping = types_pb2.StoppingParams(max_tokens=1, ignore_eos=True)
    await session.send(decode=worker_pb2.DecodeCommand(leg=leg, token_ids=[5], stopping=stopping))
    return await session.next(kind, leg)


async def test_a_worker_without_a_step_thread_ends(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sessions are ended with an error, which routers count: a request that does this must not visit every
    worker."""
    monkeypatch.setenv("BATON_CLUSTER_TOKEN", CLUSTER_TOKEN)
    hosts: list[WorkerHost] = []

    def watched(host: WorkerHost) -> PrefillPhase:
        hosts.append(host)
        return PrefillPhase(host)

    phases = {types_pb2.WORKER_ROLE_PREFILL: watched}
    serving = asyncio.create_task(serve(worker_config(model), Lifecycle(), phases))
    await until(lambda: bool(hosts) and engine_of(hosts[0]).alive, "it serves", 20.0)
    (host,) = hosts
    scripted = ScriptedRouter()
    async with scripted.session(host) as session:
        await session.send(prefill=worker_pb2.PrefillCommand(leg=1, token_ids=[5] * 20))
        await session.next("started", 1)
        engine_of(host)._scheduler.schedule = broken  # type: ignore[method-assign]  # a defect of the engine itself
        host.engine.release([], Holder.SEQUENCE)  # wakes it
        with pytest.raises(WorkerFailed, match="step thread"):
            await serving
        await until(lambda: session.error is not None, "the session has ended")
        assert session.error is not None
        assert session.error.code() is grpc.StatusCode.UNAVAILABLE
    assert host.engine.stats().ledger.idle


def broken(now: float) -> Any:
    raise ValueError("a defect")


_BROKEN_WORKER = """
import sys
from services.cli.main import main
from services.engine.schedule.scheduler import Scheduler
def broken(self, now):
    raise ValueError("a defect")
Scheduler.schedule = broken
sys.exit(main(sys.argv[1:]))
"""


async def test_the_process_ends_with_a_status_that_makes_its_supervisor_start_another(model: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _BROKEN_WORKER, "decode", "--model", str(model), "--kv-blocks", "8", "--threads", "1"),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(180):  # it imports torch first
        _, complaint = await process.communicate()
    assert process.returncode == 1
    assert b"the step thread has ended" in complaint
