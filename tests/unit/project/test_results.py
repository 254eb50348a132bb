"""Tests that committed results say nothing of the machine's folders: these are of no use elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]


def texts(value: Any) -> Iterator[str]:
    """Yields every string in a result, names of its fields too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, each in value.items():
            yield name
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)


def test_no_result_names_a_folder_of_its_machine() -> None:
    files = sorted((ROOT / "benchmarks" / "results").rglob("*.json"))
    assert len(files) > 10
    found = [(file.name, text) for file in files for text in texts(json.loads(file.read_text())) if text[:1] == "/"]
    assert found == []
