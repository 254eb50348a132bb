"""Summarises what became of a simulated trace: as figures, and as text for people."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.sim.chart import Axis, Chart, Curve
from services.sim.cluster import Outcome, Served, SimPlan

PERCENTS = (50, 95, 99)
_NAMES = tuple(f"p{percent}" for percent in PERCENTS)


@dataclass(frozen=True)
class Objective:
    """Says what a good answer is, in seconds."""

    ttft_s: float
    tpot_s: float
    queue_s: float = math.inf

    def met_by(self, served: Served) -> bool:
        if served.ttft_s is None or served.total_s is None:
            return False
        if served.ttft_s > self.ttft_s or served.queue_s > self.queue_s:
            return False
        return served.tpot_s is None or served.tpot_s <= self.tpot_s


def summary(plan: SimPlan, outcome: Outcome, objective: Objective) -> dict[str, Any]:
    """Returns the figures as plain data. Times are in milliseconds. A request that failed counts with an infinite time
    in each percentile, in those of gaps as many times as it should have had gaps."""
    failed = [served for served in outcome.requests if served.total_s is None]
    of_streams = [math.inf for served in failed if served.output_tokens > 1]
    lost_gaps = {math.inf: gaps} if (gaps := sum(max(0, served.output_tokens - 1) for served in failed)) else {}
    ended = [served for served in outcome.requests if served.total_s is not None]
    good = sum(map(objective.met_by, outcome.requests))
    output_tokens = sum(served.output_tokens for served in ended)
    prompt_tokens = sum(served.prompt_tokens for served in ended)
    seconds = outcome.seconds or 1.0
    return {
        "workers": {"prefill": plan.prefill, "decode": plan.decode, "mixed": plan.mixed},
        "profile": plan.profile.name,
        "num_requests": len(outcome.requests),
        "num_failed": dict(Counter(served.error for served in outcome.requests if served.error)),
        "seconds": outcome.seconds,
        "requests_per_s": len(ended) / seconds,
        "output_tokens_per_s": output_tokens / seconds,
        "ttft_ms": _percentiles(
            [math.inf] * len(failed) + [served.ttft_s for served in ended if served.ttft_s is not None]
        ),
        "tpot_ms": _percentiles(of_streams + [tpot_s for served in ended if (tpot_s := served.tpot_s) is not None]),
        "itl_ms": _weighted(outcome.gaps_s | lost_gaps),
        "queue_ms": _percentiles([math.inf] * len(failed) + [served.queue_s for served in ended]),
        "objective_ms": {"ttft": objective.ttft_s * 1e3, "tpot": objective.tpot_s * 1e3},
        "goodput_per_s": good / seconds,
        "attainment": good / len(outcome.requests) if outcome.requests else 0.0,
        "by_priority": _by_priority(outcome.requests, objective),
        "by_tenant": _by_tenant(outcome.requests),
        "hit_rate": sum(served.cached_tokens for served in ended) / prompt_tokens if prompt_tokens else 0.0,
        "busy": outcome.busy,
        "bytes_moved": outcome.bytes_moved,
        "num_preemptions": outcome.num_preemptions,
        "ejections": [dataclasses.asdict(ejected) for ejected in outcome.ejections],
        "num_retries": sum(served.num_retries for served in outcome.requests),
        "cost": plan.cost_per_hour * seconds / 3600,
    }


def as_json(value: Any, *, indent: int | None = None) -> str:
    """Returns plain data as JSON. What is not finite, as a percentile of requests that failed, is null there."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {key: _finite(each) for key, each in value.items()}
        case list() | tuple():
            return [_finite(each) for each in value]
    return value


def text(figures: Mapping[str, Any]) -> str:
    """Returns the figures as lines for people."""
    workers = ", ".join(f"{count} {role}" for role, count in figures["workers"].items() if count)
    failed = failures(figures) or "none"
    lines = [
        f"{workers} ({figures['profile']}): {figures['num_requests']} requests in {figures['seconds']:.0f} s, "
        f"{figures['requests_per_s']:.2f} requests/s, {figures['output_tokens_per_s']:.0f} output tokens/s",
        f"{'ms':<6}" + "".join(f"{name:>10}" for name in _NAMES),
    ]
    for name in ("ttft", "tpot", "itl", "queue"):
        values = figures[f"{name}_ms"]
        lines.append(f"{name.upper():<6}" + "".join(f"{values[percent]:>10.1f}" for percent in _NAMES))
    objective = figures["objective_ms"]
    busy = ", ".join(f"{name} {share:.0%}" for name, share in figures["busy"].items())
    lines += [
        f"good  {figures['attainment']:.1%} (TTFT <= {objective['ttft']:.0f} ms, TPOT <= {objective['tpot']:.0f} ms), "
        f"{figures['goodput_per_s']:.2f} requests/s",
        *(
            f"      priority {priority}: {of['attainment']:.1%} of {of['num_requests']}"
            for priority, of in figures["by_priority"].items()
        ),
        *(
            f"      tenant {tenant or '(none)'}: TTFT p50 {of['ttft_ms']['p50']:.1f} ms, "
            f"p99 {of['ttft_ms']['p99']:.1f} ms; {of['num_failed']} of {of['num_requests']} failed"
            for tenant, of in figures["by_tenant"].items()
        ),
        f"busy  {busy}",
        f"cache {figures['hit_rate']:.1%} of prompt tokens were in a prefix cache",
        f"KV moved {figures['bytes_moved'] / 1e9:.2f} GB, {figures['num_preemptions']} preemptions, "
        f"{figures['num_retries']} retries, failed: {failed}, cost {figure(figures['cost'])}",
        *(f"slow  {each['worker_id']} at {each['at_s']:.0f} s: {each['reason']}" for each in figures["ejections"]),
    ]
    return "\n".join(lines)


