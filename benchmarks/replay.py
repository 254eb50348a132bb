"""Replays a trace: each request is sent when it arrived in the trace, whether earlier ones are answered or not."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.answers import Answer, Objective, goodput, percentile
from benchmarks.cluster import request_of
from benchmarks.settings import setting
from benchmarks.streaming import stream_grpc
from services.sim.trace import NUM_TOKEN_IDS, TracedRequest, scaled, synthetic_trace
from services.sim.trace_files import read_trace

_ANSWER_WITHIN_S = 300.0


@dataclass(frozen=True)
class ReplaySettings:
    trace: str = setting("", "a trace to replay, Azure's CSV or Mooncake's JSON lines; without one, a made-up workload")
    skip_s: float = setting(0.0, "seconds of the trace that are left out at its start")
    length_scale: float = setting(0.25, "times the trace's prompt and output lengths")
    rate_scale: tuple[float, ...] = setting((0.5, 1.0), "times the trace's arrivals a second; each is a level of load")
    replay_s: float = setting(40.0, "seconds of arrivals at each level; 0 leaves this part out")
    most_tokens: int = setting(2048, "most tokens of a request, prompt and output; a longer prompt is cut")
    slo_ttft_ms: float = setting(2000.0, "a good answer's time to first token, at most")
    slo_tpot_ms: float = setting(150.0, "a good answer's time per output token after the first, at most")

    @property
    def objective(self) -> Objective:
        return Objective(self.slo_ttft_ms, self.slo_tpot_ms)

    def requests(self, rate: float) -> list[TracedRequest]:
        """Returns what is sent at one level of load."""
        whole = read_trace(Path(self.trace)) if self.trace else synthetic_trace(10_000)
        return scaled(
            whole,
            length=self.length_scale,
            rate=rate,
            seconds=self.replay_s,
            most_tokens=self.most_tokens,
            skip_s=self.skip_s,
        )


@dataclass(frozen=True)
class Level:
    """Holds what came of the requests of one level of load."""

    answers: tuple[Answer, ...]
    seconds: float
    """From the first arrival to the last end, but not less than the arrivals took."""

    def ttft_ms(self, percent: float) -> float:
        return percentile((answer.ttft_ms for answer in self._complete), percent)

    def tpot_ms(self, percent: float) -> float:
        return percentile((answer.tpot_ms for answer in self._complete if len(answer.token_times_s) > 1), percent)

    def itl_ms(self, percent: float) -> float:
        return percentile((gap for answer in self._complete for gap in answer.gaps_ms), percent)

    @property
    def output_tok_s(self) -> float:
        return sum(len(answer.token_times_s) for answer in self.answers) / self.seconds

    @property
    def num_failed(self) -> int:
        return len(self.answers) - len(self._complete)

    def goodput(self, objective: Objective) -> float:
        """Requests a second that met the objective."""
        return goodput(self.answers, objective, self.seconds)

    def good_percent(self, objective: Objective) -> float:
        return 100 * sum(map(objective.met_by, self.answers)) / len(self.answers)

    @property
    def _complete(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.complete]


async def replay(
    address: str,
    requests: Sequence[TracedRequest],
    seed: object,
    at_least_s: float,
    num_token_ids: int = NUM_TOKEN_IDS,
) -> Level:
    """Sends the requests to a router and waits for their ends. Their prompts are of ids below `num_token_ids`."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        messages = [request_of(request.prompt(seed, num_token_ids), request.output_tokens) for request in requests]
        began_s = time.perf_counter()

        async def send(number: int) -> Answer:
            await asyncio.sleep(max(0.0, began_s + requests[number].at_s - time.perf_counter()))
            return await stream_grpc(stub, messages[number], timeout_s=_ANSWER_WITHIN_S)

        answers = await asyncio.gather(*(send(number) for number in range(len(requests))))
    return Level(tuple(answers), max(at_least_s, time.perf_counter() - began_s))
