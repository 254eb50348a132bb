"""Tests that the README and the pages under docs/ say what the code does: flags, commands, make
targets, links, files, anchors."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

from services.cli.main import COMMANDS
from tests.support import ROOT

README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
CODE = re.compile(r"```.*?```", re.S)


def anchors(page: pathlib.Path) -> set[str]:
    """Returns the fragments that the page's headings are reached by, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", CODE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.process
def test_configuration_tables_are_the_dataclasses() -> None:
    script = str(ROOT / "scripts" / "config_table.py")
    process = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


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


def test_the_readme_is_short() -> None:
    """The page says what Baton is, has a picture, two commands, a request and a trace, and names the other pages."""
    assert len(README.splitlines()) <= 120


def test_the_client_is_complete_and_15_lines() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    ast.parse(program)
    assert len([line for line in program.splitlines() if line.strip()]) <= 15


def test_a_token_passes_at_most_twelve_files() -> None:
    """The list is what a reader follows; each entry but the last calls, or writes to, the next."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    way_out = page.partition("*A token, from the decode worker's engine to the client*")[2].partition("\n\n*A prompt")[
        0
    ]
    files = re.findall(r"^\d+\. `(services/[\w/]+\.py)`:", way_out, re.M)
    assert len(files) == way_out.count("`services/") <= 12
    assert (files[0], files[-1]) == ("services/worker/hub.py", "services/router/front/grpc/servicer.py")


def test_decisions_have_numbers_of_their_own() -> None:
    files = sorted((ROOT / "docs" / "adr").glob("*.md"))
    titles = [file.read_text().partition(".")[0] for file in files]
    assert titles == [f"# {int(file.name[:4])}" for file in files]
    assert len(set(titles)) == len(titles) > 20
