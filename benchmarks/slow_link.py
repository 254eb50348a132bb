"""Measures what of a handoff is waited for: over a link throttled until the KV takes as long to cross as its prompt to
compute, and on one host, where the second token shows it.

Router, prefill and decode worker stand on hosts of their own (`benchmarks.hosts`; needs root, ip and tc). Before each
prompt one goes over an open link, which tells the rate of the throttled one: what else the machine does meets both.
All figures are of the requests' own spans.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.cluster import cluster, make_request
from benchmarks.figure import Figure, Findings
from benchmarks.hosts import HUB, Hosts, hosts
from benchmarks.precision import Precision
from benchmarks.streaming import stream_grpc
from services.cli.child import Child, Lifeline
from services.cli.trace_breakdown import break_down
from services.cli.trace_reader import RecordedRequest, read_requests
from services.rpc.names import Attr, Span

_PROMPT_TOKENS, _OUTPUT_TOKENS = 2048, 16
_NUM_PROMPTS = 5
"""Of each kind, in a round."""
_STEP_TOKENS = (512, 256, 128)
"""The most tokens of a step: how much of the prompt is sent at once, and last."""
_OPEN = "10gbit"
_POOL = ("--kv-blocks", "2048", "--threads", "1")
_SPANS_WITHIN_S = 60.0


def measure(model: str, precision: Precision, repeats: int) -> Findings:
    found: Findings = []
    for step_tokens in _STEP_TOKENS:
        found += asyncio.run(_over_a_link(model, precision, step_tokens, repeats))
    return found + _on_one_host(model, precision, repeats)


async def _over_a_link(model: str, precision: Precision, step_tokens: int, repeats: int) -> Findings:
    rounds: list[list[tuple[RecordedRequest, float]]] = []
    async with _separate(model, precision, "--max-num-batched-tokens", str(step_tokens)) as (ask, made):
        await ask("warm", 2)
        for number in range(repeats):
            rounds.append([await _throttled(ask, made, f"{number} {prompt}") for prompt in range(_NUM_PROMPTS)])
            print(f"slow_link: {step_tokens} tokens a step, round {number + 1}", flush=True)

    def figure(name: str, unit: str, of: Callable[[RecordedRequest], float], target: str = "") -> Figure:
        return Figure(name, unit, tuple(statistics.median(of(each) for each, _ in some) for some in rounds), target)

    name = f"slow_link: {step_tokens} tokens a step"
    links = tuple(statistics.median(rate / 1e6 for _, rate in some) for some in rounds)
    as_long = (
        statistics.median(_bytes(each) / rate / _computed_ms(each) * 1e3 for each, rate in some) for some in rounds
    )
    return [
        figure(
            f"{name}: exposed over transfer",
            "%",
            lambda each: 100 * _exposed_ms(each) / _transfer_ms(each),
            "<= 15",
        ),
        figure("  exposed", "ms", _exposed_ms),
        figure("  transfer, from its first block to the Release", "ms", _transfer_ms),
        figure("  its end after the prompt's", "ms", _after_prompt_ms),
        figure("  prompt computed in", "ms", _computed_ms),
        Figure("  its KV at the link's rate, over that", "x", tuple(as_long)),
        Figure("  the link", "MB/s", links),
    ]


async def _throttled(ask: _Asking, made: Hosts, seed: str) -> tuple[RecordedRequest, float]:
    """Returns a prompt over a link as slow as the prompt before it was, over an open one, and the link's bytes a
    second."""
    made.throttle(_OPEN)
    (alone,) = await ask(f"open {seed}", 1)
    rate = _bytes(alone) / _computed_ms(alone) * 1e3
    made.throttle(f"{rate * 8:.0f}bit")
    (throttled,) = await ask(f"throttled {seed}", 1)
    return throttled, rate


def _on_one_host(model: str, precision: Precision, repeats: int) -> Findings:
    rounds: list[list[RecordedRequest]] = []
    with tempfile.TemporaryDirectory() as folder:
        traces = Path(folder) / "traces.jsonl"
        flags = ("--prefill", "1", "--decode", "1", "--http-port", "-1", "--trace-file", str(traces), *_POOL)
        with cluster(model, precision, *flags) as up:
            ask = _Asking(up.address, traces)
            asyncio.run(ask("warm", 2))
            for number in range(repeats):
                rounds.append(asyncio.run(ask(f"here {number}", 2 * _NUM_PROMPTS)))
                print(f"slow_link: one host, round {number + 1}", flush=True)

    def figure(name: str, unit: str, of: Callable[[RecordedRequest], float], target: str = "") -> Figure:
        return Figure(name, unit, tuple(statistics.median(map(of, some)) for some in rounds), target)

    def part(name: str) -> Callable[[RecordedRequest], float]:
        return lambda each: float(getattr(break_down(each).second_token, name))

    return [
        figure("slow_link: one host: second token after the first, in usual gaps", "x", _second_in_gaps, "<= 1.3"),
        figure("  the second token after the prompt's end", "ms", part("total_ms")),
        figure("  of that exposed transfer", "ms", part("transfer_exposed_ms")),
        figure("  decode wait", "ms", part("decode_wait_ms")),
        figure("  first step", "ms", part("first_step_ms")),
        figure("  rest", "ms", part("rest_ms")),
        figure("  a usual gap", "ms", _usual_gap_ms),
    ]


@contextlib.asynccontextmanager
async def _separate(model: str, precision: Precision, *flags: str) -> AsyncIterator[tuple[_Asking, Hosts]]:
    """Yields what sends prompts to a cluster whose processes are each on a host of its own, and the hosts."""
    lifeline, children = Lifeline(), list[Child]()
    token = f"BATON_CLUSTER_TOKEN={secrets.token_hex(16)}"
    log = Path("out/bench-slow-link.log")
    log.parent.mkdir(exist_ok=True)

    async def start(host: str, role: str, *more: str) -> tuple[int, int]:
        common = ("--model", model, "--host", "0.0.0.0", "--allow-plain-token", "--trace-file", str(traces))
        command = [*made.command(host), "env", token, sys.executable, "-m", "services.cli.main", role, *common, *more]
        children.append(child := Child(host, command, lifeline, messages.fileno()))
        ready = await child.ready()
        if ready is None:
            raise RuntimeError(f"{host} ended before it was ready; see {log}")
        return ready.port, ready.control_port

    with (
        hosts("prefill", "decode", rate=_OPEN) as made,
        tempfile.TemporaryDirectory() as folder,
        open(log, "w") as messages,  # noqa: ASYNC230  (for children)
    ):
        traces = Path(folder) / "traces.jsonl"
        try:
            port, control = await start(HUB, "router", "--control-host", "0.0.0.0", "--split", "always")
            joined = (
                "--router",
                f"{made.router}:{control}",
                "--transport",
                "tcp",
                *_POOL,
                *precision.up_flags(),
                *flags,
            )
            await start("prefill", "prefill", "--worker-id", "prefill-0", *joined)
            await start("decode", "decode", "--worker-id", "decode-0", *joined)
            yield _Asking(f"{made.router}:{port}", traces), made
        finally:
            await asyncio.gather(*(child.end(30.0) for child in children))
            lifeline.close()


class _Asking:
    """Sends prompts one after the other, and returns what is recorded of them."""

    def __init__(self, address: str, traces: Path) -> None:
        self._address = address
        self._traces = traces
        self._num_asked = 0

    async def __call__(self, seed: str, num_prompts: int) -> list[RecordedRequest]:
        async with grpc.aio.insecure_channel(self._address) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            for number in range(num_prompts):
                request = make_request((seed, number), _PROMPT_TOKENS, _OUTPUT_TOKENS)
                answer = await stream_grpc(stub, request, timeout_s=300.0)
                if not answer.complete:
                    raise RuntimeError(f"a prompt was refused: {answer.refused}")
        self._num_asked += num_prompts
        async with asyncio.timeout(_SPANS_WITHIN_S):
            while (  # noqa: ASYNC110  (other processes write it)
                len(whole := [each for each in self._recorded() if each.root is not None and not each.missing()])
                < self._num_asked
            ):
                await asyncio.sleep(0.5)
        return sorted(whole, key=lambda each: each.start_ns)[-num_prompts:]

    def _recorded(self) -> Sequence[RecordedRequest]:
        return read_requests(str(self._traces)) if self._traces.exists() else ()


def _bytes(request: RecordedRequest) -> float:
    return float(request.named(Span.KV_TRANSFER)[-1].attributes[Attr.TRANSFER_BYTES])


def _computed_ms(request: RecordedRequest) -> float:
    return request.named(Span.PREFILL_COMPUTE)[-1].duration_ms


def _transfer_ms(request: RecordedRequest) -> float:
    return request.named(Span.KV_TRANSFER)[-1].duration_ms


def _exposed_ms(request: RecordedRequest) -> float:
    return float(request.named(Span.KV_TRANSFER)[-1].attributes[Attr.TRANSFER_EXPOSED_MS])


def _after_prompt_ms(request: RecordedRequest) -> float:
    """Returns how long after the prompt was computed its transfer ended. What is exposed begins when the seal has
    arrived, which may wait on the link behind the KV."""
    return (request.named(Span.KV_TRANSFER)[-1].end_ns - request.named(Span.PREFILL_COMPUTE)[-1].end_ns) / 1e6


def _usual_gap_ms(request: RecordedRequest) -> float:
    return float(request.named(Span.DECODE_RUN)[0].attributes[Attr.INTER_TOKEN_P50_MS])


def _second_in_gaps(request: RecordedRequest) -> float:
    second = break_down(request).second_token
    assert second is not None
    assert second.total_ms is not None
    return second.total_ms / _usual_gap_ms(request)
