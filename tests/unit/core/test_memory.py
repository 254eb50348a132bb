"""Tests that a process says how much memory it has used itself."""

from __future__ import annotations

import subprocess
import sys

import pytest

from services.core.memory import peak_memory_bytes
from tests.support.processes import ROOT

pytestmark = pytest.mark.process

_CHILD = """
from services.core.memory import peak_memory_bytes
before = peak_memory_bytes()
held = bytearray(b"x") * (64 << 20)
del held
print(before, peak_memory_bytes())
"""


def test_a_small_child_of_a_large_process_says_what_it_took_itself() -> None:
    held = bytearray(b"x") * (256 << 20)
    assert peak_memory_bytes() >= len(held)
    told = subprocess.run([sys.executable, "-c", _CHILD], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    before, after = map(int, told.split())
    assert before < 64 << 20
    assert 60 << 20 < after - before < 80 << 20
