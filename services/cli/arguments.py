"""Provides the parser that every command uses.

Owns: how wrong usage is reported: as a ConfigError, so that it becomes one line like any other error.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

from services.core.config import DAY_S, DEFAULT_CONTROL_PORT
from services.core.errors import ConfigError

CONTROL_TIMEOUT_S = 60.0
"""For commands that read once what a router knows."""


class Parser(argparse.ArgumentParser):
    """Parses arguments as argparse does, without abbreviations and without printing the usage before each error."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds `--target HOST:PORT`, and the time to wait for it."""
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="the router's address")
    add_timeout(parser)


def add_control(parser: argparse.ArgumentParser, timeout_s: float | None = None) -> None:
    """Adds `--target` of a router's control port, the cluster token's file, and the time to wait for an answer."""
    parser.add_argument(
        "--target",
        default=f"127.0.0.1:{DEFAULT_CONTROL_PORT}",
        metavar="HOST:PORT",
        help="the router's control port (default: %(default)s)",
    )
    parser.add_argument(
        "--cluster-token-file",
        default=os.environ.get("BATON_CLUSTER_TOKEN_FILE", ""),
        metavar="FILE",
        help="file with the cluster's token (default: the value of BATON_CLUSTER_TOKEN, else the file cluster-token in "
        "BATON_HOME) [BATON_CLUSTER_TOKEN_FILE]",
    )
    add_timeout(parser, timeout_s)


def add_timeout(parser: argparse.ArgumentParser, default_s: float | None = None) -> None:
    suffix = "no limit" if default_s is None else f"{default_s:g}"
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=default_s,
        metavar="SECONDS",
        help=f"give up after this long (default: {suffix})",
    )


def seconds(text: str) -> float:
    """Parses a positive number of seconds, at most a day; for argparse's `type`."""
    value = float(text)
    if not 0 < value <= DAY_S:
        raise ValueError(text)
    return value


def token_ids(text: str) -> list[int]:
    """Parses `1,2,3`; for argparse's `type`."""
    return [int(part) for part in text.split(",") if part.strip()]


# argparse shows the type's name in "invalid ... value".
seconds.__name__ = "number of seconds"
token_ids.__name__ = "comma-separated list of token ids"
