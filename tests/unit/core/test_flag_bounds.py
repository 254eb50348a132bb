"""Tests every number that a flag or a `BATON_*` variable may hold: what is none, or out of all proportion, is refused
by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import typing
from collections.abc import Iterator

import pytest

from services.cli.arguments import Parser
from services.cli.up import UpConfig
from services.core import config as configuration
from services.core.errors import ConfigError
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig

NO_NUMBERS = ["nan", "NaN", "inf", "-inf", "Infinity", "1e300", "9.3e15", "9" * 400, "-1000000000", "", "1 s", "0x10"]
"""For every kind of number. 1e300 and 9.3e15 are finite: milliseconds of the latter no longer fit 64 bits."""
TOO_SHORT = ["0.0000001", "5e-324", "0"]
"""For durations that something waits for; a drain need not be waited for, and no line need be written."""
ALLOWED = {"drain_s": TOO_SHORT, "log_interval_s": ["0"], "http_keepalive_s": ["0"]}


def _numbers() -> Iterator[tuple[type, str]]:
    for config_type in (RouterConfig, WorkerConfig, UpConfig):
        hints = typing.get_type_hints(config_type)
        for field in dataclasses.fields(config_type):
            kinds = typing.get_args(hints[field.name]) or (hints[field.name],)
            if "help" in field.metadata and (int in kinds or float in kinds):
                yield config_type, field.name


NUMBERS = list(_numbers())


def load(config_type: type, argv: list[str], environ: dict[str, str]) -> object:
    parser = Parser()
    configuration.add_arguments(parser, config_type)
    return configuration.load(config_type, parser.parse_args(argv), environ)


@pytest.mark.parametrize(("config_type", "name"), NUMBERS, ids=[f"{kind.__name__}.{name}" for kind, name in NUMBERS])
def test_what_is_no_number_is_refused_by_name(config_type: type, name: str) -> None:
    flag, variable = "--" + name.replace("_", "-"), "BATON_" + name.upper()
    for text in NO_NUMBERS:
        with pytest.raises(ConfigError, match=f"^{flag}: "):
            load(config_type, [f"{flag}={text}"], {})
        with pytest.raises(ConfigError, match=f"^{variable}: "):
            load(config_type, [], {variable: text})


@pytest.mark.parametrize(
    ("config_type", "name"), [each for each in NUMBERS if each[1].endswith("_s")], ids=lambda value: str(value)
)
def test_durations_are_between_a_millisecond_and_a_day(config_type: type, name: str) -> None:
    flag = "--" + name.replace("_", "-")
    for text in ["-0.001", "1e5", *(text for text in TOO_SHORT if text not in ALLOWED.get(name, []))]:
        with pytest.raises(ConfigError, match=f"^{flag}: "):
            load(config_type, [f"{flag}={text}"], {})
    assert getattr(load(config_type, [f"{flag}=86400"], {}), name) == 86400


@pytest.mark.process
@pytest.mark.parametrize(
    "argv",
    [
        ["router", "--silence-s", "nan"],
        ["router", "--drain-s", "1e300"],
        ["decode", "--silence-s", "inf"],
        ["up", "--drain-s", "-1"],
        ["drain", "w", "--target", "127.0.0.1:1", "--deadline", "nan"],
        ["drain", "w", "--target", "127.0.0.1:1", "--deadline", "1e6"],
        ["status", "--target", "127.0.0.1:1", "--timeout", "1e300"],
    ],
    ids=" ".join,
)
def test_the_command_ends_with_usage_and_names_the_flag(argv: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *argv], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2, done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert argv[-2] in done.stderr


@pytest.mark.parametrize("config_type", [UpConfig, RouterConfig, WorkerConfig])
@pytest.mark.parametrize(("value", "is_taken"), [("-2", False), ("-1", True), ("0", True), ("65536", False)])
def test_metrics_ports_are_the_same_for_every_command(config_type: type, value: str, is_taken: bool) -> None:
    """The value -1 means none for all of them."""
    if is_taken:
        assert dataclasses.asdict(load(config_type, [f"--metrics-port={value}"], {}))["metrics_port"] == int(value)
    else:
        with pytest.raises(ConfigError, match=r"^--metrics-port: "):
            load(config_type, [f"--metrics-port={value}"], {})
