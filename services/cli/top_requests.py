"""Words what `baton top` shows of requests: a row for each, and the orders in which they are sorted. Pure.

Owns: columns, order, and which latency is near its objective or over it. Never: colours, or drawing on a terminal.
All text is printable: ids come from clients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from baton.v1 import control_pb2
from services.cli.tables import clip
from services.core.printable import printable
from services.router.telemetry.slo import Grade, grade

REQUEST_HEADINGS = (
    *("request", "age", "phase", "prompt", "cached", "out", "ttft ms", "tpot ms", "itl max", "exposed", "total ms"),
    *("retries", "workers"),
)
_MOST_ID_CHARS = 28


@dataclass(frozen=True, slots=True)
class FollowedRequest:
    message: control_pb2.Timeline
    timeline: dict[str, Any]
    """The message as plain data, as it was when `heard_s` was now."""
    heard_s: float
    """By this process's clock, seconds."""

    @property
    def arrived_s(self) -> float:
        return self.heard_s - float(self.timeline["age_us"]) / 1e6

    @property
    def is_live(self) -> bool:
        return bool(self.timeline["phase"] != "ended")


class RequestRow(NamedTuple):
    request_id: str
    age: str
    phase: str
    """How it ended, once it has."""
    prompt_tokens: str
    cached_tokens: str
    output_tokens: str
    ttft_ms: str
    tpot_ms: str
    longest_itl_ms: str
    exposed_ms: str
    total_ms: str
    retries: str
    workers: str


class SortKey(NamedTuple):
    key: str
    """The key of the keyboard that chooses it."""
    name: str
    of: Callable[[dict[str, Any]], Any]
    """Returns what a timeline is sorted by; None comes last, in either direction."""
    descending: bool
    """The direction at first."""


SORT_KEYS = (
    SortKey("a", "arrival", lambda timeline: timeline["number"], True),
    SortKey("t", "ttft", lambda timeline: timeline.get("ttft_us"), True),
    SortKey("p", "tpot", lambda timeline: timeline.get("tpot_us"), True),
    SortKey("i", "itl", lambda timeline: timeline.get("longest_itl_us"), True),
    SortKey("x", "exposed", lambda timeline: _timing(timeline, "transfer_exposed_ms"), True),
    SortKey("d", "total", lambda timeline: timeline.get("total_us"), True),
    SortKey("r", "retries", lambda timeline: timeline["num_retries"], True),
    SortKey("w", "workers", lambda timeline: (timeline["prefill_worker"], timeline["decode_worker"]), False),
    SortKey("o", "outcome", lambda timeline: (timeline["phase"] == "ended", timeline["outcome"]), False),
)


def in_order(
    requests: Sequence[FollowedRequest], order: SortKey, *, descending: bool | None = None
) -> list[FollowedRequest]:
    """Returns the requests in that order; among equals the order in which they were given stays."""
    known = [request for request in requests if order.of(request.timeline) is not None]
    unknown = [request for request in requests if order.of(request.timeline) is None]
    known.sort(
        key=lambda request: order.of(request.timeline), reverse=order.descending if descending is None else descending
    )
    return known + unknown


def having(requests: Sequence[FollowedRequest], part: str) -> list[FollowedRequest]:
    """Returns those with this part in their id, model, phase, outcome or workers, in whatever case."""
    wanted = part.casefold()
    names = ("request_id", "model", "phase", "outcome", "prefill_worker", "decode_worker")
    return [each for each in requests if any(wanted in each.timeline[name].casefold() for name in names)]


def request_row(request: FollowedRequest, now: float) -> RequestRow:
    timeline = request.timeline
    prefill, decode = timeline["prefill_worker"], timeline["decode_worker"]
    return RequestRow(
        printable(clip(timeline["request_id"], _MOST_ID_CHARS)),
        age(now - request.arrived_s),
        printable(clip(timeline["phase"] if request.is_live else timeline["outcome"] or "ended", 24)),
        str(timeline["prompt_tokens"]),
        str(timeline["cached_tokens"]),
        str(timeline["output_tokens"]),
        _ms_of(timeline, "ttft_us"),
        _ms_of(timeline, "tpot_us"),
        _ms_of(timeline, "longest_itl_us"),
        ms(_timing(timeline, "transfer_exposed_ms")),
        _ms_of(timeline, "total_us"),
        str(timeline["num_retries"]),
        printable(" → ".join(clip(name) for name in dict.fromkeys((prefill, decode)) if name) or "-"),
    )


def grades(timeline: dict[str, Any], objectives: dict[str, float]) -> dict[str, Grade]:
    """Returns by field of the row how its latency stands to its objective, where both are known."""
    found = {}
    for field, name, objective in (
        ("ttft_ms", "ttft_us", "ttft_ms"),
        ("tpot_ms", "tpot_us", "tpot_ms"),
        ("longest_itl_ms", "longest_itl_us", "itl_ms"),
        ("total_ms", "total_us", "e2e_ms"),
    ):
        target_ms = objectives.get(objective, 0.0)
        if name in timeline and target_ms > 0:
            found[field] = grade(timeline[name] / 1e6, target_ms / 1e3)
    return found


def longest_wait_s(requests: Sequence[FollowedRequest], now: float) -> float:
    """Returns for how long that request has waited which has waited longest for a worker; 0 if none waits."""
    waits = [
        now - each.arrived_s - stage["start_us"] / 1e6
        for each in requests
        if each.timeline["phase"] in ("queued", "parked")
        for stage in each.timeline["stages"][-1:]
        if "end_us" not in stage
    ]
    return max(waits, default=0.0)


def age(seconds: float) -> str:
    if seconds < 100:
        return f"{max(0.0, seconds):.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.0f} h"


def ms(milliseconds: float | None) -> str:
    if milliseconds is None:
        return "-"
    return f"{milliseconds:.1f}" if milliseconds < 1000 else f"{milliseconds:.0f}"


def _ms_of(timeline: dict[str, Any], name: str) -> str:
    return ms(timeline[name] / 1e3 if name in timeline else None)


def _timing(timeline: dict[str, Any], name: str) -> float | None:
    value: float | None = timeline.get("timings", {}).get(name)
    return value
