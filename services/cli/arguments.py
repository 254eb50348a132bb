"""The parser every command uses.

Owns: how wrong usage is reported: as a ConfigError, so that it becomes one line like any other error.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from services.core.errors import ConfigError


class Parser(argparse.ArgumentParser):
    """argparse, without abbreviations and without printing the usage before each error."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def add_target(parser: argparse.ArgumentParser) -> None:
    """`--target HOST:PORT`, and how long to wait for it."""
    parser.add_argument("--target", required=True, metavar="HOST:PORT", help="the router's address")
    add_timeout(parser)


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
    """A positive number of seconds; for argparse's `type`."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value


def token_ids(text: str) -> list[int]:
    """`1,2,3`; for argparse's `type`."""
    return [int(part) for part in text.split(",") if part.strip()]


# argparse names the type in "invalid ... value".
seconds.__name__ = "number of seconds"
token_ids.__name__ = "comma-separated list of token ids"
