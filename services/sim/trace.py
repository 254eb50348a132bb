"""Reads traces of real workloads: when each request arrived and how long it was. They are read, scaled, made up; never
sent.

Two formats are read. Azure's (the traces of Splitwise, arXiv 2311.18677) is CSV with the columns
`TIMESTAMP,ContextTokens,GeneratedTokens`. Mooncake's is JSON lines with `timestamp` (milliseconds), `input_length`,
`output_length` and `hash_ids`, one for each block of 512 tokens: equal ids are equal text.
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_MOONCAKE_BLOCK = 512
_MOST_TOKENS = 100_000_000
_FIRST_TOKEN_ID, _LAST_TOKEN_ID = 100, 40_000


@dataclass(frozen=True)
class TracedRequest:
    at_s: float
    """Seconds after the first request."""
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Names of the blocks that the prompt consists of, where the trace tells; prompts share those of the same name."""
    block_tokens: int = _MOONCAKE_BLOCK

    def prompt(self, seed: object) -> list[int]:
        """Returns random token ids: those of a block depend on its name and `seed` alone."""
        tokens: list[int] = []
        for block_id in self.block_ids:
            tokens += _random_tokens((seed, "block", block_id), self.block_tokens)
        del tokens[self.prompt_tokens :]
        return tokens + _random_tokens((seed, self.at_s), self.prompt_tokens - len(tokens))


def read_trace(path: Path) -> list[TracedRequest]:
    """Returns the requests in the order of their arrival. Raises ValueError, which names the line, for a file of
    another format, for a request that cannot be, and for one that arrives before the one above it."""
    requests: list[TracedRequest] = []
    with open(path, newline="") as file:
        rows = _json_lines(path, file) if path.suffix == ".jsonl" else _azure(path, file)
        for number, row in rows:
            try:
                request = _mooncake(row) if path.suffix == ".jsonl" else _azure_request(row)
                _check(request, requests[-1] if requests else None)
            except (ValueError, KeyError, TypeError, AssertionError) as error:
                reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or "makes no sense"
                raise ValueError(f"{path}:{number}: {reason}") from error
            requests.append(request)
    if not requests:
        raise ValueError(f"{path} has no requests")
    first_s = requests[0].at_s
    return [dataclasses.replace(request, at_s=request.at_s - first_s) for request in requests]


def _check(request: TracedRequest, before: TracedRequest | None) -> None:
    for name, value in (("prompt", request.prompt_tokens), ("output", request.output_tokens)):
        if not 0 <= value <= _MOST_TOKENS:
            raise ValueError(f"the {name} has {value} tokens")
    if not 0 <= request.at_s < math.inf:
        raise ValueError(f"it arrives at {request.at_s}")
    if before is not None and request.at_s < before.at_s:
        raise ValueError("it arrives before the one above it")


def scaled(
    trace: Sequence[TracedRequest],
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
        block_tokens = max(1, round(request.block_tokens * length))
        requests.append(TracedRequest(at_s, prompt_tokens, output_tokens, request.block_ids, block_tokens))
    return requests


def synthetic_trace(num_requests: int, seed: int = 0) -> list[TracedRequest]:
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


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: is no object")
        yield number, row


def _azure(path: Path, lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(lines)
    if not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(reader.fieldnames or ()):
        raise ValueError(f"{path} is no trace: its first line is none of Azure's, and its name does not end in .jsonl")
    for row in reader:
        yield reader.line_num, row


def _azure_request(row: dict[str, Any]) -> TracedRequest:
    return TracedRequest(_seconds(row["TIMESTAMP"]), int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _seconds(timestamp: str) -> float:
    """Returns the seconds of a time such as "2023-11-16 18:15:46.6805900": Python reads six digits after the point, and
    the traces have seven."""
    whole, _, fraction = timestamp.partition(".")
    moment = datetime.datetime.fromisoformat(whole).replace(tzinfo=datetime.UTC)
    return moment.timestamp() + float(f"0.{fraction or 0}")


def _mooncake(row: dict[str, Any]) -> TracedRequest:
    at_ms, block_ids = row["timestamp"], row.get("hash_ids", ())
    assert isinstance(at_ms, int | float)
    assert isinstance(block_ids, list | tuple)
    return TracedRequest(
        at_ms / 1e3, int(str(row["input_length"])), int(str(row["output_length"])), tuple(map(int, block_ids))
    )


def _random_tokens(seed: object, count: int) -> list[int]:
    return random.Random(str(seed)).choices(range(_FIRST_TOKEN_ID, _LAST_TOKEN_ID), k=count)
