"""Runs `baton calibrate`: writes what the workers of a running cluster cost as a profile.

Without `--measure` it is what they have measured of themselves, with it what requests to the idle cluster show.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from baton.v1 import control_pb2, types_pb2
from baton_client import CallFailed
from services.cli.arguments import CONTROL_TIMEOUT_S, Parser, add_control, parsed
from services.cli.client import async_inference, control, explain, tls_of
from services.cli.sim_flags import check_writable, default_profile, tell
from services.core.addresses import is_address
from services.core.config import A_DURATION, duration, option
from services.core.errors import ConfigError, NoWorker
from services.sim.calibration import measured, profile_of, workers_of
from services.sim.profile import WorkerProfile, write_profile

_ASK_AGAIN_S = 0.2


@dataclass(frozen=True)
class CalibrateConfig:
    """Keeps the flags of `baton calibrate`, but for those that say how the router is reached."""

    out: str = option("", "the profile (default: profile.json in BATON_HOME)", metavar="FILE")
    model: str = option("", "which of the models that are served (default: the router's own)", metavar="ID")
    cost_per_hour: float = option(
        1.0,
        "of one worker, in any unit",
        check=lambda v: 0 <= v <= 1e15,
        must="must be at least 0, and finite",
    )
    measure: str = option(
        "",
        "the router's port for clients: send it requests for a minute, beside which nothing may run, and take "
        "what they show; without it, what the workers have measured of themselves",
        check=lambda v: not v or is_address(v),
        must="is not HOST:PORT",
        metavar="HOST:PORT",
    )
    seconds: float = option(
        60.0,
        "with --measure: how long; Ctrl-C ends it sooner, and what was measured is taken",
        check=duration,
        must=A_DURATION,
        metavar="S",
    )


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Writes the profile of a running cluster's workers, for `baton simulate`.")
    add_control(parser, timeout_s=CONTROL_TIMEOUT_S)
    config, arguments = parsed(parser, CalibrateConfig, argv)
    out = Path(config.out or default_profile())
    check_writable(out, "--out")
    with control(arguments.target, arguments.cluster_token_file, tls_of(arguments)) as call:

        def ask() -> list[Any]:
            status = call("GetStatus", control_pb2.GetStatusRequest(), arguments.timeout)
            return workers_of(status, config.model)

        workers = wait_for_both_roles(ask, arguments.timeout) if config.measure else ask()
    profile = profile_of(workers, config.cost_per_hour)
    if config.measure:
        profile = _measured(profile, workers, config, arguments)
    write_profile(out, profile)
    print(
        f"{out}: {profile.ms_per_prefill_token:.3g} ms a prompt token, {profile.ms_per_decode_step:.3g} ms a decode "
        f"step and {profile.ms_per_decode_sequence:.3g} ms for each further sequence, by {len(workers)} workers"
    )
    return 0


def wait_for_both_roles(
    ask: Callable[[], list[Any]],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Any]:
    """Returns the workers that `ask` names once one of them takes prompts and one decodes: a cluster is ready as soon
    as it can serve a request, when others of its workers may not have come yet. Raises NoWorker after `timeout_s`."""
    until_s = clock() + timeout_s
    while True:
        try:
            workers = ask()
            roles = {role for each in workers for role in each.worker.roles}
            if {types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE} <= roles:
                return workers
            raise NoWorker("a worker that takes prompts and one that decodes must be there", retry_after_s=1.0)
        except NoWorker:
            if clock() >= until_s:
                raise
        sleep(_ASK_AGAIN_S)


def _measured(
    known: WorkerProfile, workers: Sequence[Any], config: CalibrateConfig, arguments: argparse.Namespace
) -> WorkerProfile:
    from tqdm import tqdm

    target, within_s = config.measure, config.seconds
    form = "{desc:<44}|{bar}| {n:.0f} of {total:.0f} s"
    try:
        with tqdm(total=within_s, bar_format=form, disable=None) as bar:
            told = ""

            def show(doing: str, elapsed_s: float) -> None:
                nonlocal told
                if bar.disable and doing != told:  # no terminal: a line for each part
                    tell(f"{elapsed_s:.0f} of {within_s:g} s: {doing}")
                told = doing
                bar.set_description_str(doing, refresh=False)
                bar.update(min(elapsed_s, within_s) - bar.n)

            return measured(known, workers, lambda: async_inference(target, arguments), within_s, show)
    except CallFailed as error:
        if error.code is grpc.StatusCode.UNIMPLEMENTED:
            raise ConfigError(f"--measure: {target} is not the router's port for clients (--port)") from error
        raise explain(error, target, has_tls=bool(arguments.tls_ca)) from error
