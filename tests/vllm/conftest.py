"""Says when these tests run: where there is vLLM, beside no other test, and not in `make test`."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.model_cache import DEFAULT_MODEL
from services.cli.model_names import resolve_model
from services.core.errors import ConfigError
from services.vllm.environment import vllm_python

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """This hook sees the items of the whole run."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.alone)
            item.add_marker(pytest.mark.long)


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
