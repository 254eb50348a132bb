"""Tests how tables lie on terminals of few columns."""

from __future__ import annotations

import sys

import pytest

from services.cli.tables import table

ROWS = [("worker", "role", "pid"), ("decode-0", "decode", "7")]
WIDE = ["worker    role    pid", "decode-0  decode    7"]


@pytest.mark.parametrize(
    ("columns", "lines"),
    [
        (21, WIDE),
        (20, ["worker  decode-0", "role    decode", "pid            7"]),
        (10, WIDE),
    ],
)
def test_one_that_is_too_wide_for_the_terminal_is_turned_if_that_helps(
    columns: int, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert table(ROWS) == WIDE, "in a file it has any width"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert table(ROWS) == lines
