"""Metric names in PromQL, dashboards and rules.

Owns: finding them, without a full grammar: what cannot be a name is taken away. Never: whether they exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*")
_KEYWORDS = {
    *("and", "or", "unless", "bool", "offset", "start", "end", "inf", "nan"),
    *("by", "without", "on", "ignoring", "group_left", "group_right"),
}
_TAKEN_AWAY = (
    re.compile(r"#[^\n]*"),
    re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|`[^`]*`'),  # strings, before the braces they may hold
    re.compile(r"\{[^{}]*\}"),  # matchers
    re.compile(r"\[[^\]]*\]"),  # ranges
    re.compile(r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", re.I),  # labels
    re.compile(r"\boffset\s+-?[\w$]+"),
    re.compile(r"\$\{?\w+(?::\w+)?\}?"),  # a dashboard's variables
    re.compile(r"\b\d+(?:\.\d+)?(?:e[+-]?\d+|ms|[smhdwy])*", re.I),  # numbers and durations
)
_LABEL_VALUES = re.compile(r"^\s*label_values\((?:(?P<metric>.+),)?\s*\w+\s*\)\s*$", re.S)
_QUERY_RESULT = re.compile(r"^\s*query_result\((?P<query>.+)\)\s*$", re.S)


def metrics_of(expression: str) -> set[str]:
    """The names of all metrics that a PromQL expression reads."""
    for pattern in _TAKEN_AWAY:
        expression = pattern.sub(" ", expression)
    names = set()
    for match in _NAME.finditer(expression):
        called = expression[match.end() :].lstrip().startswith("(")
        if not called and match[0].lower() not in _KEYWORDS:
            names.add(match[0])
    return names


def of_dashboard(path: Path) -> Iterator[str]:
    """Yields every PromQL expression of a Grafana dashboard: panels however nested, variables, annotations."""
    yield from _expressions(json.loads(path.read_text()))


def of_rules(path: Path) -> tuple[list[str], set[str]]:
    """Returns (expressions, names that recording rules make)."""
    rules = [rule for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]
    return [str(rule["expr"]) for rule in rules], {rule["record"] for rule in rules if "record" in rule}


def _expressions(node: Any) -> Iterator[str]:
    if isinstance(node, list):
        for item in node:
            yield from _expressions(item)
    elif isinstance(node, dict):
        for key, value in node.items():
            if key in ("expr", "query", "definition") and isinstance(value, str):
                yield from _unwrapped(value, node)
            else:
                yield from _expressions(value)


def _unwrapped(text: str, holder: dict[str, Any]) -> Iterator[str]:
    """A variable's query asks for labels of a metric; constants and lists of choices hold no PromQL at all."""
    if holder.get("type") in ("constant", "custom", "interval", "textbox", "datasource"):
        return
    labels, result = _LABEL_VALUES.match(text), _QUERY_RESULT.match(text)
    if labels is not None:
        yield from filter(None, [labels["metric"]])
    else:
        yield result["query"] if result is not None else text
