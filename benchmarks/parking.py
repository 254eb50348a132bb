"""Sends more prompts at once than a decode worker has room for, to a cluster without a store and to one with a store.

Without a store, prompts wait until decode has room for their KV. With one they are computed one after the other, and
their KV waits at the store. One prefill and one decode worker, each with one thread; both have pools of the same size,
in which a few of the sequences fit. The rounds alternate, so that what disturbs the machine meets both sides.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.answers import Answer
from benchmarks.cluster import Up, cluster, make_request
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.streaming import stream_grpc

_PROMPT_TOKENS, _OUTPUT_TOKENS, _NUM_REQUESTS = 128, 160, 16
_POOL_BLOCKS = 60
"""Of 16 tokens: three sequences of 288 tokens, and what an admission leaves free for them to grow."""
_WARM_UP = 2
_STORES = {"without a store": "0", "with a store": "1"}


@dataclass(frozen=True)
class Burst:
    """Keeps what one burst of requests has shown."""

    answers: list[Answer]
    seconds: float
    """Until the last answer was complete."""
    num_parked: int
    """The most handoffs that waited at the store at once."""
    num_preemptions: int
    """Sequences whose blocks the decode worker took for others: it computes them again."""

    @property
    def prefill_rate(self) -> float:
        """Returns prompt tokens a second, until the last first token."""
        return _NUM_REQUESTS * _PROMPT_TOKENS / max(answer.ttft_ms / 1000 for answer in self.answers)

    @property
    def output_rate(self) -> float:
        return _NUM_REQUESTS * _OUTPUT_TOKENS / self.seconds


def measure(model: str, precision: Precision, repeats: int) -> Findings:
    bursts: dict[str, list[Burst]] = defaultdict(list)
    for number in range(repeats):
        for name, num_stores in _STORES.items():
            flags = ("--prefill", "1", "--decode", "1", "--threads", "1", "--kv-blocks", str(_POOL_BLOCKS))
            with cluster(model, precision, *flags, "--kvtransfer", num_stores, "--kvtransfer-bytes", "1GiB") as up:
                bursts[name].append(asyncio.run(_burst(up, number)))
    found: Findings = []
    for name, some in bursts.items():
        ttft = [sorted(answer.ttft_ms for answer in burst.answers) for burst in some]
        found += [
            Figure(f"{name}: prompts computed", "tok/s", tuple(burst.prefill_rate for burst in some)),
            Figure(f"{name}: TTFT p50", "ms", tuple(map(statistics.median, ttft))),
            Figure(f"{name}: TTFT of the last", "ms", tuple(each[-1] for each in ttft)),
            Figure(f"{name}: output", "tok/s", tuple(burst.output_rate for burst in some)),
            Figure(f"{name}: preemptions", "", tuple(float(burst.num_preemptions) for burst in some)),
        ]
    without, with_one = bursts.values()
    return [
        Figure(
            f"parking: most handoffs at the store at once, of {_NUM_REQUESTS}",
            "",
            tuple(float(burst.num_parked) for burst in with_one),
        ),
        *found,
        ratio(
            "with over without: prompts computed",
            [burst.prefill_rate for burst in with_one],
            [burst.prefill_rate for burst in without],
            "> 1",
        ),
        ratio(
            "with over without: output",
            [burst.output_rate for burst in with_one],
            [burst.output_rate for burst in without],
            ">= 0.95",
        ),
    ]


async def _burst(up: Up, number: int) -> Burst:
    async with grpc.aio.insecure_channel(up.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        for warm_up in range(_WARM_UP):
            await stream_grpc(stub, make_request(f"warm {number} {warm_up}", _PROMPT_TOKENS, 8))
        most, over = 0, asyncio.Event()

        async def watch() -> None:
            nonlocal most
            while not over.is_set():
                status = await asyncio.to_thread(up.status)
                stores = [each for each in status.workers if each.worker.worker_id.startswith("store")]
                most = max([most, *(each.load.num_leases for each in stores)])
                await asyncio.sleep(0.5)

        watching = asyncio.create_task(watch())
        began_s = time.perf_counter()
        requests = [make_request(f"{number} {index}", _PROMPT_TOKENS, _OUTPUT_TOKENS) for index in range(_NUM_REQUESTS)]
        answers = await asyncio.gather(*(stream_grpc(stub, request) for request in requests))
        seconds = time.perf_counter() - began_s
        over.set()
        await watching
        preemptions = sum(each.load.num_preemptions for each in up.status().workers)
    assert all(len(answer.token_times_s) == _OUTPUT_TOKENS for answer in answers), "every answer is complete"
    return Burst(list(answers), seconds, most, preemptions)
