"""Provides one cluster of real processes for all fault tests, whole and idle before and after each of them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support.equality import GreedyReference
from tests.support.models import tiny_model
from tests.support.real_cluster import RealCluster, real_cluster

WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
# Small chunks make prompts take many steps, small pools make requests wait; drains may take long on a busy machine.
FLAGS = (
    *("--dtype", "float32", "--threads", "1", "--kv-blocks", "96", "--max-num-batched-tokens", "32"),
    *("--drain-s", "240"),
)
ALL = ("--no-worker-timeout-s", "240", "--queue-timeout-s", "600")
"""However long a busy machine takes to start workers."""
ROUTERS = ((*ALL, "--max-queue", "24"), (*ALL, "--silence-s", "20"))
"""The second one takes no slow worker for a lost one."""


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model of many thin layers: quick to load, slow enough to be caught in each phase."""
    return tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=12)


@pytest.fixture(scope="package")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest_asyncio.fixture(scope="package", loop_scope="package")
async def shared(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[RealCluster]:
    async with real_cluster(model, tmp_path_factory.mktemp("temp"), WORKERS, *FLAGS, routers=ROUTERS) as cluster:
        yield cluster


@pytest_asyncio.fixture(loop_scope="package")
async def cluster(shared: RealCluster) -> AsyncIterator[RealCluster]:
    """Yields the cluster, which is to be idle within 5 s after the test, also those services that were away."""
    await shared.whole()
    await shared.idle()
    shared.watch()
    yield shared
    await shared.idle()
    await shared.whole()
    await shared.idle()
