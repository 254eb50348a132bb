"""Provides a small cluster with HTTP for each file that has none of its own."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.cluster import Cluster, running_cluster
from tests.support.http_client import HTTP
from tests.support.models import tiny_model
from tests.support.workers import DECODE, PREFILL


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Has a context of 80 tokens."""
    model = tiny_model("llama", tmp_path_factory.mktemp("http"))
    async with running_cluster(model, [PREFILL, DECODE], router=HTTP, kv_blocks=40, max_model_len=80) as cluster:
        yield cluster
