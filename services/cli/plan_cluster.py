"""Runs `baton plan`: finds the cheapest cluster that would serve a trace within an objective."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

from services.cli.arguments import Parser
from services.cli.simulate import add_workload, read_profiles, read_workload
from services.core.errors import ConfigError
from services.sim.report import PERCENTS
from services.sim.search import METRICS, Candidate, Found, Goal, search

_MOST_WORKERS = 64


def main(argv: Sequence[str], prog: str) -> int:
    """Returns 0 if a cluster meets the objective, and 1 if none does."""
    parser = Parser(prog=prog, description="Finds the cheapest cluster that serves a trace within an objective.")
    add_workload(parser)
    parser.add_argument(
        "--slo", required=True, metavar="BOUNDS", help="such as ttft_p95=500ms,tpot_p95=50ms (also itl and queue)"
    )
    parser.add_argument("--cost", default="", metavar="COSTS", help="of workers an hour: prefill=2,decode=1")
    parser.add_argument("--max-workers", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print what was found as JSON")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.max_workers <= _MOST_WORKERS:
        raise ConfigError(f"--max-workers: {arguments.max_workers} is not from 1 to {_MOST_WORKERS}")
    goal, costs = parse_goal(arguments.slo), _costs(arguments.cost)
    profile, of_decode = read_profiles(arguments)
    of_decode = of_decode or profile
    profile = dataclasses.replace(profile, cost_per_hour=costs.get("prefill", profile.cost_per_hour))
    of_decode = dataclasses.replace(of_decode, cost_per_hour=costs.get("decode", of_decode.cost_per_hour))

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = search(read_workload(arguments), profile, of_decode, goal, arguments.max_workers, tell)
    print(json.dumps(_plain(found)) if arguments.json else _text(found, goal, arguments.max_workers))
    return 0 if found.best is not None else 1


def parse_goal(text: str) -> Goal:
    """Returns the bounds that "ttft_p95=500ms,tpot_p95=50ms" names. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([a-z]+)_p(\d+)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
        if match is None or match[1] not in METRICS or int(match[2]) not in PERCENTS:
            percents = ", ".join(f"p{percent}" for percent in PERCENTS)
            raise ConfigError(
                f"--slo: {part!r} is not like ttft_p95=500ms; there are {', '.join(METRICS)} and {percents}"
            )
        bound_ms = float(match[3]) * (1000 if match[4] == "s" else 1)
        if not bound_ms:
            raise ConfigError(f"--slo: {part!r} must be above 0")
        bounds[f"{match[1]}_p{match[2]}"] = bound_ms
    return Goal(bounds)


def _costs(text: str) -> dict[str, float]:
    costs: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(prefill|decode)=(\d+(?:\.\d+)?)", part.strip())
        if match is None:
            raise ConfigError(f"--cost: {part!r} is not like prefill=2 or decode=1")
        costs[match[1]] = float(match[2])
    return costs


def _text(found: Found, goal: Goal, most_workers: int) -> str:
    asked = ", ".join(f"{name} <= {bound:g} ms" for name, bound in goal.bounds_ms.items())
    if found.best is None:
        fewest = found.fewest
        lines = [
            f"no cluster of at most {most_workers} workers meets {asked} ({found.num_simulated} simulated)",
            f"the work alone needs at least {fewest.prefill} prefill and {fewest.decode} decode workers, or "
            f"{fewest.mixed} mixed ones (--max-workers, --rate-scale)",
        ]
        return "\n".join(lines + ([_line("nearest", found.nearest, goal)] if found.nearest is not None else []))
    lines = [f"{asked}; {found.num_simulated} clusters simulated", _line("cheapest", found.best, goal)]
    if found.runner_up is not None:
        lines.append(_line("runner-up", found.runner_up, goal))
    if found.unsplit is not None:
        lines.append(_line("unsplit", found.unsplit, goal))
        if found.unsplit.margin >= found.best.margin:
            lines.append("splitting does not pay here: mixed workers at the same cost keep a larger margin")
    elif found.best.plan.mixed:
        lines.append("splitting does not pay here: no split cluster at this cost meets it")
    return "\n".join(lines)


def _line(what: str, candidate: Candidate, goal: Goal) -> str:
    figures = ", ".join(
        f"{name} {candidate.figures[f'{metric}_ms'][percent]:.1f} ms"
        for name in goal.bounds_ms
        for metric, _, percent in [name.partition("_")]
    )
    verdict = f"margin {candidate.margin:.0%}" if candidate.margin >= 0 else "does not meet it"
    return f"{what:<10} {candidate.name}: {candidate.plan.cost_per_hour:g} an hour, {figures}, {verdict}"


def _plain(found: Found) -> dict[str, Any]:
    def plain(candidate: Candidate | None) -> dict[str, Any] | None:
        if candidate is None:
            return None
        return {
            "cost_per_hour": candidate.plan.cost_per_hour,
            "margin": candidate.margin,
            "figures": dict(candidate.figures),
        }

    return {
        "best": plain(found.best),
        "runner_up": plain(found.runner_up),
        "unsplit": plain(found.unsplit),
        "nearest": plain(found.nearest),
        "num_simulated": found.num_simulated,
    }
