"""A client's deadline that passes in each phase of a request: hit on purpose, and shown to have been that phase.

Each phase is held open (a step that does not end, room that another request holds, a connection that stalls) until the
deadline has passed. So the deadline cannot meet another phase, however fast or slow the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import types_pb2, worker_pb2
from services.engine.cost_model import CostModel
from services.kv.imports import ImportState
from services.kv.lease import LeaseState
from services.router.coordinator.request import Phase
from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.fake_runner import engine_of
from tests.support.held_runner import HeldRunner
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.patience import patient
from tests.support.proxy import Fault, Proxy
from tests.support.workers import DECODE, PREFILL, ScriptedRouter, until

PROMPT = random.Random(0).choices(range(3, VOCAB_SIZE), k=300)
OTHER = random.Random(1).choices(range(3, VOCAB_SIZE), k=300)
DEADLINE_S = patient(3.0)
"""Long enough to reach a phase; one that is not reached in time fails the test."""
ENDS_EARLY_S = 0.2
"""Before this much is left, nobody's clock has reached the deadline."""
CHUNK = 64
VICTIM = "victim"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("deadlines"))


@dataclass
class Stage:
    """A cluster in which the victim cannot leave a phase."""

    cluster: Cluster
    prefill: HeldRunner
    decode: HeldRunner
    proxies: list[Proxy]
    """What dials the prefill and the decode worker goes through these."""
    stalls: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    calls: list[Any] = field(default_factory=list)
    scenes: list[asyncio.Task[None]] = field(default_factory=list)
    """What has to happen while the victim is on its way to the phase."""
    sessions: contextlib.AsyncExitStack = field(default_factory=contextlib.AsyncExitStack)
    """Of another router."""

    async def occupy_prefill(self, prompt_tokens: int) -> None:
        """Another request whose step on the prefill worker does not end, with the blocks it has."""
        self.prefill.hold = lambda plan: True
        self.calls.append(self.cluster.inference.GenerateStream(greedy_request(OTHER[:prompt_tokens], 20)))
        await until(self.prefill.is_holding.is_set, "the other request's step is held", 20.0)

    async def occupy_decode(self, prompt_tokens: int) -> None:
        """As `occupy_prefill` on the decode worker, for a sequence of another router."""
        self.decode.hold = lambda plan: True
        session = await self.sessions.enter_async_context(ScriptedRouter().session(self.cluster.workers[1]))
        command = worker_pb2.DecodeCommand(
            leg=1, token_ids=OTHER[:prompt_tokens], stopping=types_pb2.StoppingParams(max_tokens=2, ignore_eos=True)
        )
        await session.send(decode=command)
        await until(self.decode.is_holding.is_set, "the other router's step is held", 20.0)

    def stall(self, worker: int) -> None:
        self.stalls.enter_context(self.proxies[worker].failing(Fault.STALL, lambda: [os.getpid()]))

    @property
    def num_steps(self) -> int:
        return self.prefill.num_steps + self.decode.num_steps

    async def end_others(self) -> int:
        """Steps that have begun when the others have been told to end."""
        for task in self.scenes:
            await task
        for call in self.calls:
            call.cancel()
        await self.sessions.aclose()
        # A cancelled call reaches its worker before whoever waits for its step can be let go.
        await until(lambda: self.cluster.router.coordinator.num_live == 0, "the others have ended")
        await until(lambda: all(worker.num_legs == 0 for worker in self.cluster.workers), "no worker has a leg")
        return self.num_steps

    def release(self) -> None:
        self.prefill.release()
        self.decode.release()
        self.stalls.close()

    def is_known(self) -> bool:
        """To the router, as a live request."""
        return VICTIM in self.cluster.router.coordinator._book.requests

    def is_in(self, phase: Phase) -> bool:
        return self.is_known() and self.cluster.router.coordinator._book.requests[VICTIM].phase is phase

    def leases(self, state: LeaseState) -> int:
        return sum(lease.state is state for lease in self.cluster.workers[0].leases)

    def imports(self, state: ImportState) -> int:
        return sum(each.state is state for each in self.cluster.workers[1].imports)


async def queued(stage: Stage) -> None:
    """Another request holds the prefill pool."""
    await stage.occupy_prefill(300)


async def prefilling(stage: Stage) -> None:
    """The prefill worker has the command and will look at it when its step has ended."""
    await stage.occupy_prefill(1)


async def computing(stage: Stage) -> None:
    """The prompt's second chunk does not end."""
    stage.prefill.hold = lambda plan: any(part.start >= CHUNK for part in plan.sequences)


async def parked(stage: Stage) -> None:
    """Another router's sequence takes the decode pool while the prompt is already on its way."""
    await stage.occupy_prefill(1)

    async def take_the_room() -> None:
        await until(lambda: stage.is_in(Phase.PREFILLING), "the victim is placed", 20.0)
        await stage.occupy_decode(300)
        stage.prefill.release()

    stage.scenes.append(asyncio.create_task(take_the_room()))


async def binding(stage: Stage) -> None:
    """What the router writes to the decode worker stays on its way."""
    stage.stall(1)


