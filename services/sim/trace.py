"""Describes what a workload asks for: when each request arrived, how long it was, what it shared with others, and who
sent it. Requests are scaled and made up here, and read in `trace_files`; none is ever sent from here.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from services.core.hashing import BlockHash, block_hashes

MOONCAKE_BLOCK = 512
MOST_S = 1e9
"""How long a trace may be, thirty years: virtual time must tell one message from the next."""
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 100, 40_000
"""Ids below the first are special ones in many vocabularies; the default model's has more others."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    at_s: float
    """Seconds after the first request."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Names of the blocks that the prompt consists of, where the trace tells; prompts share those of the same name."""
    block_tokens: int = MOONCAKE_BLOCK
    caller: str = ""
    """Which tenant sent it; empty if the trace does not tell."""
    session: str = ""
    """The conversation that it belongs to; empty for none."""
    priority: int = 0
    deadline_s: float | None = None
    """Seconds after its arrival by which it is to be complete; None for no deadline."""

    def part_names(self) -> tuple[BlockHash, ...]:
        """Returns a name for each full block of the prompt: it stands for the block and for all before it."""
        return tuple(block_hashes(self.block_ids[: self.prompt_tokens // self.block_tokens], 1))

    def prompt(self, seed: object, num_token_ids: int = NUM_TOKEN_IDS) -> list[int]:
        """Returns random token ids below `num_token_ids`: those of a block depend on its name and `seed` alone."""
        tokens: list[int] = []
        for block_id in self.block_ids:
            tokens += random_tokens((seed, "block", block_id), self.block_tokens, num_token_ids)
        del tokens[self.prompt_tokens :]
        return tokens + random_tokens((seed, self.at_s), self.prompt_tokens - len(tokens), num_token_ids)


def scaled(
    trace: Iterable[TracedRequest],
    *,
    length: float,
    rate: float,
    seconds: float,
    most_tokens: int,
    skip_s: float = 0.0,
) -> list[TracedRequest]:
    """Returns the requests of the first `seconds` after scaling: lengths times `length`, arrivals `rate` times as
    often. The first `skip_s` of the trace, before scaling, are left out. A request that would pass `most_tokens`,
    prompt and output together, loses of its prompt."""
    requests = []
    for request in trace:
        at_s = (request.at_s - skip_s) / rate
        if at_s < 0:
            continue
        if at_s >= seconds:
            break
        output_tokens = min(max(1, round(request.output_tokens * length)), most_tokens // 2)
        prompt_tokens = min(max(1, round(request.prompt_tokens * length)), most_tokens - output_tokens)
        requests.append(
            dataclasses.replace(
                request,
                at_s=at_s,
                prompt_tokens=prompt_tokens,
                output_tokens=output_tokens,
                block_tokens=max(1, round(request.block_tokens * length)),
            )
        )
    return requests


def synthetic_trace(num_requests: int, seed: int | str = 0) -> list[TracedRequest]:
    """Returns a made-up workload for lack of a trace: one request a second at random (Poisson), lengths with the
    medians of Splitwise's conversations (1020 tokens in, 129 out) and its spread (p99 of prompts 4142)."""
    chance = random.Random(seed)
    at_s, requests = 0.0, []
    for _ in range(num_requests):
        prompt = min(math.ceil(1020 * math.exp(0.6 * chance.gauss(0, 1))), 8192)
        output = min(math.ceil(129 * math.exp(0.8 * chance.gauss(0, 1))), 1024)
        requests.append(TracedRequest(at_s, prompt, output))
        at_s += chance.expovariate(1.0)
    return requests


def trace_of_tenants(rates: Mapping[str, float], num_requests: int, seed: int = 0) -> list[TracedRequest]:
    """Returns the made-up workloads of several tenants: each that of `synthetic_trace`, at the tenant's rate, in
    requests a second, for as long as `num_requests` take at one a second. A tenant's requests do not depend on the
    others."""
    requests: list[TracedRequest] = []
    for tenant, rate in rates.items():
        of_one = synthetic_trace(math.ceil(num_requests * rate), f"{seed} {tenant}")
        requests += [dataclasses.replace(each, at_s=each.at_s / rate, caller=tenant) for each in of_one]
    return sorted(requests, key=lambda each: each.at_s)


def random_tokens(seed: object, count: int, num_token_ids: int = NUM_TOKEN_IDS) -> list[int]:
    """Returns token ids that are the same for the same seed."""
    return random.Random(str(seed)).choices(range(FIRST_TOKEN_ID, num_token_ids), k=count)
