"""Asks a Prometheus every query of the dashboards in deploy/grafana, as Grafana would, and says what came back.

    scripts/check_dashboards.py --prometheus http://127.0.0.1:9090 [--range 5m]

Fails if a query is wrong, or brings nothing although requests are served. A panel that is rightly empty at times says
so in its description: "Empty while ...", "Empty on ...", "Empty for ...".
"""

from __future__ import annotations

import argparse
import json
import math
import pathlib
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

DASHBOARDS = pathlib.Path(__file__).resolve().parents[1] / "deploy" / "grafana"
MAY_BE_EMPTY = ("Empty while", "Empty on", "Empty for")


@dataclass(frozen=True)
class Query:
    dashboard: str
    title: str
    expression: str
    may_be_empty: bool


@dataclass(frozen=True)
class Answer:
    num_series: int
    num_numbers: int
    """Series whose value is neither NaN nor infinite."""
    error: str = ""


def queries(path: pathlib.Path) -> Iterator[Query]:
    """Yields the queries of panels, annotations and variables."""
    dashboard = json.loads(path.read_text())
    for panel in dashboard["panels"]:
        optional = any(words in panel.get("description", "") for words in MAY_BE_EMPTY)
        for target in panel.get("targets", []):
            yield Query(path.stem, panel["title"], target["expr"], optional)
    for annotation in dashboard["annotations"]["list"]:
        yield Query(path.stem, f"annotation {annotation['name']}", annotation["expr"], True)
    for variable in dashboard["templating"]["list"]:
        metric = variable["definition"].removeprefix("label_values(").rpartition(",")[0]
        yield Query(path.stem, f"variable ${variable['name']}", metric, False)


def filled_in(expression: str, range_: str, rate_interval: str) -> str:
    """Fills in Grafana's variables, as a viewer has them who has chosen nothing."""
    for variable, value in (("$__rate_interval", rate_interval), ("$__range", range_), ("$worker", ".+")):
        expression = expression.replace(variable, value)
    return expression


def ask(prometheus: str, expression: str) -> Answer:
    address = f"{prometheus.rstrip('/')}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(address, timeout=30) as reply:
            document: dict[str, Any] = json.load(reply)
    except urllib.error.HTTPError as error:
        with error:
            return Answer(0, 0, json.load(error)["error"])
    except OSError as error:
        raise SystemExit(f"{prometheus} does not answer: {error}") from error
    values = [float(series["value"][1]) for series in document["data"]["result"]]
    return Answer(len(values), sum(map(math.isfinite, values)))


def verdict(query: Query, answer: Answer) -> str:
    if answer.error:
        return "WRONG"
    if answer.num_numbers:
        return "ok"
    return "empty" if query.may_be_empty else "EMPTY"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090")
    parser.add_argument("--range", default="5m", help="the dashboards' range (default: 5m)")
    parser.add_argument("--rate-interval", default="1m", help="four scrape intervals at least (default: 1m)")
    arguments = parser.parse_args()
    counts: dict[str, int] = {}
    for path in sorted(DASHBOARDS.glob("*.json")):
        for query in queries(path):
            expression = filled_in(query.expression, arguments.range, arguments.rate_interval)
            answer = ask(arguments.prometheus, expression)
            said = verdict(query, answer)
            counts[said] = counts.get(said, 0) + 1
            print(f"{said:<6} {answer.num_numbers:>3}/{answer.num_series:<3} {query.dashboard:<9} {query.title}")
            if said in ("WRONG", "EMPTY"):
                print(f"       {answer.error} {expression}")
    print(", ".join(f"{number} {said}" for said, number in counts.items()))
    return 1 if {"WRONG", "EMPTY"} & counts.keys() else 0


if __name__ == "__main__":
    sys.exit(main())
