"""Writes a line for each request that ended: who asked, what it took and where it ran.

Owns: what a line says. Never: how it comes to the file (`json_lines.py`), or whether a tenant's texts may be shown: the
intake hands in only those that may.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from services.router.telemetry.json_lines import JsonLines
from services.router.telemetry.timelines import Timeline
from services.router.telemetry.usage import RequestUsage, charged


@dataclass(slots=True)
class RequestDetails:
    """Says what is known of a request beside what it is charged."""

    front: str
    """`grpc` or `http`."""
    is_stream: bool | None = None
    """None if it was refused before that was known."""
    duration_s: float | None = None
    """From its arrival to the end of its answer, or until it was refused; None if it could not be read."""
    timeline: Timeline | None = None
    """None if it was refused before it was valid."""
    failure: str = ""
    """What its client was told, if it has failed; shortened."""
    prompt: Any = None
    """Its beginning: a text, messages or token ids. None unless it may be shown."""
    answer: str | None = None
    """The beginning of its first answer; None unless it may be shown."""


class RequestLog:
    """Is told of requests by `ended`, on the event loop."""

    def __init__(self, lines: JsonLines, text_chars: int) -> None:
        """`text_chars` is how much of a prompt, and of an answer, a line may have."""
        self._lines = lines
        self.text_chars = text_chars

    def ended(self, usage: RequestUsage, details: RequestDetails) -> None:
        """Notes a request that has ended. It waits for nothing."""
        fields = {**charged(usage), "front": details.front, "stream": details.is_stream}
        fields |= _course(details.timeline) | {"duration_s": _rounded(details.duration_s)}
        texts = {"error": details.failure or None, "prompt": details.prompt, "answer": details.answer}
        texts = {name: text for name, text in texts.items() if text is not None}
        self._lines.put(fields | texts, num_text_bytes=_size(texts))


def _course(timeline: Timeline | None) -> dict[str, Any]:
    """Returns where a request was, and how long. Times are in seconds; what did not happen is None."""
    if timeline is None:
        return {}
    times, waits = timeline.times, [stage for stage in timeline.stages if stage.name == "queue"]
    first_s = None if times.first_s is None else times.first_s - timeline.arrived_s
    queue_s = sum(stage.ended_s - stage.started_s for stage in waits if stage.ended_s is not None)
    return {
        "trace_id": timeline.trace_id or None,
        "priority": timeline.priority,
        "max_tokens": timeline.max_tokens,
        "prefill_worker": timeline.prefill_worker or None,
        "decode_worker": timeline.decode_worker or None,
        "retries": timeline.num_retries,
        "queue_s": _rounded(queue_s) if waits else None,
        "ttft_s": _rounded(first_s),
        "itl_mean_s": _rounded(times.per_token_s),
        "itl_max_s": _rounded(times.longest_gap_s) if times.per_token_s is not None else None,
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _size(shown: Any) -> int:
    """Returns about how many bytes of memory it takes."""
    match shown:
        case dict():
            return sys.getsizeof(shown) + sum(map(_size, shown.values()))
        case list():
            return sys.getsizeof(shown) + sum(map(_size, shown))
    return sys.getsizeof(shown)
