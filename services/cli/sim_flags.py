"""Defines the flags that `baton simulate` and `baton plan` share.

They say what is served, by which workers, how it is placed, and where the figures go.

Owns: what these flags mean, and which of them is named if it is wrong. Never: what is computed (`services/sim`).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from services.core.config import A_DURATION, duration
from services.core.errors import ConfigError
from services.core.home import baton_home
from services.router.coordinator.config import CoordinatorConfig
from services.router.policy import DEFAULT_SPLIT, PRESETS, Split, preset
from services.router.policy.presets import DEFAULT
from services.router.policy_file import read_selection
from services.sim.profile import WorkerProfile, read_profile
from services.sim.trace import MOST_S, TracedRequest, scaled, synthetic_trace
from services.sim.trace_files import read_trace

MOST_REQUESTS = 10_000_000


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say what is served, and by what kind of workers."""
    parser.add_argument(
        "--trace",
        default="",
        metavar="FILE",
        help="Azure's CSV, or JSON lines (.jsonl): Mooncake's, conversations like ShareGPT's, what --trace-file writes",
    )
    parser.add_argument(
        "--requests", type=int, default=2000, metavar="N", help="without a trace: made-up requests (default: 2000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the made-up requests (default: 0)")
    parser.add_argument(
        "--profile",
        default="",
        metavar="FILE",
        help="what workers cost, as `baton calibrate` writes it, or a table as FILE.csv#MODEL:HARDWARE "
        "(default: profile.json in BATON_HOME)",
    )
    parser.add_argument("--decode-profile", default="", metavar="FILE", help="of decode workers, if it is another")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="changes a figure of the profiles: num_blocks=99",
    )
    parser.add_argument("--rate-scale", type=float, default=1.0, metavar="X", help="times the arrivals a second")
    parser.add_argument("--length-scale", type=float, default=1.0, metavar="X", help="times prompt and output lengths")
    parser.add_argument("--seconds", type=float, default=0.0, metavar="S", help="of the trace (default: all of it)")
    parser.add_argument("--most-tokens", type=int, default=32768, metavar="N", help="most tokens of a request")


