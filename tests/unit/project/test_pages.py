"""Tests that the README and the pages under docs/ say what the code does: flags, commands, make
targets, links, files, anchors."""

from __future__ import annotations

import pathlib
import re

import pytest

from services.cli.main import COMMANDS
from tests.support import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"```.*?```", re.S)


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the fragments that the page's headings are reached by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_command_named_exists() -> None:
    shell = "\n".join(
        block for page in PAGES for block in re.findall(r"```(?:sh|console)\n(.*?)```", page.read_text(), re.S)
    )
    named = set(re.findall(r"^baton ([a-z]+)\b", shell, re.M))
    assert {"up", "generate", "status"} <= named
    assert named <= set(COMMANDS)


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"^make ([a-z-]+)", text, re.M)) | set(re.findall(r"`make ([a-z-]+)", text))
    assert {"demo", "test"} <= named
    assert named <= targets


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target, _, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)(#([^)]+))?\)", CODE.sub("", page.read_text())):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_named_exist(page: pathlib.Path) -> None:
    """Paths from the root, in backticks."""
    for name in re.findall(
        r"`((?:services|tests|benchmarks|deploy|docs|examples|scripts|protos|client)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / name.rstrip("/")).exists(), f"{page.name}: {name}"


def test_decisions_have_numbers_of_their_own() -> None:
    files = sorted((ROOT / "docs" / "adr").glob("*.md"))
    titles = [file.read_text().partition(".")[0] for file in files]
    assert titles == [f"# {int(file.name[:4])}" for file in files]
    assert len(set(titles)) == len(titles) > 20
