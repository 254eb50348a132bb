"""Tests that `baton generate` puts its constraint's flags into the request."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.v1 import types_pb2
from services.cli.generate import make_parser, request_of
from services.core.errors import ConfigError


def constraint(*flags: str) -> types_pb2.Constraint | None:
    request = request_of(make_parser("baton generate").parse_args(["--prompt", "hi", *flags]))
    return request.constraint if request.HasField("constraint") else None


def test_each_flag_is_a_constraint(tmp_path: Path) -> None:
    (file := tmp_path / "file").write_text('{"type": "integer"}')
    assert constraint() is None
    assert constraint("--json-schema", str(file)) == types_pb2.Constraint(json_schema='{"type": "integer"}')
    assert constraint("--grammar", str(file)) == types_pb2.Constraint(grammar='{"type": "integer"}')
    assert constraint("--regex", "a+") == types_pb2.Constraint(regex="a+")
    expected = types_pb2.Constraint(choices=types_pb2.Choices(texts=["yes", "no"]))
    assert constraint("--choice", "yes", "--choice", "no") == expected


def test_an_empty_expression_is_for_the_router_to_refuse() -> None:
    assert constraint("--regex", "") == types_pb2.Constraint(regex="")


def test_a_file_that_cannot_be_read_is_told_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--json-schema: "):
        constraint("--json-schema", str(tmp_path / "none"))


def test_two_constraints_are_one_too_many() -> None:
    with pytest.raises(ConfigError, match="--choice: not allowed with argument --regex"):
        constraint("--regex", "a", "--choice", "b")
