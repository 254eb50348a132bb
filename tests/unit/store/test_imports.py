"""Tests that a store runs where nothing is installed that computes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.process


def test_a_store_needs_no_torch() -> None:
    """What is imported only to compute is not imported at all."""
    script = (
        "import sys, services.store.main, services.store.config; "
        "print([name for name in ('torch', 'transformers', 'llguidance', 'safetensors') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
