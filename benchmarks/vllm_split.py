"""Measures vLLM behind Baton's workers against vLLM by itself, and against vLLM's own split.

python -m benchmarks.vllm_split --vllm-python PYTHON [--only one,streams,handoff,kill] [--repeats N] [--json FILE]

one      a single stream and a batch from one vLLM worker under Baton, against vLLM's own server, both on all cores
streams  the time between tokens of streams while long prompts arrive: Baton's split on a core each, vLLM on all cores,
         and vLLM's split by its NixlConnector with a proxy in front of it
handoff  how much of a request its handoff takes that nothing else hides, where nothing else runs
kill     requests lost and blocks stranded when the process that runs prompts is killed under load

All are driven over the OpenAI-style HTTP API by the same client, one after the other in every round. vLLM gets the same
arguments everywhere. NIXL must be in vLLM's environment for the third, which --without-nixl leaves out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.cluster import make_request
from benchmarks.figure import Figure, ratio
from benchmarks.ports import free_ports
from benchmarks.result import Result
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL

_START_S = 240.0
_ENDED_S = 20.0
_TOKEN_IDS = range(1000, 40_000)


@dataclass
class Answered:
    """Is when the pieces of one answer came, in seconds of the monotonic clock."""

    began_s: float
    at_s: list[float] = field(default_factory=list)
    finished: bool = False
    error: str = ""

    @property
    def first_s(self) -> float:
        return self.at_s[0] - self.began_s

    @property
    def gaps_ms(self) -> list[float]:
        return [(after - before) * 1e3 for before, after in zip(self.at_s, self.at_s[1:], strict=False)]


@dataclass
class Side:
    """Is a running system: where it answers, what it is called, and what runs its prompts."""

    name: str
    port: int
    model: str
    prefill_pid: Callable[[], int]
    stranded: Callable[[], float]
    """Returns the share of KV blocks that somebody holds where answers are decoded."""
    grpc_port: int = 0
    """Of Baton's router."""


