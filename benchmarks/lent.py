"""Sends prompts with one long beginning to workers in turn, which compute it each, or bring it from one another.

Mixed workers with one thread each, of which each runs whole sequences. First the time to the first token at each
worker. Then, for beginnings of several short lengths, what is saved where they are brought against where they had to be
computed, and from how many tokens on that is something: by a line through these, and by what the router has learnt
(`baton status`), without its margin. (Longer ones would move the line's beginning: the more tokens, the longer each
takes to compute.) Blocks bound how near the two can be: nothing shorter than one is brought. Rounds alternate between
both ways, so that what disturbs the machine meets both.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from baton.v1 import control_pb2, inference_pb2_grpc
from benchmarks.cluster import Up, cluster, request_of
from benchmarks.figure import Figure, Findings, ratio
from benchmarks.precision import Precision
from benchmarks.settings import setting
from services.router.policy.known_cache import MARGIN

_OWN_TOKENS, _OUTPUT_TOKENS = 32, 2
_NUM_WARM = 2
"""Prompts of each worker before anything is measured: what a token costs to compute is known by them."""
_WAYS = {"each computes it": "never", "one computes it": "auto"}
_NUM_DRAWS = 4
"""Beginnings of each length, for the break-even."""
_TOLD_S = 1.5
"""Within so long workers have told the router what they cache: three heartbeats."""


@dataclass(frozen=True)
class LentSettings:
    lent_workers: int = setting(4, "workers that share the beginning of prompts")
    lent_tokens: int = setting(2000, "tokens that prompts share")
    lent_lengths: tuple[float, ...] = setting((16, 32, 64, 96, 128), "shared tokens for the break-even")


@dataclass(frozen=True)
class _First:
    """Holds what came of one request."""

    ttft_ms: float
    cached_tokens: int


def measure(model: str, precision: Precision, repeats: int, settings: LentSettings) -> Findings:
    firsts: dict[str, list[list[_First]]] = {name: [] for name in _WAYS}
    measured, predicted = [], []
    for number in range(repeats):
        for name, shares in _WAYS.items():
            with cluster(model, precision, *_flags(settings.lent_workers), "--share-prefixes", shares) as up:
                firsts[name].append(asyncio.run(_in_turn(up, f"{number}", settings.lent_tokens, settings)))
                if shares == "auto":
                    measured.append(_crossing(asyncio.run(_turns(up, number, settings))))
                    predicted.append(_without_margin(up.status().models[0].prefix_break_even))
    return [
        *_figures_of(firsts, settings),
        Figure("tokens from where on bringing saves time, measured", "", tuple(measured)),
        Figure("  as the router expects it, without its margin", "", tuple(predicted)),
        ratio("  expected over measured", predicted, measured, "0.8 to 1.2"),
    ]


def _figures_of(firsts: dict[str, list[list[_First]]], settings: LentSettings) -> Findings:
    figures: Findings = []
    for name, rounds in firsts.items():
        for place in range(settings.lent_workers):
            what = f"{settings.lent_tokens} shared tokens, {name}: first token at worker {place + 1}"
            figures.append(Figure(what, "ms", tuple(round[place].ttft_ms for round in rounds)))
            cached = tuple(float(round[place].cached_tokens) for round in rounds)
            figures.append(Figure("  tokens that were not computed", "", cached))
    computed, brought = (
        [statistics.median(each.ttft_ms for each in round[1:]) for round in rounds] for rounds in firsts.values()
    )
    figures.append(ratio("first token at the other workers: computed over brought", computed, brought, "> 1"))
    return figures


def _flags(num_workers: int) -> tuple[str, ...]:
    mixed = ("--prefill", "0", "--decode", "0", "--mixed", str(num_workers), "--threads", "1")
    return (*mixed, "--split", "never", "--policy", "round_robin")


async def _in_turn(up: Up, seed: str, num_shared: int, settings: LentSettings) -> list[_First]:
    """Returns what came of a request to each worker, one after the other."""
    draw = random.Random(seed)
    shared = draw.choices(range(100, 40_000), k=num_shared)
    found = []
    async with grpc.aio.insecure_channel(up.address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        if up.status().models[0].prefix_break_even.num_seen == 0:
            for _ in range(_NUM_WARM * settings.lent_workers):
                await _ask(stub, draw.choices(range(100, 40_000), k=4 * _OWN_TOKENS))
        for _ in range(settings.lent_workers):
            found.append(await _ask(stub, shared + draw.choices(range(100, 40_000), k=_OWN_TOKENS)))
            await asyncio.sleep(_TOLD_S)
    return found


async def _ask(stub: inference_pb2_grpc.InferenceServiceStub, prompt: list[int]) -> _First:
    began_s, cached, ttft_ms = time.perf_counter(), 0, math.nan
    async for event in stub.GenerateStream(request_of(prompt, _OUTPUT_TOKENS)):
        if event.HasField("prompt_info"):
            cached = event.prompt_info.cached_tokens
        elif event.HasField("chunk") and math.isnan(ttft_ms):
            ttft_ms = (time.perf_counter() - began_s) * 1000
    return _First(ttft_ms, cached)


def _without_margin(even: control_pb2.PrefixBreakEven) -> float:
    """Returns from where on the router expects bringing to save anything."""
    if not even.tokens:
        return math.inf
    compute_token_ms = MARGIN * (even.fixed_ms / even.tokens + even.token_ms)
    return even.fixed_ms / (compute_token_ms - even.token_ms)


async def _turns(up: Up, number: int, settings: LentSettings) -> list[tuple[int, list[_First]]]:
    """Returns what came of several beginnings of each length, at one worker after the other."""
    return [
        (length, await _in_turn(up, f"{number} {length} {draw}", length, settings))
        for draw in range(_NUM_DRAWS)
        for length in map(int, settings.lent_lengths)
    ]


def _crossing(turns: Iterable[tuple[int, list[_First]]]) -> float:
    """Returns the length at which the line through what was saved at each length is nothing.

    The first worker computes each beginning, and the next ones bring it. Only what was brought whole counts."""
    lengths, saved_ms = [], []
    for length, (computed, *brought) in turns:
        for each in brought:
            if each.cached_tokens > length - 16:
                lengths.append(length)
                saved_ms.append(computed.ttft_ms - each.ttft_ms)
    if len(set(lengths)) < 2:
        return math.inf
    line = statistics.linear_regression(lengths, saved_ms)
    return -line.intercept / line.slope if line.slope > 0 else math.inf
