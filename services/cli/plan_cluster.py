"""Runs `baton plan`: finds the cheapest cluster that would serve a trace within an objective."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from baton.v1 import control_pb2
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control
from services.cli.client import control, tls_of
from services.cli.sim_flags import (
    add_json,
    add_policy,
    add_workload,
    check_outputs,
    default_profile,
    read_profiles,
    read_workload,
    router_of,
    scaled_as_asked,
    tell,
    write_json,
    write_named,
)
from services.core.errors import BatonError, ConfigError
from services.sim.calibration import profile_of, workers_of
from services.sim.cluster import ROUTER
from services.sim.goal import Goal, parse_goal
from services.sim.last_hour import can_be, num_good, workload_of
from services.sim.plan_report import picture, plain, text, within
from services.sim.profile import WorkerProfile
from services.sim.report import as_json
from services.sim.search import search
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
    found = search(trace, profile, of_decode, goal, arguments.max_workers, tell, router)
    data = plain(found) | ({"served": {"good": served[0], "all": served[1]}} if served else {})
    write_json(arguments, as_json(data, indent=1))
    if arguments.json == "-":
        print(as_json(data))
    else:
        if served:
            share = f"{served[0] / served[1]:.1%} {within(goal, 'queue')}"
            print(f"served: {served[1]} requests in the last hour, {share}")
        print(text(found, goal, arguments.max_workers))
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
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:
        asked = control_pb2.ListRecentRequestsRequest(model=arguments.model)
        recent = call("ListRecentRequests", asked, arguments.timeout).requests
        status = call("GetStatus", control_pb2.GetStatusRequest(), arguments.timeout)
    if len(recent) < 2:
        raise ConfigError(
            f"--live: {arguments.target} has had {len(recent)} requests in the last hour, too few to plan for"
        )
    if not can_be(recent):
        raise BatonError(f"{arguments.target}: what it says of its last hour cannot be")
    measured = None
    if not arguments.profile and not default_profile().is_file():
        measured = profile_of(workers_of(status, arguments.model), cost_per_hour=1.0)
    served = num_good(recent, goal.objective), len(recent)
    return scaled_as_asked(workload_of(recent), arguments), read_profiles(arguments, measured), served


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
