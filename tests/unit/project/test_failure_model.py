"""Tests that the failure model names tests that exist."""

from __future__ import annotations

import re

from tests.support import ROOT

DOCUMENT = (ROOT / "docs" / "failure-model.md").read_text()


def test_every_test_named_exists() -> None:
    named = re.findall(r"`([\w/]+\.py)::(?:(\w+)::)?(\w+)`", DOCUMENT)
    assert len(named) == DOCUMENT.count(".py::") > 60
    for path, group, name in named:
        text = (ROOT / "tests" / path).read_text()
        assert not group or f"\nclass {group}:" in text, f"{path}::{group}"
        assert re.search(rf"^{' ' * 4 * bool(group)}(async )?def {name}\(", text, re.M), f"{path}::{name}"


def test_every_fault_is_shown_by_a_test() -> None:
    rows = [
        line
        for line in DOCUMENT.splitlines()
        if line.startswith("|") and not line.startswith(("| fault", "| phase", "|---"))
    ]
    assert rows
    for row in rows:
        cells = row.strip("|").split(" | ")
        assert len(cells) == 5, row
        assert "::" in cells[-1], row
