"""Runs `baton simulate`: a trace through a cluster in virtual time, with the router's own coordinator and policy."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.arguments import Parser, parsed
from services.cli.sim_flags import (
    MOST_REQUESTS,
    WorkloadConfig,
    add_json,
    check_outputs,
    router_of,
    tell,
    write_json,
    write_named,
)
from services.core.config import flags, option
from services.core.errors import ConfigError
from services.router.placement_config import PlacementConfig
from services.sim.ablations import ablations, table
from services.sim.cluster import Death, Outcome, SimPlan, simulate
from services.sim.report import Objective, as_json, picture, summary, text
from services.sim.scheduler import WorkerRules
from services.sim.trace import TracedRequest, trace_of_tenants


def _workers_option(role: str) -> Any:
    return option(0, f"{role} workers", check=lambda v: 0 <= v <= 1024, must="is not from 0 to 1024", metavar="N")


def _objective_option(default: float, what: str) -> Any:
    return option(
        default,
        f"objective for the {what}, ms",
        check=lambda v: 0 < v < math.inf,
        must="must be above 0, and finite",
        metavar="MS",
    )


@dataclass(frozen=True)
class WhatIfConfig:
    """Keeps the flags that say what happens to single workers, and by which rules all compute."""

    die: tuple[str, ...] = option((), "a worker dies at that second: decode-0@30", metavar="WORKER@S")
    slow: tuple[str, ...] = option((), "its steps take X times as long: decode-0=2", metavar="WORKER=X")
    capacity: tuple[str, ...] = option(
        (),
        "what it declares as its capacity, for --policy weighted: decode-0=2 (default: 1)",
        metavar="WORKER=X",
    )
    prefix_caching: bool = option(True, "workers keep prompts for others that begin alike")
    chunking: bool = option(True, "workers compute a long prompt in several steps")
    static_batching: bool = option(False, "nobody joins or leaves a worker's batch")


@dataclass(frozen=True)
class SimulateConfig(WhatIfConfig, PlacementConfig, WorkloadConfig):
    """Keeps the flags of `baton simulate`."""

    prefill: int = _workers_option("prefill")
    decode: int = _workers_option("decode")
    mixed: int = _workers_option("mixed")
    cold_start_s: float = option(
        10.0,
        "until a worker that died is back; inf: never",
        check=lambda v: v >= 0,
        must="must be at least 0",
        metavar="S",
    )
    tenant: tuple[str, ...] = option(
        (),
        "made-up requests of several tenants, each RATE a second, for --requests seconds: shop=1, batch=10",
        metavar="NAME=RATE",
    )
    tenant_weight: tuple[str, ...] = option(
        (),
        "the share of a tenant (of --tenant, or a caller in the trace) beside others' (default: 1)",
        metavar="NAME=W",
    )
    ablations: bool = option(
        False,
        "compare with clusters that lack one thing each: continuous batching, prefix caches, chunks, splitting; "
        "on as many mixed workers as workers are asked for",
    )
    plot: str = option("", "draw the times of requests there, as SVG", metavar="FILE")
    slo_ttft_ms: float = _objective_option(2000.0, "time to the first token")
    slo_tpot_ms: float = _objective_option(100.0, "mean time of a token after the first")


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Answers how fast a cluster would serve a trace, in virtual time.")
    add_json(parser)
    config, arguments = parsed(parser, SimulateConfig, argv)
    check_outputs(config.plot, arguments.json)
    rates, weights = _tenants(config)
    plan = dataclasses.replace(_plan(config), weights=weights)
    trace = config.scaled(trace_of_tenants(rates, config.requests, config.seed)) if rates else config.read()
    objective = Objective(config.slo_ttft_ms / 1e3, config.slo_tpot_ms / 1e3)
    if config.ablations:
        return _ablations(config, arguments.json, plan, trace, objective)
    outcome = _simulated(plan, trace)
    figures = summary(plan, outcome, objective)
    print(as_json(figures) if arguments.json == "-" else text(figures))
    if config.plot and all(served.total_s is None for served in outcome.requests):
        tell("--plot: no request was served, so there is nothing to draw")
    elif config.plot:
        write_named(Path(config.plot), picture(outcome), "--plot")
    write_json(arguments.json, as_json(figures, indent=1))
    return 0


def _simulated(plan: SimPlan, trace: Sequence[TracedRequest]) -> Outcome:
    """Simulates, and shows on a terminal how far it is."""
    from tqdm import tqdm

    with tqdm(total=len(trace), unit=" requests", disable=None) as bar:
        return simulate(plan, trace, lambda done: bar.update(done - bar.n))


def _ablations(
    config: SimulateConfig, json: str, plan: SimPlan, trace: Sequence[TracedRequest], objective: Objective
) -> int:
    refused = [*flags(config, WhatIfConfig, {}), *flags(config, PlacementConfig, {})]
    refused += [flag for flag, value in (("--decode-profile", config.decode_profile), ("--plot", config.plot)) if value]
    if refused:
        raise ConfigError(f"{refused[0].partition('=')[0]}: --ablations has clusters of its own, without it")
    count = len(plan.worker_ids)
    if count < 2:
        raise ConfigError("--ablations: one worker cannot be split; ask for two or more")
    shown = tell if sys.stderr.isatty() else lambda line: None
    found = ablations(trace, plan.profile, count, objective, shown)
    plain = as_json([{**dataclasses.asdict(each), "gain": each.gain} for each in found], indent=1)
    print(plain if json == "-" else table(found))
    write_json(json, plain)
    return 0


def _plan(config: SimulateConfig) -> SimPlan:
    counts = config.prefill, config.decode, config.mixed
    prefill, decode, mixed = counts if any(counts) else (1, 1, 0)
    if not (decode or mixed):
        raise ConfigError("--decode: somebody must decode; give --decode or --mixed")
    profile, of_decode = config.profiles()
    plan = SimPlan(prefill, decode, mixed, profile=profile, decode_profile=of_decode)
    return dataclasses.replace(
        plan,
        deaths=tuple(Death(*_of_worker("--die", text, "@", plan)) for text in config.die),
        cold_start_s=config.cold_start_s,
        slowness=tuple(_of_worker("--slow", text, "=", plan) for text in config.slow),
        capacities=tuple(_of_worker("--capacity", text, "=", plan) for text in config.capacity),
        rules=WorkerRules(config.prefix_caching, config.chunking, config.static_batching),
        router=router_of(config, plan.router),
    )


def _tenants(config: SimulateConfig) -> tuple[dict[str, float], dict[str, float]]:
    """Returns the tenants' rates and weights. Raises ConfigError, which names the flag."""
    rates = dict(_of_tenant("--tenant", text) for text in config.tenant)
    weights = dict(_of_tenant("--tenant-weight", text) for text in config.tenant_weight)
    if rates and config.trace:
        raise ConfigError("--tenant: a trace says itself who its callers are")
    if config.requests * sum(rates.values()) > MOST_REQUESTS:
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
