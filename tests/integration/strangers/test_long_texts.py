"""Tests long texts beside a running stream: in real processes, since what is measured is who keeps the stream waiting.

On a machine with fewer processors than work anything that runs makes a stream wait. So two figures are taken: what the
stream's own router did to its event loop (tests/support/watched_router.py), which no neighbour changes by much; and the
longest gap that the client saw, beside the one it sees while another router on the machine is sent the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import statistics
import sys
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import grpc
import httpx2
import pytest

from baton.v1 import control_pb2, inference_pb2, inference_pb2_grpc
from benchmarks.ports import free_ports
from tests.support.cluster import greedy_request
from tests.support.models import tiny_model
from tests.support.real_cluster import RealCluster, real_cluster
from tests.support.watched_router import Notes

pytestmark = [pytest.mark.clock, pytest.mark.long]

CONTEXT_TOKENS = 1 << 16
LONG = "The baton is passed from the runner that prefills.\n" * 13_020
"""664 kB: more tokens than the context has, as only the tokenizer can tell."""
LONGEST = LONG * 16
NUM_LONG = 30
MAX_GROWTH_S = 0.05
# An odd number: the median is one of them. All are played, and what is held for a text shows in each.
NUM_ROUNDS = 3
_UNLIMITED = [("grpc.max_send_message_length", -1)]


class Gaps:
    """Watches a stream under way, and measures the longest pause between two of its messages."""

    def __init__(self, cluster: RealCluster) -> None:
        asked = greedy_request([1, 2, 3, 4, 5], 60_000, request_id="watched")
        self._call = cluster.router.inference.GenerateStream(asked)
        self.num_tokens = 0
        self._longest_s = 0.0
        self._last_s = time.perf_counter()
        self._grown = asyncio.Event()

    async def read(self) -> None:
        async for message in self._call:
            now = time.perf_counter()
            self._longest_s = max(self._longest_s, now - self._last_s)
            self._last_s = now
            self.num_tokens += len(message.chunk.token_ids)
            self._grown.set()

    def take(self) -> float:
        """Returns the longest pause since the last time, the current one included."""
        longest_s = max(self._longest_s, time.perf_counter() - self._last_s)
        self._longest_s = 0.0
        return longest_s

    async def more(self, num_tokens: int) -> None:
        wanted = self.num_tokens + num_tokens
        while self.num_tokens < wanted:
            self._grown.clear()
            async with asyncio.timeout(60):
                await self._grown.wait()

    def cancel(self) -> None:
        self._call.cancel()


def attack(door: str, port: int, num_long: int = NUM_LONG) -> int:
    """Sends `num_long` long texts and a very long one at once, and returns how many were refused as too long.

    It is run in a process of its own: what sending costs must not be seen in the stream, which is read in this one."""
    return asyncio.run((_over_grpc if door == "grpc" else _over_http)(port, [LONG] * num_long + [LONGEST]))


async def _over_grpc(port: int, texts: list[str]) -> int:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_UNLIMITED) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def refused(text: str) -> bool:
            try:
                await stub.Generate(inference_pb2.GenerateRequest(text=text))  # a deadline could refuse it
            except grpc.aio.AioRpcError as error:
                return error.code() is grpc.StatusCode.INVALID_ARGUMENT
            return False

        return sum(await asyncio.gather(*map(refused, texts)))


async def _over_http(port: int, texts: list[str]) -> int:
    async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120.0, trust_env=False) as client:

        async def refused(text: str) -> bool:
            return (await client.post("/v1/completions", json={"prompt": text})).status_code == 400

        return sum(await asyncio.gather(*map(refused, texts)))


@dataclass(frozen=True)
class Round:
    """Keeps the longest pauses of the watched router, while another one was sent the texts and while it was."""

    quiet_own_s: float
    own_s: float
    other_gap_s: float
    gap_s: float

    def __str__(self) -> str:
        own, gap = (self.quiet_own_s, self.own_s), (self.other_gap_s, self.gap_s)
        return "own part {:.1f} -> {:.1f} ms, gap {:.0f} -> {:.0f} ms".format(*(1000 * each for each in (*own, *gap)))


def own_growth_s(rounds: list[Round]) -> float:
    """Returns the growth of the router's own part: the median of all rounds."""
    return statistics.median(each.own_s - each.quiet_own_s for each in rounds)


def gap_growth_s(rounds: list[Round]) -> float:
    """Returns the growth of the client's gap: the median of all rounds, less what gaps differ by from round to round
    while the router has nothing to do with them."""
    others = [each.other_gap_s for each in rounds]
    return statistics.median(each.gap_s for each in rounds) - statistics.median(others) - (max(others) - min(others))


