"""Tests what all commands have in common: the router they ask by default, and what is said of a misspelt name."""

from __future__ import annotations

import pytest

from services.cli import main as command_line
from services.cli.arguments import Parser, add_control, add_target
from services.core.errors import ConfigError


@pytest.mark.parametrize(
    ("add", "variable", "local"),
    [(add_target, "BATON_TARGET", "127.0.0.1:50051"), (add_control, "BATON_CONTROL_TARGET", "127.0.0.1:50052")],
)
def test_the_router_is_the_local_one_unless_a_variable_or_the_flag_names_another(
    add, variable: str, local: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def target(*flags: str) -> str:
        add(parser := Parser(prog="baton"))
        return parser.parse_args(flags).target

    monkeypatch.delenv(variable, raising=False)
    assert target() == local
    monkeypatch.setenv(variable, "far:1")
    assert target() == "far:1"
    assert target("--target", "near:2") == "near:2"


def test_an_option_that_is_not_there_is_told_before_what_is_missing_with_the_one_that_was_meant() -> None:
    parser = Parser(prog="baton")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("rest", nargs="*")
    with pytest.raises(ConfigError, match=r"^there is no --promt \(did you mean --prompt\?\)$"):
        parser.parse_args(["--promt", "x"])
    with pytest.raises(ConfigError, match=r"^there is no --zzz$"):
        parser.parse_args(["--prompt", "x", "--zzz=1"])
    assert parser.parse_args(["--prompt", "--a text", "--", "--zzz"]).rest == ["--zzz"]


def test_a_commands_own_parser_says_which_options_there_are() -> None:
    parser = Parser(prog="baton")
    actions = parser.add_subparsers(dest="action", parser_class=Parser)
    actions.add_parser("list").add_argument("--json", action="store_true")
    assert parser.parse_args(["list", "--json"]).json
    with pytest.raises(ConfigError, match=r"^'lst' is not a command \(did you mean list\?\); there are list$"):
        parser.parse_args(["lst"])
    with pytest.raises(ConfigError, match=r"there is no --jsn \(did you mean --json\?\)"):
        parser.parse_args(["list", "--jsn"])


def test_a_command_that_is_not_there_is_told_with_the_one_that_was_meant(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["genrate"]) == command_line.EXIT_USAGE
    assert "'genrate' is not a command (did you mean generate?); there are up, " in capsys.readouterr().err
