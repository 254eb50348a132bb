"""Measures a real `baton up`: time to ready, handoffs at 2048 in / 128 out, throughput of one mixed worker, memory."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import psutil

from baton.v1 import control_pb2, inference_pb2_grpc
from benchmarks.cluster import cluster, make_request
from benchmarks.figure import Figure
from benchmarks.precision import Precision

_PROMPT_TOKENS, _OUTPUT_TOKENS = 2048, 128


def measure(model: str, precision: Precision, repeats: int) -> list[Figure]:
    figures: list[Figure] = []
    with cluster(model, precision) as up:
        figures.append(Figure("baton up: ready, warm model cache", "s", (up.ready_s,), "<= 8"))
        with grpc.insecure_channel(up.address) as channel:
            figures += _handoffs(channel, repeats)
        figures += _memory(up.status())
    with cluster(model, precision, "--mixed", "1") as up, grpc.insecure_channel(up.address) as channel:
        samples = tuple(_throughput(channel, seed) for seed in range(repeats))
        figures.append(Figure("end to end: 64 x (256 in, 64 out), 1 mixed", "tok/s", samples, ">= 300 on AMX"))
    return figures


def _handoffs(channel: grpc.Channel, repeats: int) -> list[Figure]:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    stub.Generate(make_request("warm", 64, 4))
    total, ttft, exposed, overlapped, share, rate = [], [], [], [], [], []
    for seed in range(repeats):
        timings = stub.Generate(make_request(seed, _PROMPT_TOKENS, _OUTPUT_TOKENS)).completion.timings
        total.append(timings.total_ms)
        ttft.append(timings.ttft_ms)
        exposed.append(timings.transfer_exposed_ms)
        overlapped.append(timings.transfer_overlapped_ms)
        share.append(100 * timings.transfer_exposed_ms / timings.total_ms)
        rate.append((_OUTPUT_TOKENS - 1) / (timings.total_ms - timings.ttft_ms) * 1000)
    what = f"{_PROMPT_TOKENS} in / {_OUTPUT_TOKENS} out, 1 prefill + 1 decode"
    return [
        Figure(f"end to end: {what}", "ms", tuple(total)),
        Figure("  time to first token", "ms", tuple(ttft)),
        Figure("  decode, one stream", "tok/s", tuple(rate)),
        Figure("  transfer beside prefill", "ms", tuple(overlapped)),
        Figure("  exposed transfer", "ms", tuple(exposed)),
        Figure("  exposed transfer, of end to end", "%", tuple(share), "<= 0.3"),
    ]


def _memory(status: control_pb2.GetStatusResponse) -> list[Figure]:
    """Measures PSS without other workers' pools: what is mapped of a memfd is counted once, for its owner."""
    figures = []
    for entry in status.workers:
        maps = psutil.Process(entry.worker.pid).memory_maps(grouped=False)
        own = sum(entry.pss for entry in maps if "memfd:" not in entry.path)
        pools = [entry.rss for entry in maps if "memfd:" in entry.path and "w" in entry.perms]
        figures.append(
            Figure(
                f"memory: {entry.worker.worker_id} without its pool",
                "MB",
                (own / 1e6,),
                "<= weights (270 MB) + 700",
            )
        )
        figures.append(Figure(f"memory: {entry.worker.worker_id} pool in use", "MB", (sum(pools) / 1e6,)))
    return figures


def _throughput(channel: grpc.Channel, seed: int) -> float:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    requests = [make_request((seed, n), 256, 64) for n in range(64)]
    with ThreadPoolExecutor(64) as pool:
        started = time.perf_counter()
        tokens = sum(answer.completion.usage.output_tokens for answer in pool.map(stub.Generate, requests))
        return tokens / (time.perf_counter() - started)
