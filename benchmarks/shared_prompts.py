"""Sends prompts that begin with one of a few system prompts to a real `baton up`, once with each preset of placement.

`python -m benchmarks.shared_prompts [--model MODEL] [--presets …] [--repeats 3]`. Two prefill and two decode workers
share the machine. A prefill worker's pool has room for two thirds of the system prompts, and for the requests that run:
whoever sends each of them to both workers has them computed again and again. Clients wait for an answer before they ask
again.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.answers import Answer
from benchmarks.cluster import cluster, request_of
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.result import Result
from benchmarks.streaming import stream_grpc
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL

_NUM_PROMPTS, _PROMPT_TOKENS, _OWN_TOKENS, _OUTPUT_TOKENS = 12, 512, 32, 8
_BLOCK = 16
_POOL_BLOCKS = (2 * _NUM_PROMPTS * _PROMPT_TOKENS) // (3 * _BLOCK) + 4 * (_PROMPT_TOKENS + 64) // _BLOCK
_CLIENTS = 3
_SECONDS = 25.0


def measure(model: str, precision: Precision, presets: list[str], repeats: int) -> Findings:
    times: dict[str, list[float]] = defaultdict(list)
    rates: dict[str, list[float]] = defaultdict(list)
    for _, preset in itertools.product(range(repeats), presets):
        flags = ("--prefill", "2", "--decode", "2", "--threads", "1", "--policy", preset)
        with cluster(model, precision, *flags, "--kv-blocks", str(_POOL_BLOCKS)) as up:
            answers = asyncio.run(_closed_loop(up.address))
            loads = [each.load for each in up.status().workers if "prefill" in each.worker.worker_id]
        times[preset].append(statistics.median(answer.ttft_ms for answer in answers))
        rates[preset].append(
            100 * sum(load.prefix_tokens_hit for load in loads) / sum(load.prefix_tokens_queried for load in loads)
        )
    found: Findings = []
    for preset in presets:
        found.append(Figure(f"{preset}: prompt tokens found in prefix caches", "%", tuple(rates[preset])))
        found.append(Figure(f"{preset}: TTFT p50", "ms", tuple(times[preset])))
        if preset != presets[0]:
            found.append(ratio(f"  over {presets[0]}", times[preset], times[presets[0]], "< 1"))
    return found


async def _closed_loop(address: str) -> list[Answer]:
    """Returns the answers of the second half: caches are filled by the first."""
    chance = random.Random(7)
    systems = [chance.choices(range(100, 40_000), k=_PROMPT_TOKENS) for _ in range(_NUM_PROMPTS)]
    answers: list[Answer] = []
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        began_s = time.monotonic()

        async def client() -> None:
            while time.monotonic() - began_s < _SECONDS:
                prompt = chance.choice(systems) + chance.choices(range(100, 40_000), k=_OWN_TOKENS)
                begun_s = time.monotonic()
                answer = await stream_grpc(stub, request_of(prompt, _OUTPUT_TOKENS))
                if begun_s - began_s >= _SECONDS / 2:
                    answers.append(answer)

        await asyncio.gather(*(client() for _ in range(_CLIENTS)))
    return answers


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shared_prompts", description=__doc__)
    parser.add_argument("--model", default="", help="by default the one that Baton serves by default")
    presets = "least_loaded,prefix_aware,hybrid,pressure"
    parser.add_argument("--presets", default=presets, help="the first is what others are compared with")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--json", type=Path, default=Path("out/shared-prompts.json"), help="the result file")
    arguments = parser.parse_args()
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    name = arguments.model or DEFAULT_MODEL
    precision = Precision().chosen_for(resolve_model(name).path)
    result.add(measure(name, precision, arguments.presets.split(","), arguments.repeats))
    result.write(arguments.json)


if __name__ == "__main__":
    main()
