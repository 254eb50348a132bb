"""Provides a cluster in which one request, the victim, is kept from leaving a phase.

Owns: what holds it there, and what shows that it is there. Never: which phases there are, or what must become of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from baton.v1 import types_pb2, worker_pb2
from benchmarks.ports import free_ports
from services.core.clock import ManualClock
from services.kv.imports import ImportState
from services.kv.lease import LeaseState
from services.kvtransfer.client import FetchOrder, FetchOutcome
from services.router.coordinator.progress import ProgressState
from services.router.coordinator.request import Phase
from services.router.policy import PlacedPhase
from services.router.policy.explanation import ExplainedRequest
from services.router.text.tokeniser_line import TokeniserLine
from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.held_runner import HeldRunner
from tests.support.models import VOCAB_SIZE
from tests.support.patience import HANG_S
from tests.support.proxy import Fault, Proxy
from tests.support.stores import running_store
from tests.support.workers import DECODE, PREFILL, ScriptedRouter, until

OTHER = random.Random(1).choices(range(3, VOCAB_SIZE), k=300)
"""What others ask."""
CHUNK = 64
VICTIM = "victim"


@dataclass
class Stage:
    """Runs a cluster in which the victim cannot leave a phase."""

    cluster: Cluster
    clock: ManualClock
    """The router's, which stands still until all is released."""
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
    released: asyncio.Event = field(default_factory=asyncio.Event)
    thread_is_free: threading.Event = field(default_factory=threading.Event)
    fetched: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when a fetch that is held afterwards has everything."""

    async def occupy_prefill(self, prompt_tokens: int) -> None:
        """Starts another request, whose step on the prefill worker does not end; it keeps the blocks that it has."""
        self.prefill.hold = lambda plan: True
        self.calls.append(self.cluster.inference.GenerateStream(greedy_request(OTHER[:prompt_tokens], 20)))
        await until(self.prefill.is_holding.is_set, "the other request's step is held")

    async def occupy_decode(self, prompt_tokens: int) -> None:
        """Does what `occupy_prefill` does on the decode worker, for a sequence of another router."""
        self.decode.hold = lambda plan: True
        session = await self.sessions.enter_async_context(ScriptedRouter().session(self.cluster.workers[1]))
        command = worker_pb2.DecodeCommand(
            leg=1, token_ids=OTHER[:prompt_tokens], stopping=types_pb2.StoppingParams(max_tokens=2, ignore_eos=True)
        )
        await session.send(decode=command)
        await until(self.decode.is_holding.is_set, "the other router's step is held")

    def occupy_tokeniser(self) -> None:
        """Another text takes the thread."""
        self.scenes.append(asyncio.create_task(self.line.run(1, self.thread_is_free.wait, 60.0)))

    def hold_fetches(self, *, until_complete: bool, worker: int = 1) -> None:
        """The fetches of the decode worker, or another one, do not begin; or they end, and it does not learn that they
        have."""
        fetcher = self.cluster.workers[worker].fetcher
        fetch = fetcher.fetch

        async def held(order: FetchOrder) -> FetchOutcome:
            if not until_complete:
                await self.released.wait()
            outcome = await fetch(order)
            self.fetched.set()
            await self.released.wait()
            return outcome

        fetcher.fetch = held  # type: ignore[method-assign]

    def fail(self, worker: int, fault: Fault) -> None:
        """Lets the fault strike what reaches the worker, and what it answers."""
        self.stalls.enter_context(self.proxies[worker].failing(fault, lambda: [os.getpid()]))

    def stall(self, worker: int) -> None:
        self.fail(worker, Fault.STALL)

    @property
    def num_steps(self) -> int:
        return self.prefill.num_steps + self.decode.num_steps

    async def end_others(self) -> int:
        """Steps that have begun when the others have been told to end."""
        self.stalls.close()  # workers that were cut off hear what the router has said meanwhile
        self.thread_is_free.set()
        for task in self.scenes:
            await task
        for call in self.calls:
            call.cancel()
        await self.sessions.aclose()
        # A cancelled call reaches its worker before whoever waits for its step can be let go.
        await until(lambda: self.cluster.router.coordinator.num_live == 0, "the others have ended")
        await until(lambda: self.line.num_texts == 0, "no text is in line")
        await until(lambda: all(worker.num_legs == 0 for worker in self.cluster.workers), "no worker has a leg")
        return self.num_steps

    def release(self) -> None:
        self.thread_is_free.set()
        self.released.set()
        self.prefill.release()
        self.decode.release()
        self.stalls.close()

    async def run_clock(self) -> None:
        await self.released.wait()
        while True:
            self.clock.advance(0.05)
            await asyncio.sleep(0.05)

    @property
    def line(self) -> TokeniserLine:
        [model] = self.cluster.router.catalogue.all()
        return model.line

    @property
    def victim(self) -> ExplainedRequest | None:
        """Returns what the router explains of the victim, while it lives."""
        [model] = self.cluster.router.catalogue.all()
        found = model.conductor.explanations.find(VICTIM)
        return found[0] if found and found[0].is_live else None

    def is_known(self) -> bool:
        """Returns whether the router knows the victim as a request that is being tokenised, or as a live one."""
        return self.victim is not None or self.cluster.router.coordinator.num_expected > 0

    def is_in(self, phase: Phase) -> bool:
        stage = self.victim and self.cluster.router.coordinator.stage_of(self.victim.request_id)
        return stage is not None and stage.phase is phase

    def is_binding(self, *, handoff: bool) -> bool:
        """A decode command was sent and not answered, with a lease or for the whole sequence."""
        victim, chosen = self.victim, PlacedPhase.DECODE if handoff else PlacedPhase.UNSPLIT
        return self.is_in(Phase.BINDING) and victim is not None and victim.choices[-1].choice.phase is chosen

    def is_orphaned(self) -> bool:
        """The decode worker has admitted it and not said that it has everything; the source is gone."""
        source = self.cluster.router.coordinator.workers.get(self.cluster.workers[0].worker_id)
        return self.is_in(Phase.DECODING) and source.is_gone

    def has_first_token(self) -> bool:
        """Its prompt is done, and no decode worker has gone on with it."""
        coordinator = self.cluster.router.coordinator
        progress = self.victim and coordinator.progress_of(self.victim.request_id, self.clock.now())
        return progress is not None and progress.position == 1 and progress.state is not ProgressState.PREFILLING

    def leases(self, state: LeaseState) -> int:
        return sum(lease.state is state for lease in self.cluster.workers[0].leases)

    def imports(self, state: ImportState) -> int:
        return sum(each.state is state for each in self.cluster.workers[1].imports)


@contextlib.asynccontextmanager
async def staged(
    model: Path, pools: tuple[int, int], transport: str, *, has_store: bool = False
) -> AsyncIterator[Stage]:
    """Yields the stage; the last of its workers is a store if it is to have one, which takes handoffs alone and
    is offered no prefixes to keep."""
    proxies, clock = [Proxy(lambda: [os.getpid()]) for _ in pools], ManualClock()
    each = []
    for proxy, kv_blocks in zip(proxies, pools, strict=True):
        [port] = free_ports(1)
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
            clock=clock,
            router={"share_prefixes": "never" if has_store else "auto"},
        ) as cluster:
            runners = [HeldRunner(worker) for worker in cluster.workers]
            stage = Stage(cluster, clock, runners[0], runners[1], proxies)
            async with _store(cluster, transport) if has_store else contextlib.nullcontext():
                clock_runs = asyncio.create_task(stage.run_clock())
                try:
                    yield stage
                finally:
                    for task in (clock_runs, *stage.scenes):
                        task.cancel()
                    stage.release()
    finally:
        for proxy in proxies:
            await proxy.close()


@contextlib.asynccontextmanager
async def _store(cluster: Cluster, transport: str) -> AsyncIterator[None]:
    routers = (cluster.router.control_address,)
    source = cluster.workers[0]
    async with running_store(source, router=routers, worker_id="s", silence_s=HANG_S, transport=transport) as store:
        cluster.workers.append(store)
        await until(lambda: cluster.num_ready == 3, "the store is ready", HANG_S)
        try:
            yield
        finally:
            cluster.workers.remove(store)
