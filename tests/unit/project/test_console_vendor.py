"""Tests that the libraries in the console are those that are pinned, and that a changed one is noticed."""

from __future__ import annotations

import shutil
from pathlib import Path

from scripts.console_vendor import SHIPPED, TESTED, differences
from tests.support import ROOT


def test_what_is_committed_is_what_is_pinned() -> None:
    assert list(differences(ROOT)) == []


def test_a_changed_a_missing_and_a_strange_file_are_named(tmp_path: Path) -> None:
    for folder in (SHIPPED, TESTED):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    with (tmp_path / SHIPPED / "uplot.js").open("a") as file:
        file.write("\n")
    (tmp_path / SHIPPED / "LICENSE.htm").unlink()
    (tmp_path / TESTED / "more.js").write_text("")
    assert list(differences(tmp_path)) == [
        f"{SHIPPED}/LICENSE.htm is missing",
        f"{SHIPPED}/uplot.js has changed",
        f"{TESTED}/more.js is not pinned",
    ]
