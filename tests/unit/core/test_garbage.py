"""Tests that full collections of cycles are rare while requests come, and that cycles go all the same."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.process

_ALIKE = """
import gc, sys
from services.core.garbage import collect_rarely

class Stream:
    def __init__(self):
        self.parts = [{"part": [number]} for number in range(100)]

kept = [[str(number)] for number in range(200_000)]
if sys.argv[1] == "rarely":
    collect_rarely()
began = gc.get_stats()[2]["collections"]
streams = [Stream() for _ in range(3_000)]
print(gc.get_stats()[2]["collections"] - began)
"""
_CYCLES = """
import weakref
from services.core.garbage import NEW_OBJECTS, collect_rarely

class Knot:
    def __init__(self):
        self.knot = self

collect_rarely()
knots = [weakref.ref(Knot()) for _ in range(3 * NEW_OBJECTS)]
print(sum(knot() is not None for knot in knots) <= NEW_OBJECTS)
"""


def _output(code: str, *arguments: str) -> str:
    """Runs the code in a process of its own: the collector's settings are a process's."""
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60, cwd=ROOT).stdout.strip()


def test_streams_that_come_cause_no_full_collection() -> None:
    assert int(_output(_ALIKE, "by default")) > 0, "what is to be kept from happening"
    assert _output(_ALIKE, "rarely") == "0"


def test_cycles_that_die_young_are_found() -> None:
    assert _output(_CYCLES) == "True"
