"""Runs a real `baton up` that is measured from outside: started, ready, stopped; and the requests that are sent to
it."""

from __future__ import annotations

import contextlib
import os
import random
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from baton.v1 import control_pb2, inference_pb2, types_pb2
from benchmarks.precision import Precision
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
def cluster(model: str, precision: Precision, *flags: str, module: str = "services.cli.main") -> Iterator[Up]:
    """Runs a `baton up` that is ready, and ends it with SIGTERM. What it logs goes to `out/bench-up.log`. `module` is
    run as `baton`."""
    command = [sys.executable, "-m", module, "up", "--model", model, "--port", "0"]
    command += ["--split", "always"]  # what is measured is splitting, whether it pays or not
    log = Path("out/bench-up.log")
    log.parent.mkdir(exist_ok=True)
    started = time.perf_counter()
    with (
        open(log, "w") as messages,
        subprocess.Popen(
            [*command, *precision.up_flags(), *flags], stdout=subprocess.PIPE, stderr=messages, text=True
        ) as process,
    ):
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
                    raise RuntimeError(f"baton up did not become ready; see {log}")
            else:
                raise RuntimeError(f"baton up ended before it was ready; see {log}")
            yield Up(addresses["router"], addresses["control"], time.perf_counter() - started)
        finally:
            process.terminate()
            process.wait(timeout=60)


def make_request(seed: object, num_prompt_tokens: int, max_tokens: int) -> inference_pb2.GenerateRequest:
    """Returns a greedy request of `max_tokens` with a prompt of random tokens, the same for the same seed."""
    return request_of(random.Random(str(seed)).choices(range(100, 40_000), k=num_prompt_tokens), max_tokens)


def request_of(prompt: list[int], max_tokens: int) -> inference_pb2.GenerateRequest:
    """Returns a greedy request that ends at `max_tokens` and not before."""
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
    )


def confine(pid: int, cores: Collection[int]) -> None:
    """Lets all threads of a process run on these cores only. Threads that they start later inherit it."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
