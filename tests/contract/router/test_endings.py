"""Tests a client's cancel, and its deadline, in each phase of a request: every block on both workers comes back, and no
work is orphaned.

The phases are those of docs/failure-model.md. Each is held open (a step that does not end, room that another request
holds, a connection that stalls) until the request has ended, and the router's clock moves only to let the deadline
pass. So neither can meet another phase, however fast or slow the machine is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2
from services.kv.imports import ImportState
from services.kv.lease import LeaseState
from services.router.coordinator.request import Phase
from tests.support.cluster import greedy_request, running_cluster
from tests.support.examples import combinations
from tests.support.held_phases import CHUNK, OTHER, VICTIM, Stage, staged
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.proxy import Fault
from tests.support.workers import DECODE, MIXED, PREFILL, until

PROMPT = random.Random(0).choices(range(3, VOCAB_SIZE), k=300)
DEADLINE_S = 3600.0
"""By the router's clock, which stands still until the phase is reached."""
TEXT = "a few words and " * 64
"""Long enough to be tokenised on a thread, and short enough for that of short texts, of which there is one."""
FAILURE_MODEL = Path(__file__).parents[3] / "docs" / "failure-model.md"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("deadlines"))


async def tokenising(stage: Stage) -> None:
    """Another text has the thread."""
    stage.occupy_tokeniser()
    await until(lambda: stage.line.num_texts == 1, "the thread is taken")


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
        await until(lambda: stage.is_in(Phase.PREFILLING), "the victim is placed")
        await stage.occupy_decode(300)
        stage.prefill.release()

    stage.scenes.append(asyncio.create_task(take_the_room()))


async def parking(stage: Stage) -> None:
    """A store has admitted what no decode worker has room for, and its fetch does not begin."""
    stage.hold_fetches(until_complete=False, worker=2)
    await parked(stage)

    async def wait_long_enough() -> None:
        await until(lambda: stage.is_in(Phase.PARKED) and stage.has_first_token(), "the whole handoff is parked")
        stage.clock.advance(1.0)

    stage.scenes.append(asyncio.create_task(wait_long_enough()))


async def binding(stage: Stage) -> None:
    """Keeps what the router writes to the decode worker on its way."""
    stage.stall(1)


async def binding_the_whole(stage: Stage) -> None:
    """The prompt is too long for the prefill worker, and the decode worker will look at it when its step has ended."""
    await stage.occupy_decode(1)


async def importing(stage: Stage) -> None:
    """The source has sealed the lease, and what it says of that stays on its way to the decode worker."""
    stage.prefill.hold = lambda plan: True

    async def stall_once_the_fetch_is_open() -> None:
        await until(lambda: stage.cluster.workers[0].leases.num_fetches > 0, "the fetch is open")
        stage.stall(0)
        stage.prefill.release()

    stage.scenes.append(asyncio.create_task(stall_once_the_fetch_is_open()))


async def decoding(stage: Stage) -> None:
    """The token loop does not end its third step."""
    stage.decode.hold = lambda plan: any(part.start >= len(PROMPT) + 2 for part in plan.sequences)


async def losing_the_source(stage: Stage, *, until_complete: bool) -> None:
    """The prefill worker is lost with the prompt done, and the decode worker has not said that it has it."""
    stage.hold_fetches(until_complete=until_complete)

    def is_done_and_bound() -> bool:
        return stage.is_in(Phase.DECODING) and stage.leases(LeaseState.SEALED) == 1 and stage.has_first_token()

    async def lose_it() -> None:
        await until(stage.fetched.is_set if until_complete else is_done_and_bound, "the source may be lost")
        stage.fail(0, Fault.RESET)

    stage.scenes.append(asyncio.create_task(lose_it()))


async def losing_the_source_before(stage: Stage) -> None:
    await losing_the_source(stage, until_complete=False)


async def losing_the_source_after(stage: Stage) -> None:
    await losing_the_source(stage, until_complete=True)


@dataclass(frozen=True)
class Case:
    hold: Callable[[Stage], Awaitable[None]]
    is_there: Callable[[Stage], bool]
    pools: tuple[int, int] = (128, 128)
    """Blocks of the prefill and of the decode worker; 300 tokens take 19."""
    has_text: bool = False
    """The victim's prompt is a text."""
    has_store: bool = False
    """The cluster has a store."""

    def request(self) -> inference_pb2.GenerateRequest:
        request = greedy_request(PROMPT, 80, request_id=VICTIM)
        if self.has_text:
            request.text = TEXT
        return request


