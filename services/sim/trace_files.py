"""Reads files of workloads into `TracedRequest`s. A name that ends in `.jsonl` says JSON lines, whose first line says
which of three formats they have; all others are read as CSV:

- Azure's (the traces of Splitwise, arXiv 2311.18677): CSV with the columns `TIMESTAMP,ContextTokens,GeneratedTokens`.
- Mooncake's: JSON lines with `timestamp` (milliseconds), `input_length`, `output_length` and `hash_ids`, one for each
  block of 512 tokens: equal ids are equal text.
- Conversations like ShareGPT's: JSON lines with `conversations`, texts that alternate between two speakers. Each answer
  is a request whose prompt is all the text before it. They have no times and no tokens; `_turns` says what is assumed.
- What `--trace-file` of Baton's processes has recorded (OTLP JSON lines): arrivals and lengths, no text.

A line of the first two may also say `caller`, `session` and `priority` (in CSV `Caller`, `Session`, `Priority`).
"""

from __future__ import annotations

import csv
import dataclasses
import datetime
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any

from services.rpc.names import Attr, Span
from services.sim.trace import MOST_S, TracedRequest

_MOST_TOKENS = 100_000_000
_LATEST_S = 1e11
"""In seconds since 1970, or since the trace began: the year 5138."""
_CHARACTERS_PER_TOKEN = 4
"""Of a conversation's text, about what tokenizers make of English."""
_CHUNK_TOKENS = 16
_PAUSE_S, _READING_S_PER_TOKEN = 20.0, 0.05
_RECORDED = '{"resourceSpans"'
"""Begins a line that `--trace-file` has written."""
_SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}

Numbered = tuple[int, Any]
"""A line's number, and what it says."""


def read_trace(path: Path) -> list[TracedRequest]:
    """Returns the requests in the order of their arrival. Raises ValueError, which names the line, for a file of
    another format, for a request that cannot be, and for one that arrives before the one above it (where the lines are
    requests)."""
    # Excel puts a mark before the text.
    with open(path, newline="", encoding="utf-8-sig", errors="replace") as file:
        requests = list(_json_requests(path, file) if path.suffix == ".jsonl" else _azure(path, file))
    if not requests:
        raise ValueError(f"{path} has no requests")
    first_s = requests[0].at_s
    return [dataclasses.replace(request, at_s=request.at_s - first_s) for request in requests]


# JSON lines


def _json_requests(path: Path, lines: Iterable[str]) -> Iterator[TracedRequest]:
    rows = _json_lines(path, lines)
    first = next(rows, None)
    if first is None:
        return
    rows = _chained(first, rows)
    if "conversations" in first[1]:
        yield from sorted(_each(path, rows, _turns), key=attrgetter("at_s"))
    elif "resourceSpans" in first[1]:
        yield from sorted(_each(path, rows, _recorded), key=attrgetter("at_s"))
    else:
        yield from _in_order(path, rows, _mooncake)


def _json_lines(path: Path, lines: Iterable[str]) -> Iterator[Numbered]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line[max(0, line.rfind(_RECORDED)) :])  # a full disk may have torn what stands before it
        except (ValueError, RecursionError) as error:
            if not line.endswith("\n") and line.startswith(_RECORDED):
                return  # a process is still writing it
            reason = str(error)
            if isinstance(error, json.JSONDecodeError):  # whose own words count lines from this one on
                reason = f"no JSON from column {error.colno} on: {error.msg}"
            raise ValueError(f"{path}:{number}: {reason}") from error
        if not isinstance(row, dict):
            raise ValueError(f"{path}:{number}: is no object")
        yield number, row


def _chained(first: Numbered, others: Iterator[Numbered]) -> Iterator[Numbered]:
    yield first
    yield from others


def _each(
    path: Path, rows: Iterable[Numbered], parse: Callable[[int, Any], Iterable[TracedRequest]]
) -> Iterator[TracedRequest]:
    """Yields the requests of each line. What is wrong with one is raised as ValueError, with the line's number."""
    first_s: float | None = None
    for number, row in rows:
        try:
            for request in parse(number, row):
                _check(request)
                first_s = request.at_s if first_s is None else first_s
                if abs(request.at_s - first_s) > MOST_S:
                    raise ValueError(f"it arrives {abs(request.at_s - first_s):.3g} s from the first")
                yield request
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, AssertionError) as error:
            reason = f"{error} is missing" if isinstance(error, KeyError) else str(error) or "makes no sense"
            raise ValueError(f"{path}:{number}: {reason}") from error


def _in_order(path: Path, rows: Iterable[Numbered], parse: Callable[[Any], TracedRequest]) -> Iterator[TracedRequest]:
    """Yields the request of each line. Raises ValueError also for one that arrives before the one above it."""
    before_s = 0.0

    def parse_next(number: int, row: Any) -> Iterator[TracedRequest]:
        request = parse(row)
        if request.at_s < before_s:
            raise ValueError("it arrives before the one above it")
        yield request

    for request in _each(path, rows, parse_next):
        before_s = request.at_s
        yield request


def _check(request: TracedRequest) -> None:
    for name, value in (("prompt", request.prompt_tokens), ("output", request.output_tokens)):
        if not 0 <= value <= _MOST_TOKENS:
            raise ValueError(f"the {name} has {value} tokens")
    if not 0 <= request.at_s <= _LATEST_S:
        raise ValueError(f"it arrives at {request.at_s}")


