"""Runs `baton simulate`: a trace through a cluster in virtual time, with the router's own coordinator and policy."""

from __future__ import annotations

import argparse
import dataclasses
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.cli.arguments import Parser
from services.cli.sim_flags import (
    MOST_REQUESTS,
    add_json,
    add_policy,
    add_workload,
    check_outputs,
    read_profiles,
    read_workload,
    router_of,
    scaled_as_asked,
    tell,
    write_json,
    write_named,
)
from services.core.errors import ConfigError
from services.router.policy import DEFAULT_SPLIT
from services.router.policy.long_prompts import ISOLATIONS, LongPromptConfig
from services.router.policy.outliers import OutlierConfig, is_slow_factor
from services.sim.ablations import ablations, table
from services.sim.cluster import Death, SimPlan, simulate
from services.sim.report import Objective, as_json, picture, summary, text
from services.sim.scheduler import WorkerRules
from services.sim.trace import TracedRequest, trace_of_tenants

_MOST_WORKERS = 1024
_BAR = 30
_NOT_ABLATED = (
    "die",
    "slow",
    "capacity",
    "policy",
    "policy_file",
    "policy_weight",
    "decode_profile",
    "plot",
    "no_prefix_caching",
    "no_chunking",
    "static_batching",
)


def main(argv: Sequence[str], prog: str) -> int:
    arguments = _parser(prog).parse_args(argv)
    for flag in ("slo_ttft_ms", "slo_tpot_ms"):
        if not 0 < getattr(arguments, flag) < float("inf"):
            raise ConfigError(f"--{flag.replace('_', '-')}: {getattr(arguments, flag):g} must be above 0")
    check_outputs(arguments)
    rates, weights = _tenants(arguments)
    plan = dataclasses.replace(_plan(arguments), weights=weights)
    if rates:
        trace = scaled_as_asked(trace_of_tenants(rates, arguments.requests, arguments.seed), arguments)
    else:
        trace = read_workload(arguments)
    objective = Objective(arguments.slo_ttft_ms / 1e3, arguments.slo_tpot_ms / 1e3)
    if arguments.ablations:
        return _ablations(arguments, plan, trace, objective)
    outcome = simulate(plan, trace, _progress(len(trace)))
    figures = summary(plan, outcome, objective)
    print(as_json(figures) if arguments.json == "-" else text(figures))
    if arguments.plot and all(served.total_s is None for served in outcome.requests):
        print("--plot: no request was served, so there is nothing to draw", file=sys.stderr)
    elif arguments.plot:
        write_named(Path(arguments.plot), picture(outcome), "--plot")
    write_json(arguments, as_json(figures, indent=1))
    return 0


def _parser(prog: str) -> Parser:
    parser = Parser(prog=prog, description="Answers how fast a cluster would serve a trace, in virtual time.")
    add_workload(parser)
    for role in ("prefill", "decode", "mixed"):
        parser.add_argument(f"--{role}", type=int, default=0, metavar="N", help=f"{role} workers")
    parser.add_argument(
        "--die", action="append", default=[], metavar="WORKER@S", help="a worker dies at that second: decode-0@30"
    )
    parser.add_argument(
        "--cold-start-s",
        type=float,
        default=10.0,
        metavar="S",
        help="until it is back (default: %(default)g; inf: never)",
    )
    parser.add_argument(
        "--slow", action="append", default=[], metavar="WORKER=X", help="its steps take X times as long: decode-0=2"
    )
    parser.add_argument(
        "--slow-factor",
        type=float,
        default=OutlierConfig.slow_factor,
        metavar="X",
        help="eject workers that take X times their peers' median, as the router does (default: %(default)g; 0: never)",
    )
    parser.add_argument(
        "--isolate-long-prompts",
        choices=ISOLATIONS,
        default=LongPromptConfig.isolation,
        help="keep long prompts off some prefill workers, as the router does (default: %(default)s)",
    )
    parser.add_argument(
        "--tenant",
        action="append",
        default=[],
        metavar="NAME=RATE",
        help="made-up requests of several tenants, each RATE a second, for --requests seconds: shop=1, batch=10",
    )
    parser.add_argument(
        "--tenant-weight",
        action="append",
        default=[],
        metavar="NAME=W",
        help="the share of a tenant (of --tenant, or a caller in the trace) beside others' (default: 1)",
    )
    parser.add_argument("--no-prefix-caching", action="store_true", help="workers keep no part of a prompt")
    parser.add_argument("--no-chunking", action="store_true", help="workers compute each prompt in one step")
    parser.add_argument("--static-batching", action="store_true", help="nobody joins or leaves a worker's batch")
    parser.add_argument(
        "--capacity",
        action="append",
        default=[],
        metavar="WORKER=X",
        help="what it declares as its capacity, for --policy weighted: decode-0=2 (default: 1)",
    )
    add_policy(parser)
    parser.add_argument(
        "--ablations",
        action="store_true",
        help="compare with clusters that lack one thing each: continuous batching, prefix caches, chunks, splitting; "
        "on as many mixed workers as workers are asked for",
    )
    parser.add_argument("--plot", default="", metavar="FILE", help="draw the times of requests there, as SVG")
    parser.add_argument("--slo-ttft-ms", type=float, default=2000.0, metavar="MS", help="(default: %(default)g)")
    parser.add_argument("--slo-tpot-ms", type=float, default=100.0, metavar="MS", help="(default: %(default)g)")
    add_json(parser)
    return parser


