"""Runs `baton plan`: finds the cheapest cluster that would serve a trace within an objective."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from baton.v1 import control_pb2
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control, parsed
from services.cli.client import control, tls_of
from services.cli.sim_flags import (
    WorkloadConfig,
    add_json,
    check_outputs,
    default_profile,
    router_of,
    tell,
    write_json,
    write_named,
)
from services.core.config import option
from services.core.errors import ConfigError
from services.router.placement_config import PolicyChoice
from services.sim.calibration import profile_of, workers_of
from services.sim.cluster import ROUTER
from services.sim.goal import Goal, parse_goal
from services.sim.last_hour import num_good, workload_of
from services.sim.plan_report import picture, plain, text, within
from services.sim.profile import WorkerProfile
from services.sim.report import as_json
from services.sim.search import search
from services.sim.trace import TracedRequest


@dataclass(frozen=True)
class PlanConfig(PolicyChoice, WorkloadConfig):
    """Keeps the flags of `baton plan`, but for --slo and those that say how a router is reached."""

    cost: str = option("", "of workers an hour: prefill=2,decode=1", metavar="COSTS")
    max_workers: int = option(
        8,
        "most workers of a cluster",
        check=lambda v: 1 <= v <= 64,
        must="is not from 1 to 64",
        metavar="N",
    )
    live: bool = option(
        False,
        "plan for what the router at --target has served in the last hour; if there is no profile, on workers as they "
        "have measured themselves",
    )
    model: str = option("", "with --live: which of its models (default: the router's own)", metavar="ID")
    plot: str = option("", "draw cost against attainment there, as SVG", metavar="FILE")


def main(argv: Sequence[str], prog: str) -> int:
    """Returns 0 if a cluster meets the objective, and 1 if none does. What it raises ends it with another status."""
    parser = Parser(prog=prog, description="Finds the cheapest cluster that serves a trace within an objective.")
    parser.add_argument(
        "--slo", required=True, metavar="BOUNDS", help="such as ttft_p95=500ms,tpot_p95=50ms (also itl and queue)"
    )
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    add_json(parser)
    config, arguments = parsed(parser, PlanConfig, argv)
    goal, costs, router = parse_goal(arguments.slo), _costs(config.cost), router_of(config, ROUTER)
    check_outputs(config.plot, arguments.json)
    trace, (profile, of_decode), served = _workload(config, arguments, goal)
    of_decode = of_decode or profile
    profile = dataclasses.replace(profile, cost_per_hour=costs.get("prefill", profile.cost_per_hour))
    of_decode = dataclasses.replace(of_decode, cost_per_hour=costs.get("decode", of_decode.cost_per_hour))
    found = search(trace, profile, of_decode, goal, config.max_workers, tell, router)
    data = plain(found) | ({"served": {"good": served[0], "all": served[1]}} if served else {})
    write_json(arguments.json, as_json(data, indent=1))
    if arguments.json == "-":
        print(as_json(data))
    else:
        if served:
            share = f"{served[0] / served[1]:.1%} {within(goal, 'queue')}"
            print(f"served: {served[1]} requests in the last hour, {share}")
        print(text(found, goal, config.max_workers))
    if config.plot and not found.tried:
        tell("--plot: nothing was simulated, so there is nothing to draw")
    elif config.plot:
        write_named(Path(config.plot), picture(found), "--plot")
    return 0 if found.best is not None else 1


def _workload(
    config: PlanConfig, arguments: argparse.Namespace, goal: Goal
) -> tuple[list[TracedRequest], tuple[WorkerProfile, WorkerProfile | None], tuple[int, int] | None]:
    """Returns the requests, the profiles of workers and of decode workers, and, of a running router, how many requests
    it has served within the bounds and how many in all."""
    if not config.live:
        if config.model:
            raise ConfigError("--model: says whose requests --live takes; give --live too")
        return config.read(), config.profiles(), None
    if config.trace:
        raise ConfigError("--live: takes the place of --trace; give one of them")
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:
        asked = control_pb2.ListRecentRequestsRequest(model=config.model)
        recent = call("ListRecentRequests", asked, arguments.timeout).requests
        status = call("GetStatus", control_pb2.GetStatusRequest(), arguments.timeout)
    if len(recent) < 2:
        raise ConfigError(
            f"--live: {arguments.target} has had {len(recent)} requests in the last hour, too few to plan for"
        )
    measured = None
    if not config.profile and not default_profile().is_file():
        measured = profile_of(workers_of(status, config.model), cost_per_hour=1.0)
    served = num_good(recent, goal.objective), len(recent)
    return config.scaled(workload_of(recent)), config.profiles(measured), served


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