def read_workload(arguments: argparse.Namespace) -> list[TracedRequest]:
    """Returns the requests that the flags of `add_workload` name. Raises ConfigError, which names the flag."""
    if not 1 <= arguments.requests <= MOST_REQUESTS:
        raise ConfigError(f"--requests: must be from 1 to {MOST_REQUESTS}")
    try:
        whole = (
            read_trace(Path(arguments.trace))
            if arguments.trace
            else synthetic_trace(arguments.requests, arguments.seed)
        )
    except OSError as error:
        raise ConfigError(f"--trace: {arguments.trace} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"--trace: {error}") from error
    return scaled_as_asked(whole, arguments)


def scaled_as_asked(whole: Sequence[TracedRequest], arguments: argparse.Namespace) -> list[TracedRequest]:
    """Returns the requests scaled by the flags of `add_workload`. Raises ConfigError, which names the flag."""
    for flag in ("rate_scale", "length_scale"):
        if not 0 < getattr(arguments, flag) <= 1e6:
            raise ConfigError(f"--{flag.replace('_', '-')}: must be above 0, and at most a million")
    if arguments.seconds and not duration(arguments.seconds):
        raise ConfigError(f"--seconds: {arguments.seconds:g} {A_DURATION}")
    if not 2 <= arguments.most_tokens <= 100_000_000:
        raise ConfigError("--most-tokens: must be from 2 to 100000000")
    trace = scaled(
        whole,
        length=arguments.length_scale,
        rate=arguments.rate_scale,
        seconds=arguments.seconds or float("inf"),
        most_tokens=arguments.most_tokens,
    )
    if trace and trace[-1].at_s > MOST_S:
        raise ConfigError(f"--rate-scale: the last request arrives after {trace[-1].at_s:.3g} s; give a larger one")
    return trace


def default_profile() -> Path:
    """Returns the file that `baton calibrate` writes, and that is read where --profile names none."""
    return baton_home() / "profile.json"


def read_profiles(
    arguments: argparse.Namespace, measured: WorkerProfile | None = None
) -> tuple[WorkerProfile, WorkerProfile | None]:
    """Returns the profile, and that of decode workers if it is another, as the flags of `add_workload` name and change
    them. If they name none, it is `measured`, or else what stands in the default file. Raises ConfigError, which names
    the flag."""
    if measured is None or arguments.profile:
        measured = _read_profile(arguments.profile or str(default_profile()), "--profile")
    profile = _changed(measured, arguments.set)
    if not arguments.decode_profile:
        return profile, None
    return profile, _changed(_read_profile(arguments.decode_profile, "--decode-profile"), arguments.set)


def _changed(profile: WorkerProfile, settings: Sequence[str]) -> WorkerProfile:
    try:
        return profile.changed(settings)
    except ConfigError as error:
        raise ConfigError(f"--set: {error}") from error


def _read_profile(named: str, flag: str) -> WorkerProfile:
    """Returns the profile that FILE or FILE.csv#MODEL:HARDWARE names."""
    path, _, name = named.partition("#")
    if not Path(path).is_file():
        raise ConfigError(f"{flag}: no file {path}; `baton calibrate` writes one from a running cluster")
    try:
        return read_profile(Path(path), name)
    except ConfigError as error:
        raise ConfigError(f"{flag}: {error}") from error


def add_policy(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how the router places requests."""
    parser.add_argument(
        "--policy", default="", metavar="NAME", help=f"one of {', '.join(PRESETS)} (default: {DEFAULT})"
    )
    parser.add_argument(
        "--policy-file",
        default="",
        metavar="FILE",
        help="what it says of all models, as the router reads it; --policy comes before it",
    )
    parser.add_argument(
        "--policy-weight",
        action="append",
        default=[],
        metavar="PHASE.TERM=W",
        help="changes or adds a term of the policy: prefill.prefix_cached=4, decode.near=0",
    )
    parser.add_argument(
        "--split",
        default=DEFAULT_SPLIT.value,
        choices=[split.value for split in Split],
        help="which prompts run apart from their decodes; auto: where it pays (default: %(default)s)",
    )


def router_of(arguments: argparse.Namespace, router: CoordinatorConfig) -> CoordinatorConfig:
    """Returns the router with what the flags of `add_policy` say. Raises ConfigError, which names the flag."""
    if arguments.policy:
        preset(arguments.policy, "--policy")  # MODEL=NAME is for routers, which may have several models
    by_flag = [arguments.policy] if arguments.policy else []
    chosen = read_selection(by_flag, arguments.policy_weight, arguments.policy_file).of("")
    return dataclasses.replace(router, policy=chosen.config, split=Split(arguments.split))


def add_json(parser: argparse.ArgumentParser) -> None:
    """Adds --json, which prints or writes what was found."""
    parser.add_argument(
        "--json",
        nargs="?",
        const="-",
        default="",
        metavar="FILE",
        help="write the figures there as JSON; without FILE (or for -) print them so instead of as text",
    )


def check_outputs(arguments: argparse.Namespace) -> None:
    """Raises ConfigError if what --plot or --json names cannot be written."""
    if arguments.plot == "-":
        raise ConfigError("--plot: a picture goes to a file, not to stdout")
    if arguments.plot:
        check_writable(Path(arguments.plot), "--plot")
    if arguments.json not in ("", "-"):
        check_writable(Path(arguments.json), "--json")


def check_writable(path: Path, flag: str) -> None:
    """Makes the folder of a file that is to be written after minutes of work. Raises ConfigError, which names the flag,
    if the file cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be written: {error.strerror}") from error
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{flag}: {path} cannot be written: it is a folder, or is not yours to write")


def write_named(path: Path, content: str, flag: str) -> None:
    """Writes a file that a flag names. Raises ConfigError, which names the flag."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be written: {error.strerror}") from error


def write_json(arguments: argparse.Namespace, plain: str) -> None:
    """Writes JSON to the file that --json names, if it names one."""
    if arguments.json not in ("", "-"):
        write_named(Path(arguments.json), plain + "\n", "--json")


def tell(line: str) -> None:
    """Shows on stderr what a command is about."""
    print(line, file=sys.stderr, flush=True)
