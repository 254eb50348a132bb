"""Writes the tables of docs/configuration.md from the config dataclasses. `--check` fails if they differ."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import sys

from services.cli.up import UpConfig
from services.router.config import RouterConfig
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig

PAGE = pathlib.Path(__file__).resolve().parents[1] / "docs" / "configuration.md"
TABLES = {
    "baton up": UpConfig,
    "baton router": RouterConfig,
    "baton prefill, decode and mixed": WorkerConfig,
    "baton kvtransfer": StoreConfig,
}
BEGIN, END = "<!-- configuration: written by scripts/config_table.py -->", "<!-- end of configuration -->"


def tables() -> str:
    """Returns all tables in Markdown."""
    return "\n\n".join(f"## {title}\n\n{_table(config)}" for title, config in TABLES.items())


def updated(page: str) -> str:
    """Returns the page's text with the tables as they should be."""
    if BEGIN not in page or END not in page:
        raise SystemExit(f"{PAGE.name} lacks the lines {BEGIN!r} and {END!r}")
    return re.sub(f"{BEGIN}.*?{END}", lambda _: f"{BEGIN}\n\n{tables()}\n\n{END}", page, flags=re.DOTALL)


def _table(config: type) -> str:
    rows = ["| flag | default | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            meaning = field.metadata["help"].replace("|", "\\|")
            choices = field.metadata["choices"]
            meaning += f" ({', '.join(choices)})" if choices else ""
            rows.append(f"| `--{field.name.replace('_', '-')}` | {_default(field.default)} | {meaning} |")
    return "\n".join(rows)


def _default(value: object) -> str:
    return "" if value in (None, "", ()) else f"`{str(value).lower() if isinstance(value, bool) else value}`"


def main() -> int:
    text = PAGE.read_text()
    if sys.argv[1:] == ["--check"]:
        if updated(text) == text:
            return 0
        print("docs/configuration.md's tables are stale: run scripts/config_table.py", file=sys.stderr)
        return 1
    PAGE.write_text(updated(text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
