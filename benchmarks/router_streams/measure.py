"""Runs router, workers and client as three processes, and takes the figures of a router's streams."""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer

from baton.v1 import control_pb2
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.ports import free_ports
from benchmarks.router_streams.workers import Settings
from benchmarks.settings import setting
from services.cli.client import control

_TEXT = (
    "The prefill worker runs the prompt, and hands the blocks of its cache to a decode worker. Each of the two does "
    "one kind of work, so that a long prompt delays nobody's next word. Each block belongs to one side at a time. "
)
_NUM_PREFILL, _NUM_DECODE = 8, 32
_OPEN_PER_S = 50.0
_FIRST_STREAMS = 32
"""So many are opened before memory is measured, since what they load stays loaded."""
_FEWEST_STREAMS = 8 * _FIRST_STREAMS
_WITHIN_S = 60.0


@dataclasses.dataclass(frozen=True)
class StreamSettings:
    router_streams: int = setting(2000, "streams open at once")
    router_step_ms: float = setting(333.0, "of a decode step: each stream has a token in each")
    router_window_s: float = setting(10.0, "seconds of each measurement")
    router_prompt: int = setting(32, "prompt tokens of each stream")


def measure(model: str, path: str, repeats: int, settings: StreamSettings) -> Findings:
    """Measures both fronts with all streams, and with a quarter of them. `path` is the model's folder.

    What is delivered is what the workers send, unless the router falls behind. So what one process could deliver is
    judged by the processor time that a token takes. Raises SystemExit if there are too few streams to say anything.
    """
    if settings.router_streams < _FEWEST_STREAMS:
        raise SystemExit(f"router: --router-streams must be at least {_FEWEST_STREAMS}")
    findings: Findings = []
    for front, name in (("grpc", "gRPC"), ("http", "HTTP")):
        full = [one_run(model, path, front, settings.router_streams, settings) for _ in range(repeats)]
        quarter = [one_run(model, path, front, settings.router_streams // 4, settings) for _ in range(repeats)]
        findings += _figures(f"{settings.router_streams} streams over {name}", full, full_load=True)
        findings += _figures(f"{settings.router_streams // 4} streams over {name}", quarter, full_load=False)
    return findings + _two_routers(model, path, repeats)


def _two_routers(model: str, path: str, repeats: int) -> Findings:
    """Compares one router with two over the same workers, which take time for prompts and steps as real ones do: what
    one router sends somewhere, the other sees only when the worker tells. The requests are the same ones."""
    rounds = [[_latencies(model, path, number) for number in (1, 2)] for _ in range(repeats)]
    what = f"two routers of one: {_NUM_REQUESTS} requests, {_REQUESTS_PER_S:g} a second, 8+32 workers"
    return [
        ratio(f"{what}; {name}", [two[index] for _, two in rounds], [one[index] for one, _ in rounds], "<= 1.1")
        for index, name in enumerate(("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95"))
    ]


_NUM_REQUESTS, _REQUESTS_PER_S = 1000, 40.0
_PROMPT, _OUTPUT = (64, 512), 64
# A prompt takes 144 ms on average, so that prefill workers compute for 72 % of the time.
_COSTS = {"prefill_token_ms": 0.5, "step_ms": 20.0, "step_sequence_ms": 2.0}


def _latencies(model: str, path: str, num_routers: int) -> tuple[float, float, float, float]:
    """Returns p50 and p95 of TTFT, and of TPOT, in milliseconds."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        routers = [stack.enter_context(router_process(path, folder)) for _ in range(num_routers)]
        stack.enter_context(workers_process(model, path, routers, folder, **_COSTS))
        client = stack.enter_context(client_of("grpc", routers, _PROMPT, _OUTPUT, folder, per_s=_REQUESTS_PER_S))
        client.complete(_NUM_REQUESTS)
        stack.close()
        came = json.loads((folder / "came.json").read_text()).values()
    if any(len(times_s) != _OUTPUT for _, _, times_s in came):
        raise RuntimeError("streams had not as many events as tokens")
    ttft_ms = [(times_s[0] - opened_s) * 1000 for _, opened_s, times_s in came]
    tpot_ms = [(times_s[-1] - times_s[0]) * 1000 / (len(times_s) - 1) for _, _, times_s in came]
    ttft, tpot = statistics.quantiles(ttft_ms, n=20), statistics.quantiles(tpot_ms, n=20)
    return ttft[9], ttft[18], tpot[9], tpot[18]


def _figures(what: str, taken: Sequence[Taken], *, full_load: bool) -> Findings:
    def figure(name: str, unit: str, attribute: str, target: str) -> Figure:
        values = tuple(getattr(each, attribute) for each in taken)
        return Figure(f"{what}: {name}", unit, values, target)

    if full_load:
        return [
            figure("delivered", "tok/s", "tokens_per_s", ""),
            figure("of what the workers sent", "", "share", ">= 0.99"),
            figure("router CPU a token", "ms", "cpu_ms", "<= 0.1"),
            figure("router memory a stream", "KB", "kb_per_stream", "<= 40"),
            figure("added latency a token, p50", "ms", "p50_ms", ""),
            figure("added latency a token, p99", "ms", "p99_ms", ""),
        ]
    return [
        figure("delivered", "tok/s", "tokens_per_s", ""),
        figure("router CPU a token", "ms", "cpu_ms", ""),
        figure("added latency a token, p50", "ms", "p50_ms", "<= 1"),
        figure("added latency a token, p99", "ms", "p99_ms", ""),
    ]


@dataclasses.dataclass(frozen=True)
class Taken:
    tokens_per_s: float
    share: float
    """Of the tokens that workers sent in the window, those that came in it."""
    cpu_ms: float
    kb_per_stream: float
    p50_ms: float
    p99_ms: float


def one_run(model: str, path: str, front: str, num_streams: int, settings: StreamSettings) -> Taken:
    """Opens that many streams at a router, and measures for a window. Raises RuntimeError if a stream ends, or an event
    has several tokens."""
    # A token of each stream in each step, from the first stream's opening to the end of the window, and some more.
    most_tokens = 64 + round(
        (num_streams / _OPEN_PER_S + settings.router_window_s + _WITHIN_S) / settings.router_step_ms * 1000
    )
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        router = stack.enter_context(router_process(path, Path(folder)))
        workers = stack.enter_context(
            workers_process(model, path, [router], Path(folder), step_ms=settings.router_step_ms)
        )
        prompt = (settings.router_prompt, settings.router_prompt)
        client = stack.enter_context(client_of(front, [router], prompt, most_tokens, Path(folder)))
        num_first = min(_FIRST_STREAMS, num_streams // 2)
        client.open(num_first)
        time.sleep(2.0)
        before_bytes = router.process.memory_info().rss
        client.open(num_streams - num_first)
        time.sleep(1.0)
        kb_per_stream = (router.process.memory_info().rss - before_bytes) / (num_streams - num_first) / 1024
        began_s, before_s = time.monotonic(), cpu_s(router)
        time.sleep(settings.router_window_s)
        ended_s, used_s = time.monotonic(), cpu_s(router) - before_s
        client.check()
        workers.terminate()  # so that all that was sent can come
        workers.wait(timeout=_WITHIN_S)
        client.settle()
        stack.close()
        return taken(Path(folder), began_s, ended_s, used_s, kb_per_stream)


def taken(folder: Path, began_s: float, ended_s: float, used_s: float, kb_per_stream: float) -> Taken:
    """Compares when tokens were sent with when they came. Raises RuntimeError unless each came in an event of its
    own."""
    sent: dict[str, list[float]] = json.loads((folder / "sent.json").read_text())
    num_sent = num_came = 0
    added_ms: list[float] = []
    for request_id, (ended, _, times_s) in json.loads((folder / "came.json").read_text()).items():
        if ended or not times_s:
            raise RuntimeError(f"{request_id} ended: {ended or 'no token came'}")
        at_s = sent[request_id]
        if len(at_s) != len(times_s):
            raise RuntimeError(f"{request_id}: {len(at_s)} tokens were sent and {len(times_s)} events came")
        num_sent += _in_window(at_s, began_s, ended_s)
        num_came += _in_window(times_s, began_s, ended_s)
        pairs = zip(at_s, times_s, strict=True)
        added_ms += [(came - at) * 1000 for at, came in pairs if began_s <= at < ended_s]
    cuts = statistics.quantiles(added_ms, n=100)
    seconds = ended_s - began_s
    return Taken(num_came / seconds, num_came / num_sent, used_s * 1000 / num_came, kb_per_stream, cuts[49], cuts[98])


def _in_window(times_s: Sequence[float], began_s: float, ended_s: float) -> int:
    return bisect.bisect_left(times_s, ended_s) - bisect.bisect_left(times_s, began_s)


def cpu_s(router: RouterProcess) -> float:
    """Returns the processor time that the router has taken so far, seconds."""
    times = router.process.cpu_times()
    return float(times.user + times.system)


@dataclasses.dataclass(frozen=True)
class RouterProcess:
    process: psutil.Process
    ports: dict[str, int]

    def all_proven(self) -> bool:
        """Returns whether canaries have passed from each prefill worker to each decode worker."""
        pairs = self._status().pairs
        return bool(pairs) and all(pair.state == control_pb2.PAIR_STATE_PROVEN for pair in pairs)

    def all_ready(self, number: int) -> bool:
        """Returns whether it has so many workers, and all are ready."""
        states = [worker.state for worker in self._status().workers]
        return len(states) == number and set(states) == {control_pb2.WORKER_STATE_READY}

    def _status(self) -> control_pb2.GetStatusResponse:
        with control(f"127.0.0.1:{self.ports['control']}", "") as call:
            status: control_pb2.GetStatusResponse = call("GetStatus", control_pb2.GetStatusRequest(), 10.0)
        return status


@contextlib.contextmanager
def router_process(path: str, folder: Path, *flags: str, checkout: Path | None = None) -> Iterator[RouterProcess]:
    """Runs a router: that of another checkout, if one is given."""
    ports = dict(zip(("grpc", "http", "control"), free_ports(3), strict=True))
    command = [sys.executable, "-m", "services.cli.main", "router", "--model", path]
    command += [
        "--port",
        str(ports["grpc"]),
        "--http-port",
        str(ports["http"]),
        "--control-port",
        str(ports["control"]),
    ]
    where: dict[str, Any] = {}
    if checkout is not None:
        code = os.pathsep.join(str(checkout / name) for name in ("", "gen", "client"))
        where = {"cwd": checkout, "env": {**os.environ, "PYTHONPATH": code}}
    with _process([*command, *flags], folder / f"router-{ports['grpc']}.log", **where) as process:
        until(lambda: _listens(ports["control"]) and _listens(ports["http"]), "the router listens")
        yield RouterProcess(psutil.Process(process.pid), ports)


@contextlib.contextmanager
def workers_process(
    model: str,
    path: str,
    routers: list[RouterProcess],
    folder: Path,
    num_prefill: int = _NUM_PREFILL,
    num_decode: int = _NUM_DECODE,
    **costs: float,
) -> Iterator[subprocess.Popen[str]]:
    words = Tokenizer.from_file(f"{path}/tokenizer.json").encode(_TEXT, add_special_tokens=False).ids
    wanted = Settings(
        model,
        [f"127.0.0.1:{router.ports['control']}" for router in routers],
        words,
        num_prefill=num_prefill,
        num_decode=num_decode,
        **costs,  # type: ignore[arg-type]
    )
    command = [sys.executable, "-m", "benchmarks.router_streams.workers", json.dumps(dataclasses.asdict(wanted))]
    with _process([*command, "--times", str(folder / "sent.json")], folder / "workers.log") as process:
        for router in routers:
            until(functools.partial(router.all_ready, num_prefill + num_decode), "all workers are ready")
        yield process


class _Client:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self._num_wanted = 0

    def open(self, number: int) -> None:
        """Opens that many more streams, and returns once each has had a token."""
        self._num_wanted += number
        self._say(f"open {number}")
        within_s = _WITHIN_S + number / _OPEN_PER_S
        until(lambda: self._counts()["open"] == self._num_wanted, f"{self._num_wanted} streams run", within_s)

    def complete(self, number: int) -> None:
        """Opens that many streams, and returns when all have ended."""
        self._say(f"open {number}")
        until(lambda: self._counts()["done"] == number, f"{number} streams have ended")

    def check(self) -> None:
        """Raises RuntimeError unless all streams run."""
        if (counts := self._counts())["open"] != self._num_wanted:
            raise RuntimeError(f"not all streams run: {counts}")

    def num_tokens(self) -> list[int]:
        """Returns how many tokens the streams at each router have had."""
        return list(self._counts()["tokens"])

    def settle(self) -> None:
        """Returns when no more tokens come."""
        before = [-1]
        while (now := self.num_tokens()) != before:
            before = now
            time.sleep(1.0)

    def _counts(self) -> dict[str, Any]:
        self._say("counts")
        assert self._process.stdout is not None
        counts: dict[str, Any] = json.loads(self._process.stdout.readline())
        if counts["failure"]:
            raise RuntimeError(f"a stream failed: {counts}")
        return counts

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()


@contextlib.contextmanager
def client_of(
    front: str,
    routers: list[RouterProcess],
    prompt: tuple[int, int],
    output: int,
    folder: Path,
    per_s: float = _OPEN_PER_S,
) -> Iterator[_Client]:
    command = [sys.executable, "-m", "benchmarks.router_streams.client", front]
    command += [f"127.0.0.1:{router.ports[front]}" for router in routers]
    command += ["--prompt", *map(str, prompt), "--output", str(output), "--per-s", str(per_s)]
    command += ["--times", str(folder / "came.json")]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with _process(command, folder / "client.log", **pipes) as process:
        yield _Client(process)
        assert process.stdin is not None
        process.stdin.close()
        process.wait(timeout=_WITHIN_S)


@contextlib.contextmanager
def _process(command: list[str], log: Path, **pipes: Any) -> Iterator[subprocess.Popen[str]]:
    """Runs a process, and ends it with SIGTERM. If anything fails, its log's end is printed."""
    with open(log, "w") as messages, subprocess.Popen(command, stderr=messages, **pipes) as process:
        try:
            yield process
        except BaseException:
            print(f"{' '.join(command[:4])}: {log.read_text()[-2000:]}", file=sys.stderr)
            raise
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            process.wait(timeout=_WITHIN_S)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def until(holds: Any, what: str, within_s: float = _WITHIN_S) -> None:
    """Returns as soon as it holds. Raises RuntimeError if it does not in time; `what` says what was awaited."""
    until_s = time.monotonic() + within_s
    while not holds():
        if time.monotonic() > until_s:
            raise RuntimeError(f"in {within_s:g} s it is not so that {what}")
        time.sleep(0.1)
