"""Tests in few strokes what a unit cannot: real processes, as `baton up` starts them, over a tiny model.

No test waits for a phase, and none has a bound but the guard against hanging. What exactly happens in which phase is
proved by pure tests, the simulator and `make faults`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx2
import pytest

from baton.v1 import control_pb2, inference_pb2, types_pb2
from tests.support.cluster import Answer, greedy_request, receive
from tests.support.equality import GreedyReference
from tests.support.models import tiny_model
from tests.support.patience import HANG_S
from tests.support.processes import Up, baton
from tests.support.real_cluster import RouterClient, Status, holds_nothing
from tests.support.trusted import dial

PROMPT = list(range(5, 75))
LONG = 400
"""Tokens: a stream of so many takes seconds."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=12)


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@contextlib.contextmanager
def running(model: Path, folder: Path, *flags: str) -> Iterator[Up]:
    with Up(model, folder, "--prefill", "1", "--decode", "2", *flags) as up:
        up.read_until("^ready$")
        yield up


@pytest.fixture(scope="module")
def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Yields the cluster of all tests that end none of its processes."""
    with running(model, tmp_path_factory.mktemp("shared"), "--transport", "shm") as up:
        yield up


@pytest.fixture(scope="module")
def doomed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    with running(model, tmp_path_factory.mktemp("doomed"), "--transport", "grpc") as up:
        yield up


@contextlib.asynccontextmanager
async def client_of(up: Up) -> AsyncIterator[RouterClient]:
    """Yields what asks it, once every pair of workers has proved that it can hand over."""
    async with dial(up.target()) as channel, dial(up.control()) as control:
        client = RouterClient(channel, control)
        await client.until(are_proven, "every pair has handed over", HANG_S)
        yield client


def are_proven(status: Status) -> bool:
    return len(status.pairs) == 2 and all(pair.state == control_pb2.PAIR_STATE_PROVEN for pair in status.pairs)


def is_idle(status: Status) -> bool:
    requests = status.num_queued + status.num_prefilling + status.num_parked + status.num_decoding
    return requests == 0 and all(holds_nothing(each) for each in status.workers)


def check(reference: GreedyReference, answer: Answer, transport: types_pb2.Transport) -> None:
    reference.check(PROMPT, answer.token_ids)
    assert answer.completion is not None
    assert answer.completion.workers.prefill == "prefill-0"
    assert answer.completion.workers.decode.startswith("decode-")
    assert answer.completion.timings.transport == transport


async def test_it_serves_over_grpc_and_http_and_split_is_equal_over_shared_memory(
    shared: Up, reference: GreedyReference
) -> None:
    async with client_of(shared) as client:
        check(reference, await client.stream(greedy_request(PROMPT, 40)), types_pb2.TRANSPORT_SHM)
    http = next(line.split()[1] for line in shared.lines if line.startswith("http "))
    body = {"model": "tiny-llama", "prompt": "The baton is", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    async with httpx2.AsyncClient(timeout=HANG_S, trust_env=False) as web:
        answer = await web.post(f"{http}/completions", json=body)
    assert answer.json()["usage"]["completion_tokens"] == 4


async def test_split_is_equal_over_grpc_and_goes_on_when_its_decode_worker_is_killed(
    doomed: Up, reference: GreedyReference
) -> None:
    async with client_of(doomed) as client:
        check(reference, await client.stream(greedy_request(PROMPT, 40)), types_pb2.TRANSPORT_GRPC)
        stream = client.inference.GenerateStream(greedy_request(PROMPT, LONG), timeout=HANG_S)

        async def with_a_kill() -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
            num_tokens, killed = 0, False
            async for message in stream:
                num_tokens += len(message.chunk.token_ids)
                if num_tokens > 5 and not killed:
                    status = await client.status()
                    name = next(each.worker.worker_id for each in status.workers if each.load.num_running)
                    os.kill(doomed.pids()[name], signal.SIGKILL)
                    killed = True
                yield message
            assert killed

        answer = await receive(with_a_kill())
        assert len(answer.token_ids) == LONG
        reference.check(PROMPT, answer.token_ids)
        assert answer.completion is not None
        assert answer.completion.workers.retries == 1


async def test_a_cancelled_stream_frees_everything(shared: Up) -> None:
    async with client_of(shared) as client:
        stream = client.inference.GenerateStream(greedy_request(PROMPT, LONG), timeout=HANG_S)
        async for message in stream:
            if message.chunk.token_ids:
                break
        stream.cancel()
        await client.until(is_idle, "nothing is held", HANG_S)


async def test_a_worker_that_is_drained_ends_its_streams_first(doomed: Up, reference: GreedyReference) -> None:
    async with client_of(doomed) as client:
        running = asyncio.create_task(client.stream(greedy_request(PROMPT, LONG)))
        status = await client.until(
            lambda status: any(each.load.num_running for each in status.workers), "it runs", HANG_S
        )
        name = next(each.worker.worker_id for each in status.workers if each.load.num_running)
        drained = await asyncio.to_thread(doomed.baton, "drain", name)
        assert drained.returncode == 0, drained.stderr
        assert drained.stdout.endswith(" finished there, 0 moved\n"), drained.stdout
        answer = await running
        reference.check(PROMPT, answer.token_ids)
        assert len(answer.token_ids) == LONG


async def test_a_trace_shows_the_phases_and_the_end_leaves_nothing(shared: Up) -> None:
    async with client_of(shared) as client:
        answer = await client.stream(greedy_request(PROMPT, 8))
    shared.stop(signal.SIGINT)
    assert answer.prompt_info is not None
    shown = baton(["trace", str(shared.trace_file), "--request", answer.prompt_info.request_id], shared.temp)
    assert shown.returncode == 0, shown.stderr
    for phase in ("queue", "prefill", "kv.transfer", "decode"):
        assert phase in shown.stdout, shown.stdout