def ask(side: Side, prompt: Sequence[int], max_tokens: int, stop: threading.Event | None = None) -> Answered:
    """Streams an answer of exactly `max_tokens` tokens."""
    answer = Answered(time.monotonic())
    body = {
        "model": side.model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    connection = HTTPConnection("127.0.0.1", side.port, timeout=600)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            answer.error = f"{response.status}: {response.read(300)!r}"
            return answer
        for line in response:
            if line.startswith(b"data: [DONE]"):
                answer.finished = not answer.error
                break
            if line.startswith(b"data: "):
                piece = json.loads(line[6:])
                if "error" in piece:
                    answer.error = str(piece["error"])[:300]
                elif piece["choices"] and (piece["choices"][0]["text"] or piece["choices"][0].get("token_ids")):
                    answer.at_s.append(time.monotonic())
            if stop is not None and stop.is_set():
                break
    except OSError as error:
        answer.error = repr(error)
    finally:
        connection.close()
    return answer


def a_prompt(generator: random.Random, length: int) -> list[int]:
    return generator.choices(_TOKEN_IDS, k=length)


# -- the systems -------------------------------------------------------------------------------------------------------


class Systems:
    """Starts what is compared, each in a process group of its own, and ends it."""

    def __init__(self, vllm_python: Path, model: Path, num_blocks: int, block_size: int, max_model_len: int) -> None:
        self._python, self._model = vllm_python, model
        self._num_blocks, self._block_size, self._max_model_len = num_blocks, block_size, max_model_len
        self._log = Path(tempfile.mkdtemp(prefix="baton-bench-"))

    @contextlib.contextmanager
    def baton(self, *roles: str, num_batched_tokens: int = 2048) -> Iterator[Side]:
        http, grpc, control, metrics = free_ports(4)
        environment = {
            **os.environ,
            "BATON_VLLM_PYTHON": str(self._python),
            "BATON_BLOCK_SIZE": str(self._block_size),
            "BATON_MAX_MODEL_LEN": str(self._max_model_len),
            "BATON_MAX_NUM_BATCHED_TOKENS": str(num_batched_tokens),
        }
        command = [
            *(sys.executable, "-m", "services.cli.main", "up", *roles),
            *("--engine", "vllm", "--engine-arg", "enforce_eager=true", "--dtype", "float32"),
            *("--kv-blocks", str(self._num_blocks), "--model", str(self._model), "--split", "always"),
            *("--http-port", str(http), "--port", str(grpc), "--control-port", str(control)),
            *("--metrics-port", str(metrics)),
        ]
        with self._running("baton", command, environment) as process:
            name = self._model.name

            def status() -> Any:
                asked = [sys.executable, "-m", "services.cli.main", "status", "--json", "--target"]
                return json.loads(subprocess.check_output([*asked, f"127.0.0.1:{control}"], text=True))

            def worker_of(role: str) -> Any:
                return next(each for each in status()["workers"] if role in each["worker"]["roles"])

            def prefill_pid() -> int:
                return int(worker_of("prefill")["worker"]["pid"])

            def stranded() -> float:
                load = worker_of("decode")["load"]
                return sum(int(load[f"blocks_{kind}"]) for kind in ("importing", "leased", "active")) / self._num_blocks

            side = Side(f"Baton with vLLM ({' '.join(roles)})", http, name, prefill_pid, stranded, grpc)
            self._wait(side, process)
            yield side

    @contextlib.contextmanager
    def vllm(
        self, cores: str = "", kv: dict[str, Any] | None = None, num_batched_tokens: int = 2048, **more: str
    ) -> Iterator[Side]:
        (port,) = free_ports(1)
        command = [
            *(("taskset", "-c", cores) if cores else ()),
            *(str(self._python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(self._model)),
            *("--served-model-name", self._model.name, "--host", "127.0.0.1", "--port", str(port)),
            *("--enforce-eager", "--dtype", "float32", "--max-model-len", str(self._max_model_len)),
            *("--max-num-batched-tokens", str(num_batched_tokens), "--block-size", str(self._block_size)),
            *("--num-gpu-blocks-override", str(self._num_blocks + 1), "--kv-cache-memory-bytes", str(1 << 30)),
            *(("--kv-transfer-config", json.dumps(kv)) if kv else ()),
        ]
        # By itself it would leave one of the cores alone.
        both = {} if cores else {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
        environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "HF_HUB_OFFLINE": "1", **both, **more}
        with self._running(f"vllm-{port}", command, environment) as process:
            side = Side(
                f"vLLM, {num_batched_tokens} tokens a step",
                port,
                self._model.name,
                lambda: process.pid,
                lambda: _usage(port),
            )
            self._wait(side, process)
            yield side

    @contextlib.contextmanager
    def nixl(self) -> Iterator[Side]:
        """Yields vLLM's split, as its own documentation sets it up: two servers and a proxy."""
        kv = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu"}
        with contextlib.ExitStack() as stack:
            ports = free_ports(3)
            prefill, decode = [
                stack.enter_context(self.vllm(str(core), kv, VLLM_NIXL_SIDE_CHANNEL_PORT=str(ports[core])))
                for core in (0, 1)
            ]
            proxy = ThreadingHTTPServer(("127.0.0.1", ports[2]), _proxy_of(prefill.port, decode.port))
            proxy.daemon_threads = True
            threading.Thread(target=proxy.serve_forever, daemon=True).start()
            stack.callback(proxy.shutdown)
            yield Side("vLLM split by NIXL", ports[2], prefill.model, prefill.prefill_pid, decode.stranded)

    @contextlib.contextmanager
    def _running(self, name: str, command: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        with (self._log / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                command, env=environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        try:
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(_ENDED_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _wait(self, side: Side, process: subprocess.Popen[bytes]) -> None:
        until_s = time.monotonic() + _START_S
        while time.monotonic() < until_s:
            if process.poll() is not None:
                break
            if not ask(side, [1, 2, 3], 2).error:
                return
            time.sleep(0.5)
        raise SystemExit(f"{side.name} did not start; its output is in {self._log}")


def _usage(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("vllm:kv_cache_usage_perc"):
                return float(line.rpartition(" ")[2])
    raise ValueError("vLLM tells no usage of its KV cache")


def _proxy_of(prefill: int, decode: int) -> type[BaseHTTPRequestHandler]:
    """Returns a handler that does what vLLM's example proxy does: one token from the first server, the rest from the
    second, with the parameters of the KV transfer that the first has returned."""

    class Proxy(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            wanted = {"do_remote_decode": True, "do_remote_prefill": False}
            names = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
            first = {**body, "stream": False, "max_tokens": 1, "kv_transfer_params": {**wanted, **dict.fromkeys(names)}}
            try:
                params = json.loads(self._post(prefill, first).read())["kv_transfer_params"]
                response = self._post(decode, {**body, "kv_transfer_params": params})
            except (OSError, KeyError, ValueError) as error:
                self.send_error(502, repr(error))
                return
            self.send_response(response.status)
            self.end_headers()
            with contextlib.suppress(OSError):
                for line in response:
                    self.wfile.write(line)
                    self.wfile.flush()

        def _post(self, port: int, body: Any) -> Any:
            connection = HTTPConnection("127.0.0.1", port, timeout=600)
            connection.request("POST", self.path, json.dumps(body), {"content-type": "application/json"})
            return connection.getresponse()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Proxy


# -- what is measured --------------------------------------------------------------------------------------------------


def one(side: Side, seed: int, batch: int = 16) -> dict[str, float]:
    """Returns tokens a second of one stream, and of a batch."""
    generator = random.Random(seed)
    alone = ask(side, a_prompt(generator, 64), 64)
    prompts = [a_prompt(generator, 128) for _ in range(batch)]
    began_s = time.monotonic()
    with ThreadPoolExecutor(batch) as threads:
        answers = list(threads.map(lambda prompt: ask(side, prompt, 64), prompts))
    took_s = time.monotonic() - began_s
    assert all(answer.finished for answer in answers), [answer.error for answer in answers]
    return {"one stream": 63 / (alone.at_s[-1] - alone.at_s[0]), "batch": batch * 64 / took_s}


def streams(side: Side, seed: int, seconds: float, num_streams: int = 4) -> dict[str, float]:
    """Returns the time between tokens of streams while a prompt of 2,048 tokens arrives every 2 s."""
    generator = random.Random(seed)
    stop, found, arrived = threading.Event(), [], []
    with ThreadPoolExecutor(64) as threads:
        running = [threads.submit(ask, side, a_prompt(generator, 64), 1500, stop) for _ in range(num_streams)]
        time.sleep(3)
        from_s = time.monotonic()
        while time.monotonic() - from_s < seconds:
            arrived.append(threads.submit(ask, side, a_prompt(generator, 2048), 2))
            time.sleep(2)
        to_s = time.monotonic()
        stop.set()
        for each in running:
            answer = each.result()
            assert not answer.error, answer.error
            found += [
                (after - before) * 1e3
                for before, after in zip(answer.at_s, answer.at_s[1:], strict=False)
                if from_s <= after <= to_s
            ]
        firsts = [answer.first_s for each in arrived if (answer := each.result()).finished]
    found.sort()
    return {
        "ITL p50": statistics.median(found),
        "ITL p99": found[int(len(found) * 0.99)],
        "TTFT p50": statistics.median(firsts),
        "prompts that were answered": len(firsts) / len(arrived),
    }


def handoff(side: Side, seed: int) -> dict[str, float]:
    """Returns what the transfer of prompts of 1,500 tokens adds to answers of 64, as the router tells."""
    with grpc.insecure_channel(f"127.0.0.1:{side.grpc_port}") as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        requests = [make_request((seed, number), 1500, 64) for number in range(4)]
        timings = [stub.Generate(request).completion.timings for request in requests]
    return {
        "exposed transfer": statistics.median(each.transfer_exposed_ms for each in timings),
        "exposed transfer, of end to end": statistics.median(
            100 * each.transfer_exposed_ms / each.total_ms for each in timings
        ),
    }


def kill(side: Side, seed: int, num_requests: int = 24) -> dict[str, float]:
    """Kills what runs the prompts, without a word, while requests come; waits until all have ended."""
    generator = random.Random(seed)
    with ThreadPoolExecutor(num_requests) as threads:
        running = []
        for number in range(num_requests):
            running.append(threads.submit(ask, side, a_prompt(generator, 400), 48))
            time.sleep(0.4)
            if number == num_requests // 2:
                os.kill(side.prefill_pid(), signal.SIGKILL)
        answers = [each.result() for each in running]
    time.sleep(12)  # longer than a lease lives
    return {
        "requests lost": sum(not answer.finished for answer in answers),
        "blocks held afterwards": side.stranded() * 100,
    }


_UNITS = {
    "one stream": "tok/s",
    "batch": "tok/s",
    "ITL p50": "ms",
    "ITL p99": "ms",
    "TTFT p50": "s",
    "prompts that were answered": "of all",
    "exposed transfer": "ms",
    "exposed transfer, of end to end": "%",
    "requests lost": "of 24",
    "blocks held afterwards": "%",
}


_TARGETS = {"exposed transfer, of end to end": "at most 1", "requests lost": "0", "blocks held afterwards": "0"}
"""Of Baton's sides."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", type=Path, required=True)
    parser.add_argument("--only", default="one,streams,handoff,kill")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long prompts arrive beside streams")
    parser.add_argument("--without-nixl", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = resolve_model(DEFAULT_MODEL).path
    systems = Systems(options.vllm_python, Path(model), num_blocks=256, block_size=32, max_model_len=4096)
    settings = {name: str(value) for name, value in vars(options).items() if name not in ("json", "vllm_python")}
    result = Result(settings)
    nixl = [] if options.without_nixl else [systems.nixl]
    split = lambda: systems.baton("--prefill", "1", "--decode", "1")  # noqa: E731
    small = lambda: systems.vllm(num_batched_tokens=256)  # noqa: E731
    plans: dict[str, tuple[Callable[[Side, int], dict[str, float]], list[Callable[[], Any]]]] = {
        "one": (one, [lambda: systems.baton("--mixed", "1"), systems.vllm]),
        "streams": (lambda side, seed: streams(side, seed, options.seconds), [split, systems.vllm, small, *nixl]),
        "handoff": (handoff, [lambda: systems.baton("--prefill", "1", "--decode", "1", num_batched_tokens=512)]),
        "kill": (kill, [split, *nixl]),
    }
    for name in options.only.split(","):
        measure, starts = plans[name]
        samples: dict[str, dict[str, list[float]]] = {}
        for number in range(options.repeats):
            for start in starts:
                with start() as side:
                    measure(side, -1) if name == "one" else None  # the first use of each size is slow
                    for what, value in measure(side, number).items():
                        samples.setdefault(side.name, {}).setdefault(what, []).append(value)
        result.show(
            Figure(f"{side}: {what}", _UNITS[what], tuple(values), _TARGETS.get(what, "") if "Baton" in side else "")
            for side, found in samples.items()
            for what, values in found.items()
        )
        if name == "one":
            ours, theirs = samples.values()
            result.show(ratio(f"Baton / vLLM: {what}", ours[what], theirs[what], "at least 0.95") for what in ours)
        if name == "streams":
            ours = next(iter(samples.values()))
            result.show([ratio("Baton: ITL p99 / p50", ours["ITL p99"], ours["ITL p50"], "at most 1.3")])
    if options.json:
        result.write(options.json)


if __name__ == "__main__":
    main()
