"""Fakes, harnesses and measures of the tests. Nothing here is collected."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
"""Of the repository."""
