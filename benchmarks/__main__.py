"""Runs benchmarks: `python -m benchmarks [--only engine,split,…] [--repeats N] [--json FILE]` prints a table, and
writes a result file.

router      what placing requests costs the router's event loop; thousands of streams on each front; two routers of one
engine      one stream, a long prompt, a batch; step time over batch and context
transfer    KV blocks from process to process by every transport, against a copy in memory, a bare socket, bare gRPC and
            bare NIXL
beside      decode steps beside handoffs by every transport, and beside the same bytes moved bare
split       prefill and decode apart against together, at equal cores: prompts beside streams, and a replayed trace
serve       streams over gRPC and HTTP against the engine alone, on one core
end_to_end  a cluster's start, handoffs of long prompts, memory
overload    goodput at one, two and three times a cluster's capacity
tracing     the cost of spans
sim         the simulator against real processes; not part of a run without --only
console     what it costs the router that five look at the console; not part of a run without --only
lent        a system prompt that workers share, computed once or by each, and from how long on that pays; not part of a
            run without --only
parking     prompts beside a full decode worker, with and without a store; not part of a run without --only
constraints what constrained sequences cost a step; not part of a run without --only
hostile     streams beside constraints that are made to take all time; not part of a run without --only
plan        a plan against the cluster it names; not part of a run without --only
tiers       conversations that left the pool, with each tier below it; not part of a run without --only
fair_shares a tenant's first tokens beside another's flood; not part of a run without --only
wrong_keys  what calls without a valid key cost the router, and those who have one; not part of a run without --only
slow_link   handoffs over a link as slow as the prompt, and the second token on one host; not part of a run without
            --only
dtype       what --dtype auto is a rule for, on lesser CPUs too; not part of a run without --only

Beside other engines: `python -m benchmarks.peers`. Pictures of results: `python -m benchmarks.plots`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import signal
import sys
from pathlib import Path

from benchmarks import interference, planned, replay, router, serve
from benchmarks.lent import LentSettings
from benchmarks.precision import Precision
from benchmarks.result import Result
from benchmarks.router_streams import measure as router_streams
from benchmarks.router_streams import watched
from benchmarks.settings import add_flags, read
from benchmarks.tiers import TierSettings
from benchmarks.tiers import measure as tiers
from benchmarks.works import WorkSettings
from benchmarks.wrong_keys import WrongKeySettings
from benchmarks.wrong_keys import measure as wrong_keys
from services.cli.model_names import resolve_model
from services.core.process_config import DEFAULT_MODEL

BY_DEFAULT = ("router", "engine", "transfer", "beside", "split", "serve", "end_to_end", "overload", "tracing")
NAMES = (
    *BY_DEFAULT,
    "dtype",
    "sim",
    "plan",
    "console",
    "constraints",
    "hostile",
    "lent",
    "parking",
    "tiers",
    "wrong_keys",
    "fair_shares",
    "slow_link",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(BY_DEFAULT), help=f"some of {', '.join(NAMES)}, with commas")
    parser.add_argument("--model", default="", help="by default the one that Baton serves by default")
    parser.add_argument("--repeats", type=int, default=3, help="rounds (default: 3)")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the engine alone")
    parser.add_argument("--prompt-tokens", type=int, default=1783, help="of the prompt that dtype times")
    parser.add_argument("--json", type=Path, default=Path("out/bench.json"), help="the result file")
    _add_settings(parser)
    arguments = parser.parse_args()
    chosen = arguments.only.split(",")
    if unknown := set(chosen) - set(NAMES):
        parser.error(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(NAMES)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters and engines end with this process
    result = Result({name: value for name, value in vars(arguments).items() if name != "json"})
    name = arguments.model or DEFAULT_MODEL
    # Before anything is measured: it may have to be fetched.
    path = str(resolve_model(name).path) if {"router", "console", "wrong_keys"} & set(chosen) else ""
    if "console" in chosen:
        result.add(watched.measure(name, path, arguments.repeats, read(watched.WatchSettings, arguments)))
        chosen.remove("console")
    if "wrong_keys" in chosen:
        result.add(wrong_keys(name, path, arguments.repeats, read(WrongKeySettings, arguments)))
        chosen.remove("wrong_keys")
    if "router" in chosen:
        result.add(router.measure(arguments.repeats))
        result.add(
            router_streams.measure(name, path, arguments.repeats, read(router_streams.StreamSettings, arguments))
        )
        chosen.remove("router")
    if chosen:
        _with_model(chosen, arguments, result)
    result.write(arguments.json)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    add_flags(parser, "the model's precision", Precision)
    add_flags(parser, "engine", WorkSettings)
    add_flags(parser, "split: prompts beside streams", interference.InterferenceSettings)
    add_flags(parser, "split: a replayed trace", replay.ReplaySettings)
    add_flags(parser, "serve", serve.ServeSettings)
    add_flags(parser, "router", router_streams.StreamSettings)
    add_flags(parser, "console", watched.WatchSettings)
    add_flags(parser, "wrong_keys", WrongKeySettings)
    add_flags(parser, "lent", LentSettings)
    add_flags(parser, "tiers", TierSettings)
    add_flags(parser, "plan", planned.PlannedSettings)


def _with_model(chosen: list[str], arguments: argparse.Namespace, result: Result) -> None:
    """Runs the benchmarks that need a model, and torch, which takes long to load."""
    from benchmarks import (
        constraints,
        dtype,
        end_to_end,
        engine,
        fair_shares,
        hostile,
        lent,
        overload,
        parking,
        simulated,
        slow_link,
        split,
        tracing,
        transfer,
        transfer_beside,
    )

    name, repeats = arguments.model or DEFAULT_MODEL, arguments.repeats
    model = resolve_model(name).path
    precision = read(Precision, arguments).chosen_for(model)
    result.settings |= {"precision": dataclasses.asdict(precision)}
    print(f"{name} in {precision}", flush=True)
    if "transfer" in chosen:
        result.add(transfer.measure(repeats))
    if "beside" in chosen:
        result.add(transfer_beside.measure(model, precision, arguments.threads, repeats))
    if "engine" in chosen:
        result.add(engine.measure(model, precision, arguments.threads, repeats, read(WorkSettings, arguments)))
    if "split" in chosen:
        beside, trace = read(interference.InterferenceSettings, arguments), read(replay.ReplaySettings, arguments)
        result.add(split.measure(name, precision, repeats, beside, trace))
    if "serve" in chosen:
        result.add(serve.measure(name, str(model), precision, repeats, read(serve.ServeSettings, arguments)))
    if "end_to_end" in chosen:
        result.add(end_to_end.measure(name, precision, repeats))
    if "overload" in chosen:
        result.add(overload.measure(name, precision, repeats))
    if "tracing" in chosen:
        result.add(tracing.measure(name, precision, repeats))
    if "sim" in chosen:
        result.add(simulated.measure(name, precision, repeats, read(replay.ReplaySettings, arguments)))
    if "tiers" in chosen:
        result.add(tiers(name, precision, repeats, read(TierSettings, arguments)))
    if "plan" in chosen:
        settings = read(planned.PlannedSettings, arguments)
        result.add(planned.measure(name, precision, repeats, read(replay.ReplaySettings, arguments), settings))
    if "constraints" in chosen:
        result.add(constraints.measure(model, precision, arguments.threads, repeats))
    if "hostile" in chosen:
        result.add(hostile.measure(name, precision, repeats))
    if "lent" in chosen:
        result.add(lent.measure(name, precision, repeats, read(LentSettings, arguments)))
    if "fair_shares" in chosen:
        result.add(fair_shares.measure(name, precision, repeats))
    if "slow_link" in chosen:
        result.add(slow_link.measure(name, precision, repeats))
    if "parking" in chosen:
        result.add(parking.measure(name, precision, repeats))
    if "dtype" in chosen:
        result.add(dtype.measure(model, arguments.prompt_tokens, repeats))


if __name__ == "__main__":
    main()
