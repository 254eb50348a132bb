"""Says what a search for the cheapest cluster has found: as plain data, as text for people, and as a picture."""

from __future__ import annotations

import statistics
from typing import Any

from services.sim.chart import Axis, Chart, Curve
from services.sim.goal import Goal
from services.sim.report import failures, figure
from services.sim.search import Candidate, Found


def text(found: Found, goal: Goal, most_workers: int) -> str:
    """Returns what was found as lines for people."""
    asked = ", ".join(f"{name} <= {bound:g} ms" for name, bound in goal.bounds_ms.items())
    if found.best is None:
        lines = [f"no cluster of at most {most_workers} workers meets {asked} ({found.num_simulated} simulated)"]
        lines += _out_of_reach(found, goal) or _fewest(found)
        lines += [_line("nearest", found.nearest, goal)] if found.nearest is not None else []
        return "\n".join(lines + _untried(found))
    lines = [f"{asked}; {found.num_simulated} clusters simulated", *_untried(found)]
    lines.append(_line("cheapest", found.best, goal))
    for name, candidate in (("runner-up", found.runner_up), ("unsplit", found.unsplit), ("split", found.split)):
        if candidate is not None:
            lines.append(_line(name, candidate, goal))
    lines += [_line(name, candidate, goal) for name, candidate in found.sensitivity.items()]
    return "\n".join(lines + why_not_split(found, goal))


def _out_of_reach(found: Found, goal: Goal) -> list[str]:
    return [
        f"{name} <= {goal.bounds_ms[name]:g} ms is out of reach, however many workers there are: "
        f"{_what_alone(name)} takes {figure(alone_ms)} ms on an idle one"
        for name, alone_ms in found.out_of_reach.items()
    ]


def _what_alone(bound: str) -> str:
    metric, _, percent = bound.partition("_")
    return f"a prompt of their {percent} length" if metric == "ttft" else "a token"


def _fewest(found: Found) -> list[str]:
    fewest = found.fewest
    return [
        f"the work alone needs at least {fewest.prefill} prefill and {fewest.decode} decode workers, or "
        f"{fewest.mixed} mixed ones (--max-workers, --rate-scale)"
    ]


def _untried(found: Found) -> list[str]:
    if not found.num_untried:
        return []
    return [f"not tried: {found.num_untried} more clusters of prefill, decode and mixed workers together"]


def why_not_split(found: Found, goal: Goal) -> list[str]:
    """Returns what is to be said where mixed workers do no worse for the same money, in lines."""
    best = found.best
    if best is None:
        return []
    if best.plan.decode:
        if found.unsplit is None or found.unsplit.figures is None or found.unsplit.margin < best.margin:
            return []
        return [
            "splitting does not pay here: mixed workers at the same cost keep a larger margin",
            *_limits(found.unsplit, best, found, goal),
        ]
    if found.split is None:
        return ["splitting does not pay here: no split cluster can be had for that money"]
    if found.split.meets_it and found.split.margin > best.margin:
        return []
    return [
        "splitting does not pay here: a split cluster for that money does worse",
        *_limits(best, found.split, found, goal),
    ]


def _limits(mixed: Candidate, split: Candidate, found: Found, goal: Goal) -> list[str]:
    """Returns why mixed workers do as well as split ones of the same cost, as far as figures tell."""
    lines, profile = [], mixed.plan.profile
    chunk_ms = profile.prefill_ms(profile.max_num_batched_tokens, profile.max_num_batched_tokens**2 / 2)
    tightest_ms = min((bound for name, bound in goal.bounds_ms.items() if name.startswith("itl")), default=None)
    if tightest_ms is None:
        lines.append(
            f"  a chunk of a prompt stops streams for {chunk_ms:.0f} ms on mixed workers, which no bound of itl forbids"
        )
    elif chunk_ms < tightest_ms:
        allowed = f"itl <= {tightest_ms:g} ms allows"
        lines.append(f"  a chunk of a prompt stops streams for {chunk_ms:.0f} ms on mixed workers, which {allowed}")
    whole = f"prompts are {found.prompt_share:.0%} of the work, which whole workers of one phase do not divide"
    if split.figures is None:
        return [*lines, f"  {split.name}: {split.broken} is broken by far; {whole}"]
    of_role = {
        role: statistics.mean(values)
        for role in ("prefill", "decode")
        if (values := [share for name, share in split.figures["busy"].items() if name.startswith(role)])
    }
    worst = min(goal.margins(split.figures).items(), key=lambda item: item[1])
    shares = " and ".join(f"{role} workers {share:.0%}" for role, share in of_role.items())
    lines.append(
        f"  {split.name}: {worst[0]} is the tightest ({worst[1]:+.0%}) while {shares} of the time compute; {whole}"
    )
    return lines


def _line(what: str, candidate: Candidate, goal: Goal) -> str:
    cost = f"{what:<10} {candidate.name}: {candidate.plan.cost_per_hour:g} an hour"
    figures = candidate.figures
    if figures is None:
        return f"{cost}, {candidate.broken} is broken: at most {candidate.attainment:.1%} of requests {within(goal)}"
    times = ", ".join(
        f"{name} {figures[f'{metric}_ms'][percent]:.1f} ms"
        for name in goal.bounds_ms
        for metric, _, percent in [name.partition("_")]
    )
    if failed := failures(figures):
        times += f", failed: {failed}"
    verdict = f"margin {candidate.margin:.0%}" if candidate.meets_it else "does not meet it"
    return f"{cost}, {times}, {candidate.attainment:.1%} of requests {within(goal)}, {verdict}"


def within(goal: Goal, *but: str) -> str:
    """Returns which bounds those of single requests are, of which itl has none."""
    left_out = [metric for metric in ("itl", *but) if goal.bounds_of(metric)]
    return "within the bounds" + (f" (but {' and '.join(left_out)})" if left_out else "")


def plain(found: Found) -> dict[str, Any]:
    """Returns what was found as plain data."""

    def of(candidate: Candidate | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        return {
            "workers": {role: getattr(candidate.plan, role) for role in ("prefill", "decode", "mixed")},
            "cost_per_hour": candidate.plan.cost_per_hour,
            "meets_it": candidate.meets_it,
            "margin": candidate.margin,
            "attainment": candidate.attainment,
            "figures": None if candidate.figures is None else dict(candidate.figures),
        }

    return {
        "best": of(found.best),
        "runner_up": of(found.runner_up),
        "unsplit": of(found.unsplit),
        "split": of(found.split),
        "nearest": of(found.nearest),
        "sensitivity": {name: of(candidate) for name, candidate in found.sensitivity.items()},
        "tried": [of(candidate) for candidate in found.tried],
        "out_of_reach_ms": dict(found.out_of_reach),
        "num_simulated": found.num_simulated,
        "num_untried": found.num_untried,
    }


def picture(found: Found) -> str:
    """Returns cost against attainment of all that was tried, as SVG: at least one cluster."""
    kinds: dict[str, list[Candidate]] = {}
    for each in found.tried:
        kind = "mixed" if not each.plan.decode else "prefill, decode and mixed" if each.plan.mixed else "split"
        kinds.setdefault(f"{kind}, meets the objective" if each.meets_it else kind, []).append(each)
    chart = Chart(
        "Cost against attainment",
        Axis("cost an hour"),
        Axis("requests within the bounds, %"),
        joined=False,
    )
    return chart.svg(
        [
            Curve(kind, tuple((each.plan.cost_per_hour, 100 * each.attainment) for each in of_kind))
            for kind, of_kind in sorted(kinds.items())
        ]
    )
