"""Defines the flags that `baton simulate` and `baton plan` share.

They say what is served, by which workers, how it is placed, and where the figures go.

Owns: what these flags mean, and which of them is named if it is wrong. Never: what is computed (`services/sim`).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from services import sim
from services.cli.worker_packages import demand_plots
from services.core import own_files
from services.core.config import A_LOG_INTERVAL, log_interval, option
from services.core.errors import ConfigError
from services.core.home import baton_home
from services.router.coordinator.config import CoordinatorConfig
from services.router.placement_config import PolicyChoice
from services.router.policy import preset
from services.sim.profile import WorkerProfile, read_profile
from services.sim.trace import MOST_S, TracedRequest, scaled, synthetic_trace
from services.sim.trace_files import read_trace

MOST_REQUESTS = 10_000_000
SHIPPED_PROFILE = Path(sim.__file__).with_name("shipped_profile.json")
"""The default model's profile on a small machine: `baton calibrate --measure` has written it; its name says where."""


def _is_scale(value: float) -> bool:
    return 0 < value <= 1e6


_A_SCALE = "must be above 0, and at most a million"


@dataclass(frozen=True)
class WorkloadConfig:
    """Keeps the flags that say what is served, and by what kind of workers."""

    trace: str = option(
        "",
        "Azure's CSV, or JSON lines (.jsonl): Mooncake's, conversations like ShareGPT's, what --trace-file writes",
        metavar="FILE",
    )
    requests: int = option(
        2000,
        "without a trace: made-up requests",
        check=lambda v: 1 <= v <= MOST_REQUESTS,
        must=f"must be from 1 to {MOST_REQUESTS}",
        metavar="N",
    )
    seed: int = option(0, "of the made-up requests")
    profile: str = option(
        "",
        "what workers cost, as `baton calibrate` writes it, or a table as FILE.csv#MODEL:HARDWARE "
        "(default: profile.json in BATON_HOME, or else one of the default model that Baton comes with)",
        metavar="FILE",
    )
    decode_profile: str = option("", "of decode workers, if it is another", metavar="FILE")
    set: tuple[str, ...] = option((), "changes a figure of the profiles: num_blocks=99", metavar="FIELD=VALUE")
    rate_scale: float = option(1.0, "times the arrivals a second", check=_is_scale, must=_A_SCALE, metavar="X")
    length_scale: float = option(1.0, "times prompt and output lengths", check=_is_scale, must=_A_SCALE, metavar="X")
    seconds: float = option(0.0, "of the trace; 0: all of it", check=log_interval, must=A_LOG_INTERVAL, metavar="S")
    most_tokens: int = option(
        32768,
        "most tokens of a request",
        check=lambda v: 2 <= v <= 100_000_000,
        must="must be from 2 to 100000000",
        metavar="N",
    )

    def read(self) -> list[TracedRequest]:
        """Returns the requests. Raises ConfigError, which names the flag."""
        try:
            whole = read_trace(Path(self.trace)) if self.trace else synthetic_trace(self.requests, self.seed)
        except OSError as error:
            raise ConfigError(f"--trace: {self.trace} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise ConfigError(f"--trace: {error}") from error
        return self.scaled(whole)

    def scaled(self, whole: Sequence[TracedRequest]) -> list[TracedRequest]:
        """Returns the requests as the flags scale them. Raises ConfigError, which names the flag."""
        trace = scaled(
            whole,
            length=self.length_scale,
            rate=self.rate_scale,
            seconds=self.seconds or float("inf"),
            most_tokens=self.most_tokens,
        )
        if trace and trace[-1].at_s > MOST_S:
            raise ConfigError(f"--rate-scale: the last request arrives after {trace[-1].at_s:.3g} s; give a larger one")
        return trace

    def profiles(self, measured: WorkerProfile | None = None) -> tuple[WorkerProfile, WorkerProfile | None]:
        """Returns the profile, and that of decode workers if it is another, as the flags name and change them. If they
        name none, it is `measured`, or else what stands in the default file, or else the one that Baton has. Raises
        ConfigError, which names the flag."""
        if self.profile:
            measured = _read_profile(self.profile, "--profile")
        elif measured is None:
            measured = _default_profile()
        profile = _changed(measured, self.set)
        if not self.decode_profile:
            return profile, None
        return profile, _changed(_read_profile(self.decode_profile, "--decode-profile"), self.set)


def _default_profile() -> WorkerProfile:
    if (own := default_profile()).is_file():
        return _read_profile(str(own), "--profile")
    shipped = read_profile(SHIPPED_PROFILE)
    tell(f"no --profile: workers cost what was measured of {shipped.name}; `baton calibrate` measures yours")
    return shipped


def default_profile() -> Path:
    """Returns the file that `baton calibrate` writes, and that is read where --profile names none."""
    return baton_home() / "profile.json"


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


def router_of(config: PolicyChoice, router: CoordinatorConfig) -> CoordinatorConfig:
    """Returns the router with what the flags say of placement. Raises ConfigError, which names the flag."""
    for policy in config.policy:
        preset(policy, "--policy")  # MODEL=NAME is for routers, which may have several models
    return config.applied_to(router, config.selection().of("").config)


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


def check_outputs(plot: str, json: str) -> None:
    """Raises ConfigError if what --plot or --json names cannot be written, and BatonError if nothing can draw."""
    if plot == "-":
        raise ConfigError("--plot: a picture goes to a file, not to stdout")
    if plot:
        demand_plots("--plot")
        check_writable(Path(plot), "--plot")
    if json not in ("", "-"):
        check_writable(Path(json), "--json")


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
        own_files.write_named(path, content.encode())
    except OSError as error:
        raise ConfigError(f"{flag}: {path} cannot be written: {error.strerror}") from error


def write_json(json: str, plain: str) -> None:
    """Writes JSON to the file that --json names, if it names one."""
    if json not in ("", "-"):
        write_named(Path(json), plain + "\n", "--json")


def tell(line: str) -> None:
    """Shows on stderr what a command is about."""
    print(line, file=sys.stderr, flush=True)
