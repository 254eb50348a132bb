"""Tests that one environment can be that of a whole cluster: no variable means one thing here and another there."""

from __future__ import annotations

import argparse

from services.core.config import load
from services.router.config import RouterConfig
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig

CLUSTER = {
    "BATON_MODEL": "/models/a-folder",
    "BATON_SERVED_MODEL_NAME": "chat",
    "BATON_KVTRANSFER_BYTES": "8GiB",
    "BATON_ROUTER": "router:50052",
}


def test_a_store_keeps_the_model_by_the_name_under_which_workers_serve_it() -> None:
    """Its model is a name: the place of the workers' model, in the same environment, must not be taken for one."""
    store = load(StoreConfig, argparse.Namespace(), CLUSTER)
    worker = load(WorkerConfig, argparse.Namespace(), CLUSTER)
    router = load(RouterConfig, argparse.Namespace(), CLUSTER)
    assert store.served_model_name == worker.served_model_name == router.served_model_name == "chat"
    assert worker.model == router.model == "/models/a-folder"
    assert store.kvtransfer_bytes == "8GiB"
    assert "model" not in vars(store), "BATON_MODEL would be read as the name of a served model"
    assert "bytes" not in vars(store), "BATON_BYTES says nothing of what it is for"
