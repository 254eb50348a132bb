"""Tests that deploy/README.md, .env.example and the examples name every setting of the compose files, with its
default."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scripts import compose_table
from services.cli.main import COMMANDS
from tests.support.compose import COMPOSE_FILE, DEPLOY, TLS_FILE, env_file, num_workers, services, variables

README = (DEPLOY / "README.md").read_text()
VARIABLES = variables(COMPOSE_FILE.read_text() + TLS_FILE.read_text())
EXAMPLES = sorted((DEPLOY / "examples").glob("*.env"))
GPUS = {"gpu-1.env": (0, 0, 1), "gpu-2.env": (1, 1, 0), "gpu-4.env": (1, 3, 0), "gpu-8.env": (3, 5, 0)}


def test_a_setting_has_one_default() -> None:
    for name, defaults in VARIABLES.items():
        assert len(defaults) == 1, f"{name}: {defaults}"
        assert None not in defaults, f"{name} has none"


def test_the_table_has_every_setting_and_its_default() -> None:
    rows = re.findall(r"^\| `([A-Z0-9_]+)` \| (?:`([^`]*)`)? *\| \S", README.partition("## Settings")[2], re.M)
    assert dict(rows) == {name: next(iter(defaults)) for name, defaults in VARIABLES.items()}
    assert len(rows) == len(VARIABLES)


def test_the_example_of_an_env_file_has_every_setting_and_its_default() -> None:
    text = (DEPLOY / ".env.example").read_text()
    rows = dict(re.findall(r"^# ([A-Z0-9_]+)=(.*)$", text, re.M))
    assert rows.pop("OTLP_ENDPOINT") == "http://jaeger:4317"
    assert rows == {name: next(iter(given)) for name, given in VARIABLES.items() if name != "OTLP_ENDPOINT"}
    assert env_file(DEPLOY / ".env.example") == env_file(DEPLOY / ".env"), "copied as it is, it changes nothing"


def test_a_setting_that_is_new_is_written_behind_the_one_before_it() -> None:
    assert compose_table.readme(README) == README
    without = re.sub(r"^\| `SLOW_FACTOR` .*\n", "", README, flags=re.M)
    rows = compose_table.readme(without).splitlines()
    (at,) = [
        number for number, row in enumerate(rows) if row.startswith("| `SLOW_FACTOR` | `2` | a worker whose steps")
    ]
    assert rows[at - 1].startswith("| `ISOLATE_LONG_PROMPTS` |")
    example = (DEPLOY / ".env.example").read_text()
    assert compose_table.env_example(example.replace("# SLOW_FACTOR=2\n", "")) == example


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_start_one_worker_per_gpu(path: Path) -> None:
    given = env_file(path)
    assert set(given) <= set(VARIABLES) | {"COMPOSE_PROFILES"}
    started = [entry for entry in num_workers(services(given), {given["COMPOSE_PROFILES"]}) if entry[2]]
    assert all(name.startswith("gpu-") and number == 1 for name, _, number in started)
    roles = [role for _, role, _ in started]
    assert (roles.count("prefill"), roles.count("decode"), roles.count("mixed")) == GPUS[path.name]
    prefill, decode, _ = GPUS[path.name]
    assert f"| `examples/{path.name}` | {len(roles)} | {f'{prefill} : {decode}' if decode else 'one mixed'}" in README


def test_no_example_is_missing() -> None:
    assert {path.name for path in EXAMPLES} == set(GPUS)


def test_commands_and_files_named_exist() -> None:
    blocks = "\n".join(re.findall(r"```(?:sh|console)\n(.*?)```", README, re.S))
    named = set(re.findall(r"(?:^|\$ |router )baton ([a-z]+)\b", blocks, re.M))
    assert named
    assert named <= set(COMMANDS)
    for name in re.findall(r"`(examples/[\w.-]+|tests/[\w./]+|requirements/[\w.]+)`", README):
        assert (DEPLOY / name).exists() or (DEPLOY.parent / name).exists(), name
