"""Flags, `BATON_*` variables and defaults, in that order; errors name what was wrong."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from services.core import config
from services.core.config import option
from services.core.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Example:
    name: str = option("x", "a name", choices=("x", "y"))
    max_seqs: int = option(4, "a count, 100% whole", check=config.positive, must="must be positive")
    ratio: float = option(0.5, "a share")
    limit: int | None = option(None, "a limit", check=config.positive)
    verbose: bool = option(False, "a switch")
    router: tuple[str, ...] = option((), "repeatable")
    derived: int = 7  # no option: neither a flag nor a variable


def load(argv: list[str], environ: dict[str, str] | None = None) -> Example:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser, Example)
    return config.load(Example, parser.parse_args(argv), environ or {})


def test_defaults() -> None:
    assert load([]) == Example()


def test_flags_win_over_the_environment() -> None:
    environ = {"BATON_MAX_SEQS": "9", "BATON_RATIO": "0.25", "BATON_VERBOSE": "yes", "BATON_ROUTER": "a:1,b:2"}
    loaded = load(["--max-seqs", "8", "--limit", "3"], environ)
    assert loaded == Example(max_seqs=8, ratio=0.25, limit=3, verbose=True, router=("a:1", "b:2"))


def test_repeated_and_negated_flags() -> None:
    loaded = load(["--router", "a:1", "--router", "b:2", "--no-verbose"], {"BATON_VERBOSE": "1"})
    assert loaded.router == ("a:1", "b:2")
    assert loaded.verbose is False


@pytest.mark.parametrize(
    ("argv", "environ", "message"),
    [
        (["--max-seqs", "many"], {}, "--max-seqs: 'many' is not a whole number"),
        (["--max-seqs", "0"], {}, "--max-seqs: 0 must be positive"),
        (["--ratio", "half"], {}, "--ratio: 'half' is not a number"),
        (["--name", "z"], {}, "--name: 'z' is not one of x, y"),
        (["--limit", "-1"], {}, "--limit: -1 is out of range"),
        ([], {"BATON_MAX_SEQS": "1.5"}, "BATON_MAX_SEQS: '1.5' is not a whole number"),
        ([], {"BATON_VERBOSE": "perhaps"}, "BATON_VERBOSE: 'perhaps' is not true or false"),
    ],
)
def test_errors_name_the_flag_or_the_variable(argv: list[str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(argv, environ)
    assert str(caught.value) == message


def test_help_shows_default_and_variable() -> None:
    parser = argparse.ArgumentParser()
    config.add_arguments(parser, Example)
    text = " ".join(parser.format_help().split())
    assert "a count, 100% whole (default: 4) [BATON_MAX_SEQS]" in text
    assert "derived" not in text


@dataclasses.dataclass(frozen=True)
class Other(Example):
    more: int = option(1, "not of the first")
    ratio: float = option(0.5, "declared anew")


def test_flags_give_another_process_what_both_declare_once() -> None:
    asked = Other(name="y", max_seqs=5, ratio=0.7, limit=3, verbose=False, router=("a:1", "b:2"), more=9)
    environ = {"BATON_VERBOSE": "1", "BATON_MAX_SEQS": "5", "BATON_NAME": "x"}
    flags = config.flags(asked, Example, environ)
    assert flags == ["--name=y", "--limit=3", "--no-verbose", "--router=a:1", "--router=b:2"], "no more than is needed"
    assert load(flags, environ) == Example(name="y", max_seqs=5, limit=3, router=("a:1", "b:2"))
    assert config.flags(Other(), Example, {}) == []
