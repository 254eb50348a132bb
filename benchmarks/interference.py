"""Measures what running answers suffer when prompts arrive: a few long streams, and a prompt every few seconds beside
them.

On a worker that does both phases each prompt stops every stream for as long as it is read, or slows it chunk by chunk;
on separate workers it does not (Splitwise, arXiv 2311.18677, §III-C). Measured as clients see it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc

from baton.v1 import inference_pb2_grpc
from benchmarks.answers import Answer
from benchmarks.cluster import make_request
from benchmarks.settings import setting
from benchmarks.streaming import stream_grpc

_START_WITHIN_S = 120.0
_PROMPT_TOKENS = 64
"""The prompt of a stream has so many."""


@dataclass(frozen=True)
class InterferenceSettings:
    streams: int = setting(4, "streams that run while prompts arrive; 0 leaves this part out")
    stream_tokens: int = setting(1024, "output tokens of each; when one ends, another begins")
    arriving_tokens: int = setting(512, "tokens of a prompt that arrives")
    arriving_output: int = setting(16, "output tokens of a prompt that arrives")
    every_s: float = setting(4.0, "seconds from one prompt to the next")
    arrivals: int = setting(10, "prompts in a round")
    undisturbed_s: float = setting(10.0, "seconds in which the streams run before the first prompt arrives")


@dataclass
class Interference:
    """Holds the measurements of one round."""

    gaps_ms: list[float]
    """These lie between tokens of the running streams, while prompts arrive."""
    undisturbed_gaps_ms: list[float]
    """These lie before the first prompt arrives, and tell what the machine does to steps without any."""
    ttft_ms: list[float]
    """Each is of a prompt that arrived."""


async def interfere(address: str, seed: object, settings: InterferenceSettings) -> Interference:
    """Raises RuntimeError if a request fails."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        running: list[Answer] = []
        streams = [
            asyncio.create_task(_stream(stub, (seed, "stream", number), number / settings.streams, settings, running))
            for number in range(settings.streams)
        ]
        try:
            await _all_run(running, streams)
            undisturbed_s = time.perf_counter()
            await asyncio.sleep(settings.undisturbed_s)
            began_s = time.perf_counter()
            arriving = [
                asyncio.create_task(_arrive(stub, (seed, number), began_s + number * settings.every_s, settings))
                for number in range(settings.arrivals)
            ]
            await asyncio.gather(*arriving)
            await asyncio.sleep(max(0.0, began_s + settings.arrivals * settings.every_s - time.perf_counter()))
            ended_s = time.perf_counter()
        finally:
            for task in streams:
                task.cancel()
            await asyncio.gather(*streams, return_exceptions=True)
    return Interference(
        _gaps_ms(running, began_s, ended_s),
        _gaps_ms(running, undisturbed_s, began_s),
        [task.result().ttft_ms for task in arriving],
    )


async def idle_prompts(address: str, seed: object, count: int, tokens: int, output: int) -> list[Answer]:
    """Returns the answers of `count` prompts, one after the other, to a cluster that does nothing else."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        return [
            _whole(await stream_grpc(stub, make_request((seed, number), tokens, output))) for number in range(count)
        ]


def _gaps_ms(answers: Sequence[Answer], from_s: float, to_s: float) -> list[float]:
    return [gap for answer in answers for gap in answer.gaps_within(from_s, to_s)]


async def _stream(
    stub: inference_pb2_grpc.InferenceServiceStub,
    seed: object,
    share: float,
    settings: InterferenceSettings,
    running: list[Answer],
) -> None:
    """Streams for ever; `running` gets each answer as it begins.

    The first goes on as if a `share` of its tokens were there already. So streams are at different places, as those of
    users are, and the tokens before them are as many in all at any time. Would all begin at once, the gaps between
    tokens would grow with them until all end, and tell of that instead of what prompts do.
    """
    number, there = 0, int(share * settings.stream_tokens)
    while True:
        answer = Answer(time.perf_counter())
        running.append(answer)
        request = make_request((seed, number), _PROMPT_TOKENS + there, settings.stream_tokens - there)
        _whole(await stream_grpc(stub, request, answer))
        number, there = number + 1, 0


async def _all_run(running: list[Answer], streams: list[asyncio.Task[None]]) -> None:
    """Waits until every stream has had tokens."""
    async with asyncio.timeout(_START_WITHIN_S):
        while len(running) < len(streams) or not all(len(answer.token_times_s) > 2 for answer in running):
            for task in streams:
                if task.done():
                    task.result()
            await asyncio.sleep(0.05)


async def _arrive(
    stub: inference_pb2_grpc.InferenceServiceStub, seed: object, at_s: float, settings: InterferenceSettings
) -> Answer:
    request = make_request((seed, "prompt"), settings.arriving_tokens, settings.arriving_output)
    await asyncio.sleep(max(0.0, at_s - time.perf_counter()))
    return _whole(await stream_grpc(stub, request))


def _whole(answer: Answer) -> Answer:
    if not answer.complete:
        raise RuntimeError(f"a request ended with {answer.refused or 'no token'}")
    return answer
