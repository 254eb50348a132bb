"""Measures what serving costs: many streams over gRPC and over HTTP against the same engine alone, on one core each.

One mixed worker of a real `baton up` has the first core; the router and the clients, which are this process, have the
others. The engine alone has that first core too, and runs while the cluster does nothing. They take turns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable

import grpc
import uvloop

from baton.v1 import inference_pb2_grpc
from benchmarks.answers import Answer
from benchmarks.cluster import Up, cluster, confine, make_request
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.settings import setting
from benchmarks.streaming import stream_grpc, stream_http
from benchmarks.turns import turn


@dataclasses.dataclass(frozen=True)
class ServeSettings:
    serve_streams: int = setting(32, "streams at once")
    serve_prompt: int = setting(64, "prompt tokens of each")
    serve_output: int = setting(128, "output tokens of each")


def measure(model: str, path: str, precision: Precision, repeats: int, settings: ServeSettings) -> Findings:
    """Measures serving of `model`, whose folder is `path`. Raises SystemExit if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("serve: a worker and the router need a core each, and there is one in all")
    options = {
        "model": path,
        "threads": 1,
        **dataclasses.asdict(precision),
        "cores": cores[:1],
        "max_num_batched_tokens": _WORKER_BATCHED_TOKENS,
    }
    samples: dict[str, list[float]] = {"alone": [], "gRPC": [], "HTTP": []}
    tokens = settings.serve_streams * settings.serve_output
    flags = ("--mixed", "1", "--threads", "1", "--kv-blocks", "2048", "--http-port", "0")
    with (
        turn("baton alone", [sys.executable, "-m", "benchmarks.alone", json.dumps(options)]) as alone,
        cluster(model, precision, *flags) as up,
    ):
        status = up.status()
        for pid in (status.router_pid, os.getpid()):
            confine(pid, cores[1:])
        try:
            for number in range(-1, repeats):  # the first warms up
                alone_s = alone.run(settings.serve_streams, settings.serve_prompt, settings.serve_output)
                samples["alone"].append(tokens / alone_s)
                samples["gRPC"].append(tokens / uvloop.run(_grpc_s(up, number, settings)))
                samples["HTTP"].append(tokens / uvloop.run(_http_s(up, status.http_port, number, settings)))
        finally:
            confine(os.getpid(), cores)
    what = f"{settings.serve_streams} x ({settings.serve_prompt} in, {settings.serve_output} out), one core"
    measured = {name: each[1:] for name, each in samples.items()}
    return [
        *(Figure(f"serve: {what}; {name}", "tok/s", tuple(each)) for name, each in measured.items()),
        ratio("  over gRPC, of alone", measured["gRPC"], measured["alone"], ">= 0.95"),
        ratio("  over HTTP, of alone", measured["HTTP"], measured["alone"], ">= 0.95"),
    ]


_WORKER_BATCHED_TOKENS = 512
"""The default of `baton mixed`: the engine alone must take steps of the same size."""


async def _grpc_s(up: Up, number: int, settings: ServeSettings) -> float:
    async with grpc.aio.insecure_channel(up.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        requests = [
            make_request(("grpc", number, n), settings.serve_prompt, settings.serve_output)
            for n in range(settings.serve_streams)
        ]
        return await _all_s([lambda r=request: stream_grpc(stub, r) for request in requests], settings)  # type: ignore[misc]


async def _http_s(up: Up, port: int, number: int, settings: ServeSettings) -> float:
    model = next(iter(up.status().models)).model_id
    host = up.address.rpartition(":")[0]
    prompts = [
        list(make_request(("http", number, n), settings.serve_prompt, 1).token_ids.ids)
        for n in range(settings.serve_streams)
    ]
    sends = [lambda p=prompt: stream_http(host, port, model, p, settings.serve_output) for prompt in prompts]  # type: ignore[misc]
    return await _all_s(sends, settings)


async def _all_s(sends: list[Callable[[], Awaitable[Answer]]], settings: ServeSettings) -> float:
    """Returns the seconds from the first request to the end of the last answer."""
    began_s = time.perf_counter()
    answers = await asyncio.gather(*(send() for send in sends))
    seconds = time.perf_counter() - began_s
    for answer in answers:
        if not answer.complete:
            raise RuntimeError(f"a stream ended with {answer.refused or 'no token'}")
    return seconds
