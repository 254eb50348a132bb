"""Provides a model without weights, since nobody computes it, and the vLLM that follows a script."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.scripted_vllm_engine import ScriptedVllm
from tests.support.text_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scripted"))


@pytest.fixture
def vllm(tmp_path: Path) -> ScriptedVllm:
    return ScriptedVllm(tmp_path)
