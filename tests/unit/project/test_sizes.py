"""Tests that no file of tests is longer than a reader takes in at once."""

from __future__ import annotations

from tests.support import ROOT

_MOST_LINES = 400


def test_no_file_of_tests_is_too_long() -> None:
    sizes = {path: len(path.read_text().splitlines()) for path in (ROOT / "tests").rglob("*.py")}
    assert {str(path.relative_to(ROOT)): size for path, size in sizes.items() if size > _MOST_LINES} == {}
