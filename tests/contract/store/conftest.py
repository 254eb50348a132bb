"""Provides a tiny model that workers compute, once for each file."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))
