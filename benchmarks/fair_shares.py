"""Times the first tokens of a tenant beside one that sends far more than its share, on a prefill and a decode worker.

Three sides take turns on one cluster: the other tenant sends one request after the other; it keeps many under way; and
the same flood comes with the first tenant's own key, so that the router takes both for one. Only ratios tell
something: the machine serves, and sends too.
"""

from __future__ import annotations

import asyncio
import hashlib
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.cluster import Up, cluster, make_request
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.streaming import stream_grpc
from services.router.tenants.keys import new_key

_PROMPT_TOKENS, _OUTPUT_TOKENS = 128, 32
_FLOOD = 24
"""Requests that the other tenant keeps under way: several times what the decode worker has room for."""
_NUM_REQUESTS, _PAUSE_S = 12, 0.5
_SIDES = {"beside one": ("light", "other", 1), "beside a flood": ("light", "other", _FLOOD)}
_AS_ONE = "with the flood as one tenant"
_POOL_BLOCKS = 80


def measure(model: str, precision: Precision, repeats: int) -> Findings:
    keys = {name: new_key() for name in ("light", "other")}
    ttft_ms: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tenants.yaml"
        file.write_text("tenants:\n" + "".join(_tenant(name, key) for name, key in keys.items()))
        flags = ("--prefill", "1", "--decode", "1", "--threads", "1", "--kv-blocks", str(_POOL_BLOCKS))
        with cluster(model, precision, *flags, "--tenants", str(file)) as up:
            for number in range(repeats):
                for side, (mine, others, most) in (_SIDES | {_AS_ONE: ("light", "light", _FLOOD)}).items():
                    ttft_ms[side] += [asyncio.run(_median_ttft_ms(up, (number, side), keys[mine], keys[others], most))]
    alone, flooded, as_one = (ttft_ms[side] for side in (*_SIDES, _AS_ONE))
    return [
        *(Figure(f"fair shares: TTFT p50 {side}", "ms", tuple(values)) for side, values in ttft_ms.items()),
        ratio("fair shares: a flood over one", flooded, alone, ""),
        ratio("fair shares: a flood as one tenant over the flood", as_one, flooded, "> 1"),
    ]


def _tenant(name: str, key: str) -> str:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return f"  {name}:\n    keys: [{{id: {key.split('_')[1]}, sha256: {digest}}}]\n"


async def _median_ttft_ms(up: Up, seed: object, mine: str, others: str, most: int) -> float:
    """Returns the median TTFT of some requests with the key `mine`, while `most` others are under way."""
    async with grpc.aio.insecure_channel(up.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)

        async def send(name: object, key: str) -> float:
            request = make_request((seed, name), _PROMPT_TOKENS, _OUTPUT_TOKENS)
            answer = await stream_grpc(stub, request, metadata=(("authorization", f"Bearer {key}"),))
            if not answer.complete:
                raise RuntimeError(f"a request was refused: {answer.refused}")
            return answer.ttft_ms

        async def send_on(number: int) -> None:
            count = 0
            while True:
                await send((number, count), others)
                count += 1

        flood = [asyncio.create_task(send_on(number)) for number in range(most)]
        try:
            await asyncio.sleep(2.0)
            times = []
            for number in range(_NUM_REQUESTS):
                times.append(await send(number, mine))
                await asyncio.sleep(_PAUSE_S)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.gather(*flood, return_exceptions=True)
    return statistics.median(times)
