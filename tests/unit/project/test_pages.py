"""Tests that what the pages name exists: flags, variables, commands, make targets, links, files, anchors."""

from __future__ import annotations

import functools
import pathlib
import re

import pytest

from services.cli.main import COMMANDS
from tests.support import ROOT

PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *(ROOT / folder / "README.md" for folder in ("client", "deploy", "examples")),
]
CODE = re.compile(r"```.*?```", re.S)
SOURCES = ("benchmarks", "deploy", "examples", "scripts", "services", "tests")
OF_OTHERS = {"--api-key", "--env-file", "--extra-index-url", "--index-url"}
"""Flags of vLLM, docker compose and pip."""
each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@functools.cache
def sources() -> str:
    """Returns the text of all that reads flags and variables."""
    suffixes = {".py", ".mjs", ".yml", ".env"}
    files = (file for folder in SOURCES for file in sorted((ROOT / folder).rglob("*")) if file.suffix in suffixes)
    return "\n".join(file.read_text() for file in files if "node_modules" not in file.parts)


@functools.cache
def options() -> frozenset[str]:
    """Returns the names of all fields that are flags, and variables, by their declaration."""
    return frozenset(re.findall(r"^    (\w+): .*= \w*(?:option|setting)\(", sources(), re.M))


@functools.cache
def flags() -> frozenset[str]:
    declared = {"--" + name.replace("_", "-") for name in options()}
    return frozenset(declared | OF_OTHERS | set(re.findall(r"[\"'`](--[a-z0-9-]+)", sources())))


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
    examples = "\n".join(CODE.findall(text))
    named = set(re.findall(r"^make ([a-z-]+)", examples, re.M)) | set(re.findall(r"`make ([a-z-]+)", text))
    assert {"demo", "test"} <= named
    assert named <= targets


@each_page
def test_flags_named_exist(page: pathlib.Path) -> None:
    """Flags alone in backticks, and those of commands of `baton` there and in examples."""
    text = page.read_text()
    spans = re.findall(r"`((?:--|baton )[^`\n]+)`", CODE.sub("", text)) + re.findall(r"^baton .*$", text, re.M)
    named = {name for span in spans for name in re.findall(r"(?:^|[ \[])(--[a-z0-9-]+)(?=[] =]|$)", span)}
    assert {name for name in named if name not in flags() and name.replace("--no-", "--") not in flags()} == set()


@each_page
def test_variables_named_exist(page: pathlib.Path) -> None:
    named = set(re.findall(r"\bBATON_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()))
    mirrored = {f"BATON_{name.upper()}" for name in options()}
    assert {name for name in named - mirrored if not re.search(rf"\b{name}\b", sources())} == set()


@each_page
def test_links_lead_somewhere(page: pathlib.Path) -> None:
    for target, _, anchor in re.findall(r"\]\((?!\w+:)([^)#]*)(#([^)]+))?\)", CODE.sub("", page.read_text())):
        file = page.parent / target if target else page
        assert file.exists(), f"{page.name}: {target}"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{page.name}: {target}#{anchor}"


@each_page
def test_files_named_exist(page: pathlib.Path) -> None:
    """Paths from the root, or from the page, in backticks."""
    for name in re.findall(
        r"`((?:services|tests|benchmarks|deploy|docs|examples|scripts|protos|client)/[\w./-]+)`", page.read_text()
    ):
        assert (ROOT / name.rstrip("/")).exists() or (page.parent / name).exists(), f"{page.name}: {name}"


def test_decisions_have_numbers_of_their_own() -> None:
    files = sorted((ROOT / "docs" / "adr").glob("*.md"))
    titles = [file.read_text().partition(".")[0] for file in files]
    assert titles == [f"# {int(file.name[:4])}" for file in files]
    assert len(set(titles)) == len(titles) > 20
