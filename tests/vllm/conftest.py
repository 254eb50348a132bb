"""Leaves these tests out where there is no vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.model_names import resolve_model
from services.core.errors import ConfigError
from services.core.process_config import DEFAULT_MODEL
from services.vllm.environment import vllm_python


@pytest.fixture(scope="session", autouse=True)
def python() -> Path:
    """Returns the Python that has vLLM."""
    try:
        return vllm_python()
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def smol() -> Path:
    """Returns the default model, which vLLM computes in float32 here: its KV has 3 heads of 64 in 30 layers."""
    return resolve_model(DEFAULT_MODEL).path