async def importing(stage: Stage) -> None:
    """The source has sealed the lease, and what it says of that stays on its way to the decode worker."""
    stage.prefill.hold = lambda plan: True

    async def stall_once_the_fetch_is_open() -> None:
        await until(lambda: stage.cluster.workers[0].leases.num_fetches > 0, "the fetch is open", 20.0)
        stage.stall(0)
        stage.prefill.release()

    stage.scenes.append(asyncio.create_task(stall_once_the_fetch_is_open()))


async def decoding(stage: Stage) -> None:
    """The token loop does not end its third step."""
    stage.decode.hold = lambda plan: any(part.start >= len(PROMPT) + 2 for part in plan.sequences)


@dataclass(frozen=True)
class Case:
    hold: Callable[[Stage], Awaitable[None]]
    is_there: Callable[[Stage], bool]
    pools: tuple[int, int] = (128, 128)
    """Blocks of the prefill and of the decode worker; 300 tokens take 19."""


CASES = {
    "queued": Case(queued, lambda stage: stage.is_in(Phase.QUEUED), (24, 128)),
    "prefilling": Case(prefilling, lambda stage: stage.is_in(Phase.PREFILLING)),
    "computing the prompt": Case(
        computing,
        lambda stage: (
            stage.prefill.is_holding.is_set()
            and stage.leases(LeaseState.OPEN) == stage.imports(ImportState.COPYING) == 1
        ),
    ),
    # An aged handoff is offered again and again, and refused: BINDING for a moment each time.
    "parked": Case(
        parked,
        lambda stage: (
            stage.leases(LeaseState.SEALED) == 1
            and not len(stage.cluster.workers[1].imports)
            and (stage.is_in(Phase.PARKED) or stage.is_in(Phase.BINDING))
        ),
        (128, 24),
    ),
    "binding": Case(binding, lambda stage: stage.is_in(Phase.BINDING)),
    "importing": Case(
        importing, lambda stage: stage.leases(LeaseState.SEALED) == stage.imports(ImportState.COPYING) == 1
    ),
    "decoding": Case(decoding, lambda stage: stage.is_in(Phase.DECODING) and stage.decode.is_holding.is_set()),
}


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("phase", CASES)
async def test_a_deadline_in_each_phase(
    model: Path, phase: str, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[phase]
    async with staged(model, case.pools, transport) as stage:
        await case.hold(stage)
        with caplog.at_level(logging.INFO, "services.router.conductor"):
            began_s = asyncio.get_running_loop().time()
            call = stage.cluster.inference.GenerateStream(
                greedy_request(PROMPT, 80, request_id=VICTIM), timeout=DEADLINE_S
            )
            ended = asyncio.create_task(_read(call))
            await until(lambda: case.is_there(stage) or ended.done(), f"the victim is {phase}", 20.0, pause_s=0)
            assert case.is_there(stage), f"it ended before it was {phase}: {ended}"
            # In the phase until its time is over. Then whoever looks first ends its part: worker, router or client.
            while asyncio.get_running_loop().time() - began_s < DEADLINE_S - ENDS_EARLY_S:
                refused = phase == "queued" and not stage.is_known()  # when the work no longer fits into what is left
                assert case.is_there(stage) or refused, f"the victim left the phase {phase} before its deadline"
                await asyncio.sleep(0)
            # In the queue others stand in the way, and a refusal in advance says so.
            in_advance = {grpc.StatusCode.RESOURCE_EXHAUSTED} if phase == "queued" else set()
            assert await ended in {grpc.StatusCode.DEADLINE_EXCEEDED, *in_advance}
            await until(lambda: not stage.is_known(), "the router has ended the victim")
        failed = [record.getMessage() for record in caplog.records if "request failed" in record.getMessage()]
        why = "deadline cannot be met" if await ended is grpc.StatusCode.RESOURCE_EXHAUSTED else "DEADLINE_EXCEEDED"
        assert [line for line in failed if why in line], failed
        num_steps = await stage.end_others()
        stage.release()
        # The step that was held ends, and no step of anybody who has left follows it.
        await stage.cluster.idle()
        assert stage.num_steps == num_steps
        assert len((await stage.cluster.greedy(OTHER[:40], 3, cache_salt="after")).token_ids) == 3


async def _read(call: Any) -> grpc.StatusCode:
    """To its end, whatever that is."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


@contextlib.asynccontextmanager
async def staged(model: Path, pools: tuple[int, int], transport: str) -> AsyncIterator[Stage]:
    proxies = [Proxy(lambda: [os.getpid()]) for _ in pools]
    each = []
    for proxy, kv_blocks in zip(proxies, pools, strict=True):
        port = _free_port()
        await proxy.open()
        proxy.aim(port)
        each.append({"kv_blocks": kv_blocks, "port": port, "advertise": f"127.0.0.1:{proxy.port}"})
    try:
        async with running_cluster(
            model,
            [PREFILL, DECODE],
            each=each,
            transport=transport,
            max_num_batched_tokens=CHUNK,
            silence_s=30.0,
            router={"silence_s": 30.0},
        ) as cluster:
            for worker in cluster.workers:
                engine_of(worker)._costs = CostModel()  # by what a stalled machine measures, no deadline could be met
            runners = [HeldRunner(worker) for worker in cluster.workers]
            stage = Stage(cluster, runners[0], runners[1], proxies)
            try:
                yield stage
            finally:
                stage.release()
    finally:
        for proxy in proxies:
            await proxy.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
