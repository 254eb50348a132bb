"""Provides a router with no worker, and one with a prefill and a decode worker. Files that need other ones have their
own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.support.cluster import CONFIG, Cluster
from tests.support.scripted_worker import ScriptedWorker
from tests.support.text_model import write_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_model(tmp_path_factory.mktemp("model")))


@pytest.fixture
async def cluster(model: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(replace(CONFIG, model=model))
    await cluster.start()
    yield cluster
    await cluster.idle()
    await cluster.stop()


@pytest.fixture
async def pair(cluster: Cluster) -> tuple[ScriptedWorker, ScriptedWorker]:
    return await cluster.add("prefill"), await cluster.add("decode")
