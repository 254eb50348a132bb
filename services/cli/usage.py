"""Runs `baton usage`: sums what usage logs say, by tenant and model.

Owns: reading the logs, each entry once however often it is there, and what is printed. Never: writing them
(`router/telemetry/usage.py`).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from typing import Any

from services.cli.arguments import Parser
from services.cli.tables import clip, table
from services.core.errors import ConfigError
from services.core.printable import printable
from services.router.tenants.tenants_file import expiry

_ID = re.compile(r"([0-9a-f]{1,16})-([0-9]{1,12})", re.ASCII)
_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens")


@dataclass(slots=True)
class Sum:
    """Holds what requests of one tenant and one model have come to."""

    num_tokens: Counter[str] = field(default_factory=Counter)
    """By `prompt_tokens`, `cached_tokens` and `output_tokens`."""
    cost: Decimal = Decimal(0)
    """Exact, whatever the order and the number of entries."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Requests by how they ended."""


class UsageSums:
    """Adds entries up, each id once."""

    def __init__(self, tenant: str | None = None, since_unix_s: float | None = None) -> None:
        """Counts only requests of `tenant` that ended at or after `since_unix_s`, where these are given."""
        self._tenant = tenant
        self._since_unix_s = since_unix_s
        self._seen: dict[str, set[int]] = {}
        self.sums: dict[tuple[str, str], Sum] = {}
        """By tenant and model; the model is empty of requests that were refused before it was known."""
        self.num_doubled = self.num_unreadable = 0

    def add(self, lines: Iterable[bytes]) -> None:
        """Adds a log's lines. One that is no entry, such as a torn one, is counted and left out."""
        for line in lines:
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                known = _ID.fullmatch(entry["id"])
                if known is None:
                    raise ValueError(entry["id"])
                ended_unix_s = datetime.fromisoformat(entry["time"]).timestamp()
                charged = {name: int(entry[name]) for name in _COUNTS}
                cost = Decimal(str(float(entry["cost"])))
                if not cost.is_finite():
                    raise ValueError(entry["cost"])
                key, outcome = (str(entry["tenant"]), str(entry["model"])), str(entry["outcome"])
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
                self.num_unreadable += 1
                continue
            numbers, number = self._seen.setdefault(known[1], set()), int(known[2])
            if number in numbers:
                self.num_doubled += 1
                continue
            numbers.add(number)
            if self._tenant not in (None, key[0]):
                continue
            if self._since_unix_s is not None and ended_unix_s < self._since_unix_s:
                continue
            of = self.sums.setdefault(key, Sum())
            of.num_tokens.update(charged)
            of.cost += cost
            of.outcomes[outcome] += 1


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Sums usage logs (--usage-log) by tenant and model, each request once.")
    parser.add_argument("files", nargs="+", metavar="FILE", help="a log; usage.jsonl* is the older ones too")
    parser.add_argument("--tenant", metavar="NAME", help="only this one")
    parser.add_argument("--since", metavar="DATE", help="only what ended since 2027-01-31, or 2027-01-31T12:00:00Z")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    sums = UsageSums(arguments.tenant, None if arguments.since is None else expiry(arguments.since, "--since"))
    for file in arguments.files:
        try:
            with open(file, "rb") as lines:
                sums.add(lines)
        except OSError as error:
            raise ConfigError(f"{printable(file)}: {error.strerror}") from error
    _print(arguments, sums)
    return 0


def _print(arguments: argparse.Namespace, sums: UsageSums) -> None:
    if sums.num_unreadable:
        print(f"{sums.num_unreadable} lines are no entries and were left out, as torn ones are", file=sys.stderr)
    entries = [_entry(tenant, model, of) for (tenant, model), of in sorted(sums.sums.items())]
    if arguments.json:
        told = {"usage": entries, "doubled": sums.num_doubled, "unreadable": sums.num_unreadable}
        print(json.dumps(told))
        return
    if not entries:
        print("no requests")
        return
    rows: list[tuple[str, ...]] = [("tenant", "model", "requests", "prompt", "cached", "output", "cost", "outcomes")]
    for entry in entries:
        outcomes = ", ".join(f"{outcome} {number}" for outcome, number in entry["outcomes"].items())
        rows.append(
            (
                *(clip(printable(entry[name])) or "-" for name in ("tenant", "model")),
                *(str(entry[name]) for name in ("requests", *_COUNTS)),
                f"{entry['cost']:.6g}",
                printable(outcomes),
            )
        )
    print("\n".join(table(rows)))


def _entry(tenant: str, model: str, of: Sum) -> dict[str, Any]:
    return {
        "tenant": tenant,
        "model": model,
        "requests": of.outcomes.total(),
        **{name: of.num_tokens[name] for name in _COUNTS},
        "cost": float(of.cost),
        "outcomes": dict(of.outcomes.most_common()),
    }
