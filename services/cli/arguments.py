"""Provides the parser that every command uses.

Owns: how wrong usage is reported: as a ConfigError, so that it becomes one line like any other error.
"""

from __future__ import annotations

import argparse
import difflib
import os
import pathlib
import shlex
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn, TypeVar, cast

from services.core import config as configuration
from services.core.config import DAY_S, DEFAULT_CONTROL_PORT, DEFAULT_PORT
from services.core.errors import ConfigError

T = TypeVar("T")

DEFAULT_TARGET = f"127.0.0.1:{DEFAULT_PORT}"
DEFAULT_CONTROL_TARGET = f"127.0.0.1:{DEFAULT_CONTROL_PORT}"
CONTROL_TIMEOUT_S = 60.0
"""For commands that read once what a router knows."""


class Parser(argparse.ArgumentParser):
    """Parses arguments as argparse does, without abbreviations and without printing the usage before each error."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"allow_abbrev": False, **kwargs})

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parses as argparse does. An option that is not there is told before anything else that is wrong, with the
        option of the most similar name: what is missing is often what was misspelt. Raises ConfigError."""
        known = self.option_names()
        for word in args or ():
            name = word.partition("=")[0]
            if word == "--":
                break
            # What has a blank in it is a value, for argparse too.
            if name.startswith("--") and " " not in word and name not in known:
                self.error(f"there is no {name}{near(name, known)}")
        return super().parse_args(args, namespace)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Checks as argparse does, but words a command within the command that is not there as `main` does."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            self.error(not_a_command(value, action.choices))
        super()._check_value(action, value)

    def option_names(self) -> set[str]:
        """Returns the names of the options, also of commands within the command."""
        names = set(self._option_string_actions)
        for action in self._subparsers._group_actions if self._subparsers else ():
            for parser in cast("dict[str, Parser]", action.choices or {}).values():
                names |= parser.option_names()
        return names


def command_line(command: str, target: str, default: str, token_file: str = "") -> str:
    """Returns what a person types on this machine, in any folder, without the flags that it does without."""
    words = ["baton", command]
    if target != default:
        words += ["--target", target]
    if token_file:
        words += ["--cluster-token-file", str(pathlib.Path(token_file).expanduser().absolute())]
    return shlex.join(words)


def near(name: str, names: Iterable[str]) -> str:
    """Returns a question whether the most similar name was meant; empty if none is similar."""
    found = difflib.get_close_matches(name, list(names), 1)
    return f" (did you mean {found[0]}?)" if found else ""


def not_a_command(name: str, names: Iterable[str]) -> str:
    """Returns the words for a command that is not there: with the one that was perhaps meant, and all that are."""
    return f"{name!r} is not a command{near(name, names)}; there are {', '.join(names)}"


def parsed(parser: Parser, config_type: type[T], argv: Sequence[str]) -> tuple[T, argparse.Namespace]:
    """Returns what the flags say of the options of `config_type`, and all that they say. Variables are not read: they
    are those of processes that serve. Raises ConfigError."""
    configuration.add_arguments(parser, config_type, has_variables=False)
    arguments = parser.parse_args(argv)
    return configuration.load(config_type, arguments, {}), arguments


def add_target(parser: argparse.ArgumentParser) -> None:
    """Adds `--target HOST:PORT`, the flags of TLS, and the time to wait for it."""
    add_address(parser, "the router's address")
    add_tls(parser, names_server=True)
    add_plain_token(parser)
    add_timeout(parser)


def add_control(parser: argparse.ArgumentParser, timeout_s: float | None = None) -> None:
    """Adds `--target` of a router's control port, the cluster token's file, the flags of TLS, and the time to wait
    for an answer."""
    add_address(parser, "the router's control port", "BATON_CONTROL_TARGET", DEFAULT_CONTROL_TARGET)
    parser.add_argument(
        "--cluster-token-file",
        default=os.environ.get("BATON_CLUSTER_TOKEN_FILE", ""),
        metavar="FILE",
        help="file with the cluster's token (default: the value of BATON_CLUSTER_TOKEN, else the file cluster-token in "
        "BATON_HOME) [BATON_CLUSTER_TOKEN_FILE]",
    )
    add_tls(parser, names_server=False)
    add_plain_token(parser)
    add_timeout(parser, timeout_s)


def add_address(
    parser: argparse.ArgumentParser, what: str, variable: str = "BATON_TARGET", default: str = DEFAULT_TARGET
) -> None:
    """Adds `--target HOST:PORT` alone. By default it is the router of this machine that `baton up` starts."""
    parser.add_argument(
        "--target",
        default=os.environ.get(variable) or default,
        metavar="HOST:PORT",
        help=f"{what} (default: {default}) [{variable}]",
    )


def add_tls(parser: argparse.ArgumentParser, *, names_server: bool) -> None:
    """Adds the flags of a command that may speak TLS. With `names_server` one is the name that the server is to have: a
    router's control port has its own."""
    helps = {
        "ca": "PEM file with the CAs of the server's certificate, or system for those of this machine: TLS is spoken",
        "cert": "PEM file with a certificate to show, of an operator to a router's control port",
        "key": "PEM file with the private key of --tls-cert",
    }
    if names_server:
        helps["server-name"] = "name that the server's certificate must have (default: the host of --target)"
    for name, text in helps.items():
        variable = f"BATON_TLS_{name.replace('-', '_').upper()}"
        parser.add_argument(
            f"--tls-{name}",
            default=os.environ.get(variable, ""),
            metavar="NAME" if name == "server-name" else "FILE",
            help=f"{text} [{variable}]",
        )


def add_plain_token(parser: argparse.ArgumentParser) -> None:
    """Adds the flag that lets a token or key cross a network in the clear."""
    variable = "BATON_ALLOW_PLAIN_TOKEN"
    parser.add_argument(
        "--allow-plain-token",
        action=argparse.BooleanOptionalAction,
        default=os.environ.get(variable, "").lower() in ("1", "true", "yes", "on"),
        help=f"let the token or key cross networks without TLS; else it is refused beyond loopback [{variable}]",
    )


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