def _ablations(
    arguments: argparse.Namespace, plan: SimPlan, trace: Sequence[TracedRequest], objective: Objective
) -> int:
    for flag in _NOT_ABLATED:
        if getattr(arguments, flag):
            raise ConfigError(f"--{flag.replace('_', '-')}: --ablations has clusters of its own, without it")
    if (
        arguments.slow_factor != OutlierConfig.slow_factor
        or arguments.isolate_long_prompts != LongPromptConfig.isolation
    ):
        raise ConfigError("--slow-factor, --isolate-long-prompts: --ablations has clusters of its own, without them")
    if arguments.split != DEFAULT_SPLIT.value:
        raise ConfigError("--split: --ablations has clusters of its own, which split all prompts or none")
    count = len(plan.worker_ids)
    if count < 2:
        raise ConfigError("--ablations: one worker cannot be split; ask for two or more")
    shown = tell if sys.stderr.isatty() else lambda line: None
    found = ablations(trace, plan.profile, count, objective, shown)
    plain = as_json([{**dataclasses.asdict(each), "gain": each.gain} for each in found], indent=1)
    print(plain if arguments.json == "-" else table(found))
    write_json(arguments, plain)
    return 0


def _plan(arguments: argparse.Namespace) -> SimPlan:
    counts = [arguments.prefill, arguments.decode, arguments.mixed]
    if not any(counts):
        counts = [1, 1, 0]
    for role, count in zip(("prefill", "decode", "mixed"), counts, strict=True):
        if not 0 <= count <= _MOST_WORKERS:
            raise ConfigError(f"--{role}: {count} is not from 0 to {_MOST_WORKERS}")
    prefill, decode, mixed = counts
    if not (decode or mixed):
        raise ConfigError("--decode: somebody must decode; give --decode or --mixed")
    profile, of_decode = read_profiles(arguments)
    plan = SimPlan(prefill, decode, mixed, profile=profile, decode_profile=of_decode)
    if not is_slow_factor(arguments.slow_factor):
        raise ConfigError(f"--slow-factor: {arguments.slow_factor:g} must be 0, or above 1 and at most 1000")
    if not arguments.cold_start_s >= 0:
        raise ConfigError(f"--cold-start-s: {arguments.cold_start_s:g} must be at least 0")
    deaths = [Death(*_of_worker("--die", text, "@", plan)) for text in arguments.die]
    slowness = [_of_worker("--slow", text, "=", plan) for text in arguments.slow]
    capacities = [_of_worker("--capacity", text, "=", plan) for text in arguments.capacity]
    return dataclasses.replace(
        plan,
        deaths=tuple(deaths),
        cold_start_s=arguments.cold_start_s,
        slowness=tuple(slowness),
        capacities=tuple(capacities),
        rules=WorkerRules(
            prefix_caching=not arguments.no_prefix_caching,
            chunked=not arguments.no_chunking,
            static=arguments.static_batching,
        ),
        router=dataclasses.replace(
            router_of(arguments, plan.router),
            outliers=OutlierConfig(slow_factor=arguments.slow_factor),
            long_prompts=LongPromptConfig(isolation=arguments.isolate_long_prompts),
        ),
    )


def _tenants(arguments: argparse.Namespace) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the tenants' rates and weights. Raises ConfigError, which names the flag."""
    rates = dict(_of_tenant("--tenant", text) for text in arguments.tenant)
    weights = dict(_of_tenant("--tenant-weight", text) for text in arguments.tenant_weight)
    if rates and arguments.trace:
        raise ConfigError("--tenant: a trace says itself who its callers are")
    if arguments.requests * sum(rates.values()) > MOST_REQUESTS or not 1 <= arguments.requests <= MOST_REQUESTS:
        raise ConfigError(f"--requests: must be from 1 to {MOST_REQUESTS}, of all tenants together")
    return rates, weights


def _of_tenant(flag: str, text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not name or not 1e-3 <= value <= 1e6:
        raise ConfigError(f"{flag}: {text!r} is not like shop=2; the number is from 0.001 to a million")
    return name, value


def _of_worker(flag: str, text: str, between: str, plan: SimPlan) -> tuple[str, float]:
    """Returns the worker and the number of WORKER@S or WORKER=X. Raises ConfigError."""
    worker_id, _, number = text.partition(between)
    if worker_id not in plan.worker_ids:
        raise ConfigError(f"{flag}: {text!r} names no worker; there are {', '.join(plan.worker_ids[:32])}")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e9:
        raise ConfigError(f"{flag}: {text!r} is not like {worker_id}{between}2")
    return worker_id, value


def _progress(total: int) -> Callable[[int], None]:
    """Returns what shows a bar on a terminal."""
    if not sys.stderr.isatty():
        return lambda done: None
    began_s = time.monotonic()

    def show(done: int) -> None:
        if done % max(1, total // 100) and done != total:
            return
        elapsed_s = time.monotonic() - began_s
        left_s = elapsed_s / done * (total - done)
        bar = ("#" * (_BAR * done // total)).ljust(_BAR, ".")
        end = "\n" if done == total else ""
        line = f"\r[{bar}] {done} of {total} requests, {elapsed_s:.0f} s, {left_s:.0f} s left "
        print(line, end=end, file=sys.stderr, flush=True)

    return show
