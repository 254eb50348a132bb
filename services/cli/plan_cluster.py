"""Runs `baton plan`: finds the cheapest cluster that would serve a trace within an objective."""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control
from services.cli.client import tls_of
from services.cli.live import read_live
from services.cli.simulate import (
    add_json,
    add_policy,
    add_workload,
    check_outputs,
    default_profile,
    read_profiles,
    read_workload,
    router_of,
    scaled_as_asked,
    write_json,
    write_named,
)
from services.core.errors import ConfigError
from services.sim.chart import Axis, Chart, Curve
from services.sim.cluster import ROUTER
from services.sim.goal import METRICS, Goal
from services.sim.profile import WorkerProfile
from services.sim.report import PERCENTS, as_json, failures
from services.sim.search import Candidate, Found, search
from services.sim.trace import TracedRequest

_MOST_WORKERS = 64


def main(argv: Sequence[str], prog: str) -> int:
    """Returns 0 if a cluster meets the objective, and 1 if none does. What it raises ends it with another status."""
    parser = Parser(prog=prog, description="Finds the cheapest cluster that serves a trace within an objective.")
    add_workload(parser)
    add_policy(parser)
    parser.add_argument(
        "--slo", required=True, metavar="BOUNDS", help="such as ttft_p95=500ms,tpot_p95=50ms (also itl and queue)"
    )
    parser.add_argument("--cost", default="", metavar="COSTS", help="of workers an hour: prefill=2,decode=1")
    parser.add_argument("--max-workers", type=int, default=8, metavar="N", help="(default: %(default)s)")
    parser.add_argument(
        "--live",
        action="store_true",
        help="plan for what the router at --target has served in the last hour; if there is no profile, on workers as "
        "they have measured themselves",
    )
    parser.add_argument(
        "--model", default="", metavar="ID", help="with --live: which of its models (default: the router's own)"
    )
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    add_json(parser)
    parser.add_argument("--plot", default="", metavar="FILE", help="draw cost against attainment there, as SVG")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.max_workers <= _MOST_WORKERS:
        raise ConfigError(f"--max-workers: {arguments.max_workers} is not from 1 to {_MOST_WORKERS}")
    goal, costs, router = parse_goal(arguments.slo), _costs(arguments.cost), router_of(arguments, ROUTER)
    check_outputs(arguments)
    trace, (profile, of_decode), served = _workload(arguments, goal)
    of_decode = of_decode or profile
    profile = dataclasses.replace(profile, cost_per_hour=costs.get("prefill", profile.cost_per_hour))
    of_decode = dataclasses.replace(of_decode, cost_per_hour=costs.get("decode", of_decode.cost_per_hour))

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    found = search(trace, profile, of_decode, goal, arguments.max_workers, tell, router)
    plain = _plain(found) | ({"served": {"good": served[0], "all": served[1]}} if served else {})
    write_json(arguments, as_json(plain, indent=1))
    if arguments.json == "-":
        print(as_json(plain))
    else:
        if served:
            within = _within(goal, "queue")
            print(f"served: {served[1]} requests in the last hour, {served[0] / served[1]:.1%} {within}")
        print(_text(found, goal, arguments.max_workers))
    if arguments.plot and not found.tried:
        tell("--plot: nothing was simulated, so there is nothing to draw")
    elif arguments.plot:
        write_named(Path(arguments.plot), picture(found), "--plot")
    return 0 if found.best is not None else 1


def _workload(
    arguments: argparse.Namespace, goal: Goal
) -> tuple[list[TracedRequest], tuple[WorkerProfile, WorkerProfile | None], tuple[int, int] | None]:
    """Returns the requests, the profiles of workers and of decode workers, and, of a running router, how many requests
    it has served within the bounds and how many in all."""
    if not arguments.live:
        if arguments.model:
            raise ConfigError("--model: says whose requests --live takes; give --live too")
        return read_workload(arguments), read_profiles(arguments), None
    if arguments.trace:
        raise ConfigError("--live: takes the place of --trace; give one of them")
    measured = not arguments.profile and not default_profile().is_file()
    live = read_live(
        arguments.target,
        arguments.cluster_token_file,
        arguments.timeout,
        goal.objective,
        arguments.model,
        with_profile=measured,
        tls=tls_of(arguments),
    )
    profiles = read_profiles(arguments, live.profile)
    return scaled_as_asked(live.trace, arguments), profiles, live.attainment


def parse_goal(text: str) -> Goal:
    """Returns the bounds that "ttft_p95=500ms,tpot_p95=50ms" names. Raises ConfigError."""
    bounds: dict[str, float] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([a-z]+)_p(\d+)=(\d+(?:\.\d+)?)(ms|s)", part.strip(), re.ASCII)
        if match is None or match[1] not in METRICS or match[2] not in map(str, PERCENTS):
            percents = ", ".join(f"p{percent}" for percent in PERCENTS)
            raise ConfigError(
                f"--slo: {part!r} is not like ttft_p95=500ms; there are {', '.join(METRICS)} and {percents}"
            )
        bound_ms = float(match[3]) * (1000 if match[4] == "s" else 1)
        if not 0 < bound_ms <= 1e12:
            raise ConfigError(f"--slo: {part!r} must be above 0, and at most a thousand million seconds")
        name = f"{match[1]}_p{match[2]}"
        if name in bounds:
            raise ConfigError(f"--slo: {name} has two bounds")
        bounds[name] = bound_ms
    return Goal(bounds)


def _costs(text: str) -> dict[str, float]:
    costs: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(prefill|decode)=(\d+(?:\.\d+)?)", part.strip())
        if match is None:
            raise ConfigError(f"--cost: {part!r} is not like prefill=2 or decode=1")
        if match[1] in costs:
            raise ConfigError(f"--cost: {match[1]} has two costs")
        costs[match[1]] = float(match[2])
    return costs


def _text(found: Found, goal: Goal, most_workers: int) -> str:
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
        f"{_what_alone(name)} takes {alone_ms:.3g} ms on an idle one"
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
        return f"{cost}, {candidate.broken} is broken: at most {candidate.attainment:.1%} of requests {_within(goal)}"
    times = ", ".join(
        f"{name} {figures[f'{metric}_ms'][percent]:.1f} ms"
        for name in goal.bounds_ms
        for metric, _, percent in [name.partition("_")]
    )
    if failed := failures(figures):
        times += f", failed: {failed}"
    verdict = f"margin {candidate.margin:.0%}" if candidate.meets_it else "does not meet it"
    return f"{cost}, {times}, {candidate.attainment:.1%} of requests {_within(goal)}, {verdict}"


def _within(goal: Goal, *but: str) -> str:
    """Returns which bounds those of single requests are, of which itl has none."""
    left_out = [metric for metric in ("itl", *but) if goal.bounds_of(metric)]
    return "within the bounds" + (f" (but {' and '.join(left_out)})" if left_out else "")


def _plain(found: Found) -> dict[str, Any]:
    def plain(candidate: Candidate | None) -> dict[str, Any] | None:
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
        "best": plain(found.best),
        "runner_up": plain(found.runner_up),
        "unsplit": plain(found.unsplit),
        "split": plain(found.split),
        "nearest": plain(found.nearest),
        "sensitivity": {name: plain(candidate) for name, candidate in found.sensitivity.items()},
        "tried": [plain(candidate) for candidate in found.tried],
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
