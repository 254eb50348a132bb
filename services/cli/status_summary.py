"""Words what a person asks of a cluster first: how fast it is, what it does, who is there, and what is amiss.

Owns: the lines, and the figures of the last minute. Never: asking, or the ledger of blocks (`status.py`).
"""

from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.cli.tables import clip, table
from services.cli.top_cluster import worker_rows
from services.cli.top_requests import FollowedRequest, age, ms
from services.core.printable import printable

WINDOW_S = 60.0
_HEADINGS = ("worker", "role", "health", "running", "waiting", "KV in use")
_MOST_WORKERS = 40


@dataclass(frozen=True)
class LastMinute:
    """Holds what the requests of the newest `seconds` show."""

    seconds: float
    prompt_tokens_per_s: float
    """Rate of tokens of prompts whose first token came."""
    output_tokens_per_s: float
    ttft_ms: Sequence[float]
    """Times to the first token, of requests that had theirs, in ascending order."""

    def ttft_of(self, share: float) -> float | None:
        """Returns the time to the first token that this share of the requests did not exceed; None without any."""
        return self.ttft_ms[math.ceil(share * len(self.ttft_ms)) - 1] if self.ttft_ms else None


def last_minute(requests: Sequence[FollowedRequest], now: float, up_s: float, most: int) -> LastMinute:
    """Returns the figures of the newest minute. It is shorter if the router has not run for as long, or if `most`
    requests, which are all that are known, do not reach back so far. Output counts as if it had come evenly."""
    window_s = min(WINDOW_S, up_s)
    if len(requests) >= most:
        window_s = min(window_s, now - min(each.arrived_s for each in requests))
    since_s = now - max(window_s, 1.0)
    prompt_tokens, output_tokens, ttft_ms = 0, 0.0, []
    for request in requests:
        timeline = request.timeline
        if "ttft_us" not in timeline:
            continue
        first_s = request.arrived_s + timeline["ttft_us"] / 1e6
        if first_s >= since_s:
            prompt_tokens += timeline["prompt_tokens"]
            ttft_ms.append(timeline["ttft_us"] / 1e3)
        last_s = request.arrived_s + timeline["total_us"] / 1e6 if "total_us" in timeline else request.heard_s
        share = (last_s - max(first_s, since_s)) / (last_s - first_s) if last_s > first_s else float(last_s >= since_s)
        output_tokens += timeline["output_tokens"] * max(0.0, share)
    seconds = now - since_s
    return LastMinute(seconds, prompt_tokens / seconds, output_tokens / seconds, sorted(ttft_ms))


def http_base(target: str, status: dict[str, Any]) -> str:
    """Returns where the router's HTTP is reached from here; empty without HTTP."""
    scheme = "https" if status["has_http_tls"] else "http"
    return f"  {scheme}://{target.rpartition(':')[0]}:{status['http_port']}/v1" if status["http_port"] else ""


def summary(target: str, status: dict[str, Any], figures: LastMinute, wall_s: float) -> list[str]:
    """Returns the lines. `status` is a GetStatusResponse as plain data; `wall_s` is Unix time."""
    names = ", ".join(clip(model["model_id"]) for model in status["models"][:3]) or "no model"
    num, running = len(figures.ttft_ms), status["num_prefilling"] + status["num_decoding"]
    waiting = status["num_queued"] + status["num_parked"]
    rows = worker_rows(status, 0, {})[:_MOST_WORKERS]
    shown = [
        (row.worker_id, row.role, clip(row.reason or row.state), row.running, row.waiting, row.in_use) for row in rows
    ]
    ready = "ready" if status["ready"] else "not ready"
    lines = [
        f"{names}  {ready}{_up(status['up_ms'] / 1e3, wall_s)}",
        *([f"HTTP     {base}"] if (base := http_base(target, status)) else []),
        f"requests   {running} running, {waiting} waiting",
        f"tokens/s   {figures.prompt_tokens_per_s:.1f} in, {figures.output_tokens_per_s:.1f} out  "
        f"(last {figures.seconds:.0f} s)",
        f"TTFT       p50 {_ms(figures.ttft_of(0.5))}, p95 {_ms(figures.ttft_of(0.95))}  "
        f"({num} request{'' if num == 1 else 's'} in the last {figures.seconds:.0f} s)",
        "",
        *table([_HEADINGS, *shown]),
    ]
    if len(status["workers"]) > _MOST_WORKERS:
        lines.append(f"and {len(status['workers']) - _MOST_WORKERS} more")
    return [printable(line) for line in [*lines, "", *_components(status["components"])]]


def _components(components: Sequence[dict[str, Any]]) -> list[str]:
    """Returns one line with the parts that are ok, and one for each other part."""
    fine = [each["name"] for each in components if each["state"] == "ok"]
    amiss = [each for each in components if each["state"] != "ok"]
    lines = [f"ok         {', '.join(fine)}"] if fine else []
    return lines + [f"{each['state']:<10} {each['name']}: {clip(each['reason'], 200)}" for each in amiss]


def _up(seconds: float, wall_s: float) -> str:
    if not seconds:
        return ""
    began = datetime.datetime.fromtimestamp(wall_s - seconds)
    return f", up since {began:%H:%M:%S} ({age(seconds)})" if seconds < 86400 else f", up since {began:%Y-%m-%d %H:%M}"


def _ms(milliseconds: float | None) -> str:
    return "-" if milliseconds is None else f"{ms(milliseconds)} ms"
