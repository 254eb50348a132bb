"""Tests workers whose sessions, steps and heartbeats are in order, and whose tokens are not; and those that only round
otherwise than others."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from torch.utils.hooks import RemovableHandle

from baton.v1 import control_pb2
from services.engine.runner import DeviceRunner
from services.router.policy.health import Health
from services.worker.host import WorkerHost
from tests.support.cluster import Answer, Cluster, running_cluster
from tests.support.equality import GreedyReference
from tests.support.fake_runner import engine_of
from tests.support.models import tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL, until

PROMPT = list(range(5, 60))
SECONDS = 30.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


def damage(host: WorkerHost) -> RemovableHandle:
    """Damages a worker as a bit flip in memory or a bad copy would: after load, so that no fingerprint shows it. The
    embeddings of tokens are turned around; everything goes on working. (Layers may be computed as a whole by native
    code, which no hook of a module within them sees.) What is returned mends it."""
    engine = engine_of(host)
    runner = engine._runner
    assert isinstance(runner, DeviceRunner)
    embeddings = runner._model.module.get_input_embeddings()
    with engine._lock:
        return embeddings.register_forward_hook(lambda module, inputs, output: output.flip(-1))


def health(cluster: Cluster, worker_id: str) -> Health:
    return cluster.router.coordinator.workers.get(worker_id).health.state


async def all_up(cluster: Cluster) -> None:
    workers = cluster.router.coordinator.workers
    await until(lambda: all(worker.health.state is Health.UP for worker in workers.all()), "all are checked", SECONDS)


@pytest.mark.parametrize("place", [1, 2], ids=["the first", "the second"])
async def test_a_worker_with_damaged_weights_is_taken_out(model: Path, place: int) -> None:
    reference = GreedyReference(model)
    checks = {"canaries": True, "canary_period_s": 0.5}
    async with running_cluster(model, [PREFILL, DECODE, DECODE], router=checks, heartbeat_s=0.1) as cluster:
        await all_up(cluster)
        bad, good = f"w{place}", f"w{3 - place}"
        damage(cluster.workers[place])
        await until(lambda: health(cluster, bad) is Health.DOWN, "it is found out", SECONDS)
        assert "wrong answer" in cluster.router.coordinator.workers.get(bad).health.reason
        for number in range(6):
            answer = await cluster.greedy([*PROMPT, 5 + number], 8)
            reference.check([*PROMPT, 5 + number], answer.token_ids)
            assert answer.completion is not None
            assert answer.completion.workers.decode == good
        status = next(each for each in (await cluster.status()).workers if each.worker.worker_id == bad)
        assert status.state == control_pb2.WORKER_STATE_DOWN
        assert "wrong answer" in status.reason
        assert health(cluster, good) is Health.UP


async def test_nothing_that_a_wrong_worker_has_computed_is_found_again(model: Path) -> None:
    """It has prefilled prompts whose blocks the decode worker has cached, as it has itself, when it is found."""
    reference = GreedyReference(model)
    checks = {"canaries": True, "canary_period_s": 3.0}
    async with running_cluster(model, [PREFILL, PREFILL, DECODE], router=checks, heartbeat_s=0.1) as cluster:
        await all_up(cluster)
        mend = damage(cluster.workers[0])
        prompts = [[*PROMPT, 5 + number] for number in range(12)]
        right = [reference.generate(prompt, 8) for prompt in prompts]
        before = await asyncio.gather(*(cluster.greedy(prompt, 8) for prompt in prompts), return_exceptions=True)
        # An answer of its own is wrong, or has ended if it was found out meanwhile.
        assert [isinstance(each, Answer) and each.token_ids for each in before] != right, "it has computed some of them"
        await until(lambda: health(cluster, "w0") is Health.DOWN, "it is found out", SECONDS)
        for prompt in prompts:
            answer = await cluster.greedy(prompt, 8)
            reference.check(prompt, answer.token_ids)
        mend.remove()
        await until(lambda: health(cluster, "w0") is Health.UP, "it is mended", SECONDS)
        used = set[str]()
        for _ in range(3):
            answers = await asyncio.gather(*(cluster.greedy(prompt, 8) for prompt in prompts))
            for prompt, answer in zip(prompts, answers, strict=True):
                reference.check(prompt, answer.token_ids)
                assert answer.completion is not None
                used.add(answer.completion.workers.prefill)
        assert used == {"w0", "w1"}
        # The only one that was wrong, and once.
        assert cluster.router.coordinator.verdicts.num_of == {cluster.workers[0].incarnation: 1}
        assert cluster.workers[2].verdicts.num_of == cluster.router.coordinator.verdicts.num_of


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
async def test_a_healthy_worker_is_never_taken_out(model: Path, dtype: str) -> None:
    """What else is in its batch, and how its own chunks are cut, changes how sums are rounded."""
    checks = {"canaries": True, "canary_period_s": 0.02}
    roles = [PREFILL, DECODE, MIXED]
    async with running_cluster(model, roles, router=checks, dtype=dtype, heartbeat_s=0.1) as cluster:
        await all_up(cluster)
        canaries = cluster.router.coordinator._canaries
        before = canaries._num_sent
        over = asyncio.Event()

        async def client(number: int) -> None:
            round_ = 0
            while not over.is_set():
                round_ += 1
                prompt = [5 + (number * 7 + round_ * 3 + i) % 300 for i in range(5 + 13 * number)]
                await cluster.greedy(prompt, 10 + number)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(client(number))
            try:
                await until(lambda: canaries._num_sent >= before + 150, "many canaries beside load", 2 * SECONDS)
            finally:
                over.set()
        for worker in cluster.router.coordinator.workers.all():
            assert (worker.health.state, worker.health.num_failures) == (Health.UP, 0)
            assert all(pair.health.num_failures == 0 for pair in worker.sources.all())
