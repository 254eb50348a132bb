"""Tests a store among real processes whose workers are replaced by ones with other weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.v1 import control_pb2
from tests.integration.faults.conftest import ALL, FLAGS
from tests.support.models import tiny_model
from tests.support.real_cluster import READY_WITHIN_S, Status, real_cluster

pytestmark = [pytest.mark.asyncio(loop_scope="package"), pytest.mark.timeout(900)]


async def test_a_store_empties_itself_for_the_weights_that_replace_the_old_ones(
    model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The model keeps its name and gets other weights, as when a checkpoint is replaced."""
    named, folder = ("--served-model-name", "m"), tmp_path_factory.mktemp("temp")
    other = tiny_model("llama", tmp_path_factory.mktemp("models"), num_hidden_layers=3)
    flags = {"store-0": ("--kvtransfer-bytes", "16MiB")}
    workers = ("mixed-0", "store-0")
    async with real_cluster(
        model, folder, workers, *FLAGS, *named, routers=((*ALL, *named),), flags_of=flags
    ) as cluster:

        def kv(status: Status) -> dict[str, str]:
            ready = (each.worker for each in status.workers if each.state == control_pb2.WORKER_STATE_READY)
            return {worker.worker_id: worker.fingerprint.kv for worker in ready}

        before = kv(await cluster.router.status())
        assert before["store-0"] == before["mixed-0"]
        await cluster.add_worker("mixed-1", model=other)
        both = kv(await cluster.router.until(lambda status: "mixed-1" in kv(status), "it is ready", READY_WITHIN_S))
        assert both["store-0"] == both["mixed-0"] != both["mixed-1"], (
            "while one is left, it keeps what that one computes"
        )
        await cluster["mixed-0"].kill()
        await cluster.router.until(
            lambda status: kv(status).get("store-0") == both["mixed-1"], "the store keeps the others'", READY_WITHIN_S
        )