class Play:
    """Runs two routers, their workers, a stream through the first router, and a process that sends long texts."""

    def __init__(self, cluster: RealCluster, notes: Notes, door: str, http_ports: list[int]) -> None:
        grpc_ports = [cluster[f"router-{index}"].port for index in (0, 1)]
        self._watched, self._other = http_ports if door == "http" else grpc_ports
        self._notes = notes
        self._stream = Gaps(cluster)
        self._sender = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        self._send = functools.partial(asyncio.get_running_loop().run_in_executor, self._sender, attack, door)

    async def __aenter__(self) -> Play:
        """Returns when each part has run once."""
        self.reading = asyncio.create_task(self._stream.read())
        for port in (self._watched, self._other):
            assert await self._send(port, 1) == 2
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stream.cancel()
        await asyncio.gather(self.reading, return_exceptions=True)
        await asyncio.to_thread(self._sender.shutdown)

    async def round(self, num_long: int) -> Round:
        quiet_own_s, other_gap_s = await self._attack(self._other, num_long)
        own_s, gap_s = await self._attack(self._watched, num_long)
        played = Round(quiet_own_s, own_s, other_gap_s, gap_s)
        print(played)
        return played

    async def _attack(self, port: int, num_long: int) -> tuple[float, float]:
        """Returns the router's own part and the client's gap."""
        await self._stream.more(20)
        self._stream.take()
        begin_s = time.monotonic()
        assert await self._send(port, num_long) == num_long + 1
        gap_s = self._stream.take()
        await self._stream.more(1)  # what kept the loop waiting is noted when it goes on
        return self._notes.longest_own_s(begin_s, time.monotonic()), gap_s


@contextlib.asynccontextmanager
async def watched_cluster(folder: Path, mutant: str = "none") -> AsyncIterator[tuple[RealCluster, Notes, list[int]]]:
    """Yields a cluster with what its first router notes, which alone is watched and may be a mutant, and both routers'
    HTTP ports."""
    model = tiny_model("llama", folder, max_position_embeddings=CONTEXT_TOKENS)
    temp = folder / "temp"
    temp.mkdir()
    notes = Notes(folder / "notes")
    flags = ("--kv-blocks", str(CONTEXT_TOKENS // 16), "--dtype", "float32", "--threads", "1")
    http_ports = free_ports(2)
    # A worker without a processor is silent too. What the router does to its sessions the workers tell, after 5 s.
    routers = [("--http-port", str(port), "--silence-s", "20") for port in http_ports]
    program = (sys.executable, "-m", "tests.support.watched_router", str(notes.path), mutant)
    workers = ["prefill-0", "decode-0"]
    async with real_cluster(model, temp, workers, *flags, routers=routers, router_programs=[program]) as cluster:
        yield cluster, notes, http_ports


@pytest.mark.timeout(600)
@pytest.mark.parametrize("door", ["grpc", "http"])
async def test_a_running_stream_does_not_wait_for_long_texts(tmp_path: Path, door: str) -> None:
    async with watched_cluster(tmp_path) as (cluster, notes, http_ports):
        async with Play(cluster, notes, door, http_ports) as play:
            rounds = [await play.round(NUM_LONG) for _ in range(NUM_ROUNDS)]
            assert not play.reading.done(), "the stream goes on"
            status = await cluster.router.status()
        assert own_growth_s(rounds) <= MAX_GROWTH_S, [str(each) for each in rounds]
        assert gap_growth_s(rounds) <= MAX_GROWTH_S, [str(each) for each in rounds]
        assert notes.lost() == [], "no session is lost"
        assert [each.state for each in status.workers] == [control_pb2.WORKER_STATE_READY] * 2
        await cluster.idle()


@pytest.mark.timeout(300)
@pytest.mark.parametrize("mutant", ["holds-the-lock", "on-the-loop"])
async def test_a_router_that_waits_for_its_tokenizer_is_seen(tmp_path: Path, mutant: str) -> None:
    """The figure of the test above is found to be worse for routers that are known to be worse: a single text is
    enough."""
    async with watched_cluster(tmp_path, mutant) as (cluster, notes, http_ports):
        async with Play(cluster, notes, "grpc", http_ports) as play:
            rounds = [await play.round(1)]
        assert own_growth_s(rounds) > MAX_GROWTH_S, [str(each) for each in rounds]
        await cluster.idle()
