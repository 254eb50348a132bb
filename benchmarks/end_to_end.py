"""A real `baton up`: time to ready, handoffs at 2048 in / 128 out, throughput of one mixed worker, memory."""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc
import psutil

from baton.v1 import control_pb2, inference_pb2, inference_pb2_grpc, types_pb2
from benchmarks.figure import Figure
from services.cli.client import control

_READY_WITHIN_S = 120.0


@dataclass(frozen=True)
class Up:
    address: str
    control: str
    ready_s: float
    """Seconds until `ready`."""

    def status(self) -> control_pb2.GetStatusResponse:
        with control(self.control, "") as call:
            return call("GetStatus", control_pb2.GetStatusRequest(), 10.0)


@contextlib.contextmanager
def cluster(model: str, *flags: str) -> Iterator[Up]:
    """A `baton up` that is ready, and is ended with SIGTERM."""
    command = [sys.executable, "-m", "services.cli.main", "up", "--model", model, "--port", "0", "--dtype", "bfloat16"]
    started = time.perf_counter()
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            addresses = {}
            for line in process.stdout:
                words = line.split()
                if words[0] in ("router", "control"):
                    addresses[words[0]] = words[1]
                if words == ["ready"]:
                    break
                if time.perf_counter() - started > _READY_WITHIN_S:
                    raise RuntimeError("baton up did not become ready")
            else:
                raise RuntimeError("baton up ended before it was ready")
            yield Up(addresses["router"], addresses["control"], time.perf_counter() - started)
        finally:
            process.terminate()
            process.wait(timeout=60)


def measure(model: str, repeats: int) -> list[Figure]:
    figures: list[Figure] = []
    with cluster(model) as up:
        figures.append(Figure("baton up: ready, warm model cache", "s", (up.ready_s,), "<= 25"))
        with grpc.insecure_channel(up.address) as channel:
            figures += _handoffs(channel, repeats)
        figures += _memory(up.status())
    with cluster(model, "--mixed", "1") as up, grpc.insecure_channel(up.address) as channel:
        samples = tuple(_throughput(channel, seed) for seed in range(repeats))
        figures.append(Figure("end to end: 64 x (256 in, 64 out), 1 mixed", "tok/s", samples, ">= 300 on AMX"))
    return figures


def make_request(seed: object, num_prompt_tokens: int, max_tokens: int) -> inference_pb2.GenerateRequest:
    prompt = random.Random(str(seed)).choices(range(100, 40_000), k=num_prompt_tokens)
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def _handoffs(channel: grpc.Channel, repeats: int) -> list[Figure]:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    stub.Generate(make_request("warm", 64, 4))
    total, ttft, exposed, overlapped, share, rate = [], [], [], [], [], []
    for seed in range(repeats):
        timings = stub.Generate(make_request(seed, 2048 - 200, 128)).completion.timings
        total.append(timings.total_ms)
        ttft.append(timings.ttft_ms)
        exposed.append(timings.transfer_exposed_ms)
        overlapped.append(timings.transfer_overlapped_ms)
        share.append(100 * timings.transfer_exposed_ms / timings.total_ms)
        rate.append(127 / (timings.total_ms - timings.ttft_ms) * 1000)
    what = "1848 in / 128 out, 1 prefill + 1 decode"
    return [
        Figure(f"end to end: {what}", "ms", tuple(total)),
        Figure("  time to first token", "ms", tuple(ttft)),
        Figure("  decode, one stream", "tok/s", tuple(rate)),
        Figure("  transfer beside prefill", "ms", tuple(overlapped)),
        Figure("  exposed transfer", "ms", tuple(exposed)),
        Figure("  exposed transfer, of end to end", "%", tuple(share), "<= 2"),
    ]


def _memory(status: control_pb2.GetStatusResponse) -> list[Figure]:
    """PSS without other workers' pools: what is mapped of a memfd is counted once, for its owner."""
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