def figure(value: float) -> str:
    """Returns the number in about three digits, and without an exponent."""
    size = abs(value)
    return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"


def failures(figures: Mapping[str, Any]) -> str:
    """Returns how many requests failed and why, such as "3 NO_WORKER"; empty if none did."""
    return ", ".join(f"{count} {reason}" for reason, count in figures["num_failed"].items())


def picture(outcome: Outcome) -> str:
    """Returns the distributions of TTFT, TPOT, ITL and queueing, as SVG. Times below a tenth of a millisecond are drawn
    as that."""
    chart = Chart(
        "Times of requests",
        Axis("milliseconds", logarithmic=True),
        Axis("requests (or tokens) that waited no longer, %"),
        markers=False,
    )
    ended = [served for served in outcome.requests if served.total_s is not None]
    of_requests: dict[str, list[float | None]] = {
        "TTFT": [served.ttft_s for served in ended],
        "TPOT": [served.tpot_s for served in ended],
        "queue": [served.queue_s for served in ended],
    }
    counts: dict[str, Mapping[float, int]] = {
        name: Counter(value for value in values if value is not None) for name, values in of_requests.items()
    }
    return chart.svg(
        [Curve(name, _cumulated(weights)) for name, weights in (counts | {"ITL": outcome.gaps_s}).items() if weights]
    )


def _cumulated(counts: Mapping[float, int]) -> tuple[tuple[float, float], ...]:
    """Returns about two hundred points (milliseconds, percent of what is no larger)."""
    total, seen, points = sum(counts.values()), 0, list[tuple[float, float]]()
    for value, count in sorted(counts.items()):
        seen += count
        share = 100 * seen / total
        if not points or share - points[-1][1] >= 0.5 or seen == total:
            points.append((max(value * 1e3, 0.1), share))
    return tuple(points)


def _by_priority(requests: Sequence[Served], objective: Objective) -> dict[str, dict[str, float]]:
    """Returns how many requests of each priority there were and which share of them was good; nothing if all are of
    one priority."""
    groups: dict[int, list[Served]] = {}
    for served in requests:
        groups.setdefault(served.priority, []).append(served)
    if len(groups) < 2:
        return {}
    return {
        str(priority): {"num_requests": len(group), "attainment": sum(map(objective.met_by, group)) / len(group)}
        for priority, group in sorted(groups.items(), reverse=True)
    }


def _by_tenant(requests: Sequence[Served]) -> dict[str, dict[str, Any]]:
    """Returns what each tenant was served, with percentiles of the TTFT of those requests that have one; nothing if all
    are one tenant's."""
    groups: dict[str, list[Served]] = {}
    for served in requests:
        groups.setdefault(served.tenant, []).append(served)
    if len(groups) < 2:
        return {}
    return {
        tenant: {
            "num_requests": len(group),
            "num_failed": sum(each.total_s is None for each in group),
            "tokens": sum(each.prompt_tokens + each.output_tokens for each in group if each.total_s is not None),
            "ttft_ms": _percentiles([each.ttft_s for each in group if each.ttft_s is not None]),
        }
        for tenant, group in sorted(groups.items())
    }


def _percentiles(seconds: Sequence[float]) -> dict[str, float]:
    return _weighted(Counter(seconds))


def _weighted(counts: Mapping[float, int]) -> dict[str, float]:
    """Returns percentiles in milliseconds, by nearest rank; zeros if there is nothing."""
    total, found, seen = sum(counts.values()), dict.fromkeys(_NAMES, 0.0), 0
    left = list(PERCENTS)
    for value, count in sorted(counts.items()):
        seen += count
        while left and seen * 100 >= left[0] * total:
            found[f"p{left.pop(0)}"] = value * 1e3
    return found