CASES = {
    "tokenising": Case(
        tokenising,
        lambda stage: stage.line.num_texts == 2 and stage.cluster.router.coordinator.num_expected == 1,
        has_text=True,
    ),
    "queued": Case(queued, lambda stage: stage.is_in(Phase.QUEUED), (24, 128)),
    "prefilling": Case(prefilling, lambda stage: stage.is_in(Phase.PREFILLING)),
    "prefilling, with its lease": Case(
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
    "parked, on its way to a store": Case(
        parking,
        lambda stage: (
            stage.leases(LeaseState.SEALED) == len(stage.cluster.workers[2].imports) == 1 and stage.is_in(Phase.PARKED)
        ),
        (128, 24),
        has_store=True,
    ),
    "binding, with a handoff": Case(binding, lambda stage: stage.is_binding(handoff=True)),
    # Its worker has the leg, and has not begun it.
    "binding, an unsplit sequence": Case(
        binding_the_whole,
        lambda stage: stage.is_binding(handoff=False) and stage.cluster.workers[1].num_legs == 2,
        (12, 128),
    ),
    "decoding, while importing": Case(
        importing, lambda stage: stage.leases(LeaseState.SEALED) == stage.imports(ImportState.COPYING) == 1
    ),
    "decoding, source gone: before the fetch": Case(
        losing_the_source_before, lambda stage: stage.is_orphaned() and len(stage.cluster.workers[1].imports) == 1
    ),
    "decoding, source gone: after the fetch": Case(
        losing_the_source_after, lambda stage: stage.is_orphaned() and stage.fetched.is_set()
    ),
    "decoding": Case(decoding, lambda stage: stage.is_in(Phase.DECODING) and stage.decode.is_holding.is_set()),
}


def test_every_phase_is_among_the_cases() -> None:
    """Every phase in which a client may wait is among the cases, by the failure model's own table."""
    table = FAILURE_MODEL.read_text().partition("## How every phase ends")[2].partition("\n\n*Lost by its worker*")[0]
    phases = set(re.findall(r"^\| ([^|]+?) \|", table, re.MULTILINE)) - {"phase", "a step on the device", "a canary"}
    assert {name.partition(":")[0] for name in CASES} == phases


def cancelled(stage: Stage, call: Any) -> grpc.StatusCode:
    call.cancel()
    return grpc.StatusCode.CANCELLED


def out_of_time(stage: Stage, call: Any) -> grpc.StatusCode:
    stage.clock.advance(2 * DEADLINE_S)  # gRPC rounds what is long
    return grpc.StatusCode.DEADLINE_EXCEEDED


ENDINGS = [
    each
    for each in combinations(tuple(CASES), ["shm", "grpc"], [cancelled, out_of_time])
    if each.values[0] != "tokenising" or each.values[2] is cancelled  # a deadline there: test_intake.py
]


@pytest.mark.parametrize(("phase", "transport", "end"), ENDINGS)
async def test_a_request_ends_in_each_phase(
    model: Path, phase: str, transport: str, end: Callable[[Stage, Any], grpc.StatusCode]
) -> None:
    case = CASES[phase]
    async with staged(model, case.pools, transport, has_store=case.has_store) as stage:
        await case.hold(stage)
        call = stage.cluster.inference.GenerateStream(case.request(), timeout=DEADLINE_S)
        reading = asyncio.create_task(_read(call))
        await until(lambda: case.is_there(stage) or reading.done(), f"the victim is {phase}")
        assert not reading.done()
        expected = end(stage, call)
        assert await reading is expected
        await until(lambda: not stage.is_known(), "the router has ended the victim")
        num_steps = await stage.end_others()
        stage.release()
        # The step that was held ends, and no step of anybody who has left follows it.
        await stage.cluster.idle()
        assert len((await stage.cluster.greedy(OTHER[:40], 3, cache_salt="after")).token_ids) == 3
        assert stage.num_steps == num_steps + 3


async def _read(call: Any) -> grpc.StatusCode:
    """Reads the stream to its end, whatever that is."""
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
        async for _ in call:
            pass
    code: grpc.StatusCode = await call.code()
    return code


async def test_a_cancel_on_a_mixed_worker(model: Path) -> None:
    async with running_cluster(model, [MIXED], max_num_batched_tokens=16) as cluster:
        for tokens in (0, 1, 2, 5):
            call = cluster.inference.GenerateStream(greedy_request(PROMPT, 200))
            received = 0
            while received < tokens:
                received += len((await call.read()).chunk.token_ids)
            call.cancel()
            await cluster.idle()


async def test_a_stop_string_ends_the_work_too(model: Path) -> None:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        text = (await cluster.greedy(PROMPT[:50], 60)).text
        request = greedy_request(PROMPT[:50], 300)
        request.stopping.stop.append(text[10:14])
        await cluster.stream(request)
        await cluster.idle()
