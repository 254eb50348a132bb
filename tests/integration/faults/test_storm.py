"""Tests hundreds of clients that leave, beside hundreds that stay: what that leaves behind, and what it costs those."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import urllib.request
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from services.core.hashing import num_blocks_for
from tests.support.equality import GreedyReference
from tests.support.models import tiny_model
from tests.support.patience import Patience
from tests.support.real_cluster import RealCluster, RouterClient, Status, holds_nothing, real_cluster
from tests.support.streams import Job, mixed_jobs

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# Everybody decodes at once, so nothing but the storm ever waits, is prefilled or is handed over.
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--kv-blocks", "32768", "--max-num-seqs", "512"),
    *("--max-num-batched-tokens", "1024", "--metrics-port", "0"),
)
# The router's own requests would be steps and tokens too.
ROUTER = ("--no-worker-timeout-s", "240", "--queue-timeout-s", "600", "--silence-s", "20", "--no-canaries")
STORM = 250
PATIENT = 250
"""Beside the storm, with outputs so long that none of them has ended when all is judged."""
LONGEST = 4000
"""Of a stream's tokens: the first streams have 550 before all have begun, and 900 by the end of the storm."""
ALL_DECODE_WITHIN_S = 120.0
OVER_WITHIN_S = 5.0
STEPS = 12
"""Of each decode worker, before the storm and after it: a busy machine of two cores does them in 4 s, a wedged cluster
never."""
AS_MANY = 0.98
"""Of the tokens of a step before the storm; a reading may fall between a step and its tokens."""
AHEAD = 16
"""Tokens of a stream that its client may not have yet."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the package's model with room for longer streams."""
    longer = {"num_hidden_layers": 12, "max_position_embeddings": 4096}
    return tiny_model("llama", tmp_path_factory.mktemp("models"), **longer)


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest_asyncio.fixture(scope="module", loop_scope="package")
async def roomy(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    temp = tmp_path_factory.mktemp("roomy")
    async with real_cluster(model, temp, WORKERS, *FLAGS, routers=(ROUTER,)) as cluster:
        yield cluster


class Patient:
    """Is a client that stays until it is sent away."""

    def __init__(self, router: RouterClient, job: Job) -> None:
        self.job = job
        self.tokens: list[int] = []
        self._call = router.inference.GenerateStream(job.request(), timeout=600.0)
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._call:
            self.tokens += message.chunk.token_ids

    async def send_away(self) -> None:
        self._call.cancel()
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await self.reading

    def most_blocks(self) -> int:
        return num_blocks_for(len(self.job.prompt) + len(self.tokens) + AHEAD, 16)


@dataclass(frozen=True)
class Done:
    """Keeps what a worker's engine has done by some moment."""

    num_steps: float
    decode_tokens: float
    prefill_tokens: float

    def __sub__(self, before: Done) -> Done:
        return Done(
            self.num_steps - before.num_steps,
            self.decode_tokens - before.decode_tokens,
            self.prefill_tokens - before.prefill_tokens,
        )


async def test_storm_of_aborts(roomy: RealCluster, reference: GreedyReference) -> None:
    """Cancels 250 requests, each at a random token, while 250 streams decode on and on.

    Proves, within 5 s of the last cancel and with all 250 streams running: the router has exactly the streams left, all
    of them decoding; the prefill workers hold no block, lease or sequence, exactly; the decode workers run exactly the
    streams, import, lease and queue nothing, and have no more blocks than the streams' tokens fill. (By then the
    streams' clients may lack a few tokens that are computed, so a handful of blocks could hide there: when the streams
    have left too, every block is free.) From then on no engine computes anything for those who have left: the prefill
    workers make no step, no prompt token is computed anywhere, and a step of each decode worker brings as many tokens
    as before the storm, one for each stream. These are counts, and the same on a machine of any speed. By the
    clock it proves only that nothing is wedged: in 5 s more (times the machine's own slowness) each decode worker that
    has streams has made `STEPS` steps and every single stream has received tokens.
    """
    rng, router = random.Random(4), roomy.router
    patients = [Patient(router, job) for job in mixed_jobs(rng, PATIENT, range(20, 60), range(LONGEST, LONGEST + 1))]
    try:
        await router.until(lambda status: _only(status, patients), "all streams decode", ALL_DECODE_WITHIN_S)
        before = await _while_they_decode(roomy, patients, ALL_DECODE_WITHIN_S)
        jobs = mixed_jobs(rng, STORM, range(20, 200), range(200, 300))
        await asyncio.gather(*(_leave_early(router, job, rng.randrange(5)) for job in jobs))
        over_s = time.monotonic()
        await router.until(lambda status: _only(status, patients), "all that is held is the streams'", OVER_WITHIN_S)
        settled_s = time.monotonic() - over_s
        after = await _while_they_decode(roomy, patients, OVER_WITHIN_S)
        print(f"{settled_s * 1000:.0f} ms to settle; in {time.monotonic() - over_s:.1f} s {after}; before {before}")
        assert not any(done.prefill_tokens for done in after.values())
        assert not any(done.num_steps for name, done in after.items() if name.startswith("prefill"))
        assert _tokens_a_step(after) >= AS_MANY * _tokens_a_step(before) > 0
        assert not [each for each in patients if each.reading.done()], "they stay until they are sent away"
    finally:
        await asyncio.gather(*(each.send_away() for each in patients))
    await roomy.idle()
    for each in patients[:: PATIENT // 25]:
        reference.check_at_once(each.job.prompt, each.tokens, seed=each.job.seed, pattern=each.job.pattern)


def _tokens_a_step(done: dict[str, Done]) -> float:
    """Returns the tokens of one step of every decode worker, which are as many as there are streams.

    It is the sum over the workers, since a stream may go on elsewhere meanwhile.
    """
    return sum(each.decode_tokens / each.num_steps for each in done.values() if each.num_steps)


async def _leave_early(router: RouterClient, job: Job, patience: int) -> None:
    call = router.inference.GenerateStream(job.request())
    with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        async for _ in call:
            patience -= 1
            if patience < 0:
                call.cancel()


async def _while_they_decode(cluster: RealCluster, patients: Sequence[Patient], within_s: float) -> dict[str, Done]:
    """Returns what each worker does until each with streams has made `STEPS` steps and every stream has gone on.

    All streams may be on one worker: where 500 begin at once on two cores, the other may have answered too late.
    """
    patience = Patience(within_s)
    began, had = await _done(cluster), [len(each.tokens) for each in patients]
    while True:
        done = {name: now - began[name] for name, now in (await _done(cluster)).items()}
        running = {each.worker.worker_id for each in (await cluster.router.status()).workers if each.load.num_running}
        idlest = min((done[name].num_steps for name in running), default=0.0)
        waiting = sum(len(each.tokens) == num for each, num in zip(patients, had, strict=True))
        if idlest >= STEPS and not waiting:
            return done
        assert not patience.is_over(), f"{idlest} steps in {patience.waited_s:.1f} s, {waiting} streams without a token"


async def _done(cluster: RealCluster) -> dict[str, Done]:
    pages = await asyncio.gather(*(asyncio.to_thread(_metrics, cluster[name].metrics_port) for name in WORKERS))
    return {name: _parsed(page) for name, page in zip(WORKERS, pages, strict=True)}


def _metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60.0) as answer:
        return str(answer.read(), "utf-8")


def _parsed(page: str) -> Done:
    values = {
        (sample.name, sample.labels.get("kind")): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }
    tokens = [values["baton_step_tokens_total", kind] for kind in ("decode", "prefill")]
    return Done(values["baton_steps_total", None], *tokens)


def _only(status: Status, patients: Sequence[Patient]) -> bool:
    """Router and workers have the patients' streams, all of them decoding, and nothing else."""
    if (status.num_queued, status.num_prefilling, status.num_parked) != (0, 0, 0):
        return False
    prefill = [each for each in status.workers if each.worker.worker_id.startswith("prefill")]
    decode = [each for each in status.workers if each not in prefill]
    loads = [each.load for each in decode]
    held = [
        (load.num_importing, load.num_leases, load.num_waiting, load.blocks_importing, load.blocks_leased)
        for load in loads
    ]
    return (
        status.num_decoding == sum(load.num_running for load in loads) == len(patients)
        and all(each.load.num_running == each.num_requests for each in decode)
        and not any(map(any, held))
        and sum(load.blocks_active for load in loads) <= sum(each.most_blocks() for each in patients)
        and all(holds_nothing(each) and each.num_requests == 0 for each in prefill)
    )
