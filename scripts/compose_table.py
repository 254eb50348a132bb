"""Writes the settings of the compose files into deploy/README.md and deploy/.env.example. `--check` fails if one
differs.

A setting is a `${NAME:-default}` of a compose file. What it means is written by hand; one that has no row yet, and is
the value of a `BATON_*` variable, gets what the option's help says.
"""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys
from collections.abc import Callable, Mapping

from services.router.config import RouterConfig
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig

DEPLOY = pathlib.Path(__file__).resolve().parents[1] / "deploy"
FILES = ("docker-compose.yml", "docker-compose.tls.yml")
_SETTING = re.compile(r"(?:BATON_(?P<option>[A-Z0-9_]+): \"?)?\$\{(?P<name>[A-Z0-9_]+):-(?P<default>[^}]*)\}")
_ROW = re.compile(r"^\| `([A-Z0-9_]+)` \|[^|]*\| (.*) \|$", re.MULTILINE)
_LINE = re.compile(r"^# ([A-Z0-9_]+)=.*$", re.MULTILINE)
_NOT_DEFAULTS = ("OTLP_ENDPOINT",)
"""Settings of which the example of an env file shows another value than the default."""


def settings() -> dict[str, tuple[str, str]]:
    """Returns the default of each setting, and what it means if it is an option's value, in the files' order."""
    helps = {
        field.name: field.metadata["help"]
        for kind in (StoreConfig, WorkerConfig, RouterConfig)
        for field in dataclasses.fields(kind)
        if "help" in field.metadata
    }
    found: dict[str, tuple[str, str]] = {}
    for file in FILES:
        for match in _SETTING.finditer((DEPLOY / file).read_text()):
            meaning = helps.get((match["option"] or "").lower(), "")
            found.setdefault(match["name"], (match["default"], meaning))
    return found


def readme(text: str) -> str:
    head, between, tail = text.partition("## Settings")
    rows = dict(_ROW.findall(tail))

    def row(name: str, default: str, meaning: str) -> str:
        return f"| `{name}` | {f'`{default}`' if default else ''} | {rows.get(name) or meaning.replace('|', '/')} |"

    return head + between + _merged(tail, _ROW, row)


def env_example(text: str) -> str:
    kept = {match[1]: match[0] for match in _LINE.finditer(text) if match[1] in _NOT_DEFAULTS}
    return _merged(text, _LINE, lambda name, default, _: kept.get(name) or f"# {name}={default}")


def _merged(text: str, entry: re.Pattern[str], line: Callable[[str, str, str], str]) -> str:
    """Returns the text with a line for each setting: where it has one, or behind that of the setting before it."""
    known: Mapping[str, tuple[str, str]] = settings()
    behind: dict[str, list[str]] = {}
    last, there = "", {match[1] for match in entry.finditer(text)}
    for name in known:
        if name in there:
            last = name
        else:
            behind.setdefault(last, []).append(name)

    def anew(match: re.Match[str]) -> str:
        names = [match[1]] if match[1] in known else []
        return "\n".join(line(name, *known[name]) for name in [*names, *behind.get(match[1], [])])

    return entry.sub(anew, text)


def main() -> int:
    stale = False
    for path, written in ((DEPLOY / "README.md", readme), (DEPLOY / ".env.example", env_example)):
        text = path.read_text()
        if sys.argv[1:] == ["--check"]:
            if written(text) != text:
                print(f"deploy/{path.name} is stale: run scripts/compose_table.py", file=sys.stderr)
                stale = True
        else:
            path.write_text(written(text))
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
