"""The README says what the code does: flags, commands, files."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

from services.cli.main import COMMANDS

ROOT = pathlib.Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_configuration_tables_are_the_dataclasses() -> None:
    script = str(ROOT / "scripts" / "config_table.py")
    process = subprocess.run([sys.executable, script, "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr


def test_every_command_named_exists() -> None:
    named = set(re.findall(r"\bbaton ([a-z]+)\b", "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", README, re.S))))
    assert named
    assert named <= set(COMMANDS)


def test_every_make_target_named_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    named = set(re.findall(r"^make ([a-z]+)", README, re.M)) | set(re.findall(r"`make ([a-z]+)", README))
    assert named
    assert named <= targets


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", README):
        assert (ROOT / target).exists(), target


def test_the_client_is_complete_and_15_lines() -> None:
    (program,) = re.findall(r"```python\n(.*?)```", README, re.S)
    ast.parse(program)
    assert len([line for line in program.splitlines() if line.strip()]) <= 15
