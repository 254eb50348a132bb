"""Tests that streams survive what befalls vLLM's processes, token for token, and that nothing of them is left.

Real processes: a router, a prefill worker and two decode workers. Each fault strikes one of a decode worker's own: its
stream goes on at the other one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from tests.support.equality import GreedyReference
from tests.support.footprint import Footprint
from tests.support.phases import Phase, decoding, prefilling, reach, strike
from tests.support.real_cluster import RealCluster, real_cluster
from tests.support.streams import Job, streams
from tests.support.vllm_driver import BLOCK, tiny_for_vllm

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

WORKERS = ("prefill-0", "decode-0", "decode-1")
ROUTER = ("--no-worker-timeout-s", "240", "--queue-timeout-s", "600", "--silence-s", "20")
PROMPT_TOKENS, MAX_TOKENS = 1200, 300
WITHIN_S = 5.0
"""From the fault to the end of all processes of the worker, on an idle machine. This one is not: two workers go on, and
by now have the streams."""
_NAMES = {"front": "services.vllm.inside.main", "core": "EngineCore", "rank": "VLLM::Worker", "keeper": "vllm.keeper"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_for_vllm(tmp_path_factory.mktemp("models"), num_hidden_layers=12)


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(
    request: pytest.FixtureRequest, model: Path, python: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RealCluster]:
    flags = (
        *("--engine-arg", f"distributed_executor_backend={request.param}"),
        *("--engine", "vllm", "--vllm-python", str(python), "--engine-arg", "enforce_eager=true"),
        *("--dtype", "float32", "--threads", "1", "--kv-blocks", "96", "--block-size", str(BLOCK)),
        *("--max-num-batched-tokens", "64", "--max-model-len", "2048"),
    )
    async with real_cluster(model, tmp_path_factory.mktemp("temp"), WORKERS, *flags, routers=(ROUTER,)) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="module")
async def cluster(shared: RealCluster) -> AsyncIterator[RealCluster]:
    """Yields the cluster, which is to be idle within 5 s after the test, also those services that were away."""
    await shared.whole()
    await shared.idle()
    yield shared
    await shared.whole()
    await shared.idle()


def process_of(worker: int, what: str) -> psutil.Process:
    """Returns a process below the worker's: vLLM's front, core or rank, or their keeper."""
    for each in psutil.Process(worker).children(recursive=True):
        line = " ".join(each.cmdline())
        if _NAMES[what] in line and (what == "keeper") == (_NAMES["keeper"] in line):
            return each
    raise AssertionError(f"worker {worker} has no {what}")


async def struck(
    cluster: RealCluster,
    reference: GreedyReference,
    phase: Phase,
    what: str,
    number: signal.Signals,
    num_streams: int = 2,
) -> bool:
    """Sends a signal to a process of the worker that is in the phase; returns whether a stream was placed again."""
    salt = f"{what} {number} {time.monotonic()}"
    prompts = [tuple((at * 7 + each * 11) % 300 + 3 for at in range(PROMPT_TOKENS)) for each in range(num_streams)]
    jobs = [Job(prompt, MAX_TOKENS, seed=5 if at % 2 else None, cache_salt=salt) for at, prompt in enumerate(prompts)]
    async with streams(cluster.router, reference, jobs) as running:
        victim = await reach(cluster, phase, running)
        worker = cluster[victim]
        mine = Footprint()
        mine.watch(worker.pid)
        mine.memfds.clear()  # peers may keep a dead worker's pool mapped, until they see that it is gone
        if what == "worker":
            await worker.kill()
        else:
            os.kill(process_of(worker.pid, what).pid, number)
        await asyncio.to_thread(mine.await_gone, WITHIN_S)
        if what != "worker":
            with contextlib.suppress(AssertionError):  # it ends by itself, with a status of its own
                await worker.left()
        await worker.start()
    return running.num_retries > 0


# Where one process computes and schedules, and where ranks are processes of their own, as several always are.
@pytest.mark.parametrize(
    ("shared", "what", "number"),
    [
        *(("mp", what, signal.SIGKILL) for what in ("front", "core", "rank", "keeper", "worker")),
        *(("mp", what, signal.SIGSTOP) for what in ("front", "core", "rank")),
        *(("uni", "core", number) for number in (signal.SIGKILL, signal.SIGSTOP)),
    ],
    indirect=["shared"],
)
async def test_while_it_decodes(
    cluster: RealCluster, reference: GreedyReference, what: str, number: signal.Signals
) -> None:
    await strike(lambda: struck(cluster, reference, decoding, what, number))


@pytest.mark.parametrize(("shared", "what"), [("mp", "rank"), ("mp", "worker"), ("uni", "core")], indirect=["shared"])
async def test_while_it_prefills(cluster: RealCluster, reference: GreedyReference, what: str) -> None:
    """There are more prompts than places for them, so that some are still to be computed when the fault comes."""
    await strike(lambda: struck(cluster, reference, prefilling, what, signal.SIGKILL, num_streams=6))