def _mooncake(row: Mapping[str, Any]) -> TracedRequest:
    at_ms, block_ids = row["timestamp"], row.get("hash_ids", ())
    assert isinstance(at_ms, int | float)
    assert isinstance(block_ids, list | tuple)
    if not all(type(block_id) is int for block_id in block_ids):
        raise ValueError("hash_ids must be integers")
    return TracedRequest(
        at_ms / 1e3,
        int(str(row["input_length"])),
        int(str(row["output_length"])),
        tuple(block_ids),
        caller=_told(row, "caller", ""),
        session=_told(row, "session", ""),
        priority=int(_told(row, "priority", "0")),
    )


def _told(row: Mapping[str, Any], name: str, otherwise: str) -> str:
    """Returns what the line says under a name; `otherwise` if it says nothing, or null, which is no caller's name."""
    value = row.get(name)
    return otherwise if value is None else str(value)


# Conversations


def _turns(number: int, row: Mapping[str, Any]) -> Iterator[TracedRequest]:
    """Yields a request for each answer of a conversation.

    Conversations begin one a second, at random moments within that second (or at `timestamp`, in milliseconds); the
    next question comes when the answer was read, at 20 tokens a second, and another 20 s on average have passed. Four
    characters are a token. What two prompts begin with in common, in pieces of 16 tokens, is the same block of both.
    """
    chance = random.Random(f"conversation {number}")
    at_ms = row.get("timestamp", (number - 1 + chance.random()) * 1e3)
    assert isinstance(at_ms, int | float)
    session = _told(row, "id", f"line {number}")
    at_s, said, chunk_ids = at_ms / 1e3, "", list[int]()
    for message in row["conversations"]:
        speaker = message.get("from", message.get("role"))
        text = message.get("value", message.get("content"))
        if speaker not in _SPEAKERS or not isinstance(text, str):
            raise ValueError(f"{speaker!r} has said {type(text).__name__}, not text of human or gpt")
        if _SPEAKERS[speaker] == "assistant" and said:
            output_tokens = max(1, len(text) // _CHARACTERS_PER_TOKEN)
            chunk_ids += _chunk_ids(said, len(chunk_ids))
            yield TracedRequest(
                at_s,
                max(1, len(said) // _CHARACTERS_PER_TOKEN),
                output_tokens,
                tuple(chunk_ids),
                _CHUNK_TOKENS,
                session=session,
            )
            at_s += output_tokens * _READING_S_PER_TOKEN + chance.expovariate(1 / _PAUSE_S)
        said += text


def _chunk_ids(text: str, first: int) -> tuple[int, ...]:
    """Returns the ids of a text's full chunks, from number `first` on."""
    size = _CHUNK_TOKENS * _CHARACTERS_PER_TOKEN
    chunks = (text[start : start + size] for start in range(first * size, len(text) - size + 1, size))
    digests = (hashlib.blake2b(chunk.encode("utf-8", "replace"), digest_size=7).digest() for chunk in chunks)
    return tuple(int.from_bytes(digest, "big") for digest in digests)


# What Baton has recorded


def _recorded(number: int, row: Mapping[str, Any]) -> Iterator[TracedRequest]:
    """Yields the requests whose root spans stand in a line of OTLP JSON. A request that failed counts with the output
    that it had asked for, and is left out if it had not said how much."""
    for resource in row["resourceSpans"]:
        for scope in resource.get("scopeSpans", ()):
            for span in scope.get("spans", ()):
                if span["name"] != Span.REQUEST:
                    continue
                values = {pair["key"]: pair["value"] for pair in span.get("attributes", ())}
                output = values.get(Attr.OUTPUT_TOKENS, values.get(Attr.REQUEST_MAX_TOKENS))
                if Attr.INPUT_TOKENS not in values or output is None:
                    continue
                yield TracedRequest(
                    int(span["startTimeUnixNano"]) / 1e9,
                    int(values[Attr.INPUT_TOKENS]["intValue"]),
                    int(output["intValue"]),
                    session=str(values.get(Attr.CONVERSATION_ID, {}).get("stringValue", "")),
                    priority=int(values.get(Attr.PRIORITY, {}).get("intValue", 0)),
                )


# CSV


def _azure(path: Path, lines: Iterable[str]) -> Iterator[TracedRequest]:
    reader = csv.DictReader(lines)
    try:
        if not {"TIMESTAMP", "ContextTokens", "GeneratedTokens"} <= set(reader.fieldnames or ()):
            raise ValueError(
                f"{path} is no trace: its first line is not Azure's (TIMESTAMP,ContextTokens,GeneratedTokens), and its "
                "name does not end in .jsonl"
            )
        yield from _in_order(path, ((reader.line_num, row) for row in reader), _azure_request)
    except csv.Error as error:
        raise ValueError(f"{path}:{reader.line_num + 1}: {error}") from error


def _azure_request(row: Mapping[str, str | None]) -> TracedRequest:
    cells = {name: cell for name, cell in row.items() if cell is not None}  # a line that is cut off has fewer
    return TracedRequest(
        _seconds(cells["TIMESTAMP"]),
        int(cells["ContextTokens"]),
        int(cells["GeneratedTokens"]),
        caller=cells.get("Caller", ""),
        session=cells.get("Session", ""),
        priority=int(cells.get("Priority") or 0),
    )


def _seconds(timestamp: str) -> float:
    """Returns the seconds of a time such as "2023-11-16 18:15:46.6805900": Python reads six digits after the point, and
    the traces of 2023 have seven. Those of 2024 say their distance from UTC after them: "46.009930+00:00"."""
    match = re.fullmatch(r"([^.]*?)(?:\.([0-9]*))?(Z|[+-][0-9:]+)?", timestamp)
    if match is None:
        raise ValueError(f"{timestamp!r} is no time")
    moment = datetime.datetime.fromisoformat(match[1] + (match[3] or ""))
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return moment.timestamp() + float(f"0.{match[2] or 0}")
