"""Tests what `baton up` tells stores, and workers of their tiers."""

from __future__ import annotations

import pathlib

import pytest

from services.cli.arguments import Parser
from services.cli.child import Lifeline
from services.cli.cluster import LocalCluster
from services.cli.cluster_output import PlainOutput
from services.cli.model_cache import ResolvedModel
from services.cli.up import UpConfig, make_plan
from services.core import config as configuration
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig
from services.worker.tier_setup import tiers_of
from tests.support.kv_harness import LAYOUT


@pytest.mark.parametrize("from_environment", [False, True])
def test_every_worker_gets_the_tiers_and_a_file_of_its_own(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, from_environment: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    backend = "redis://:secret@localhost:6379/0"
    environ = {"BATON_KV_BACKEND": backend} if from_environment else {}
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    config = UpConfig(
        port=0, control_port=7009, kv_host_bytes="1MiB", kv_disk="kv", kv_disk_bytes="2GiB", kv_backend=backend
    )
    plan = make_plan(config, ["prefill", "decode"], ResolvedModel("m", pathlib.Path("/m")))
    lifeline = Lifeline()
    cluster = LocalCluster(plan, lifeline, PlainOutput())
    loaded = []
    for worker in plan.workers:
        command = cluster._worker_command(worker)
        assert (f"--kv-backend={backend}" in command) is not from_environment, (
            "a password is not shown to others without need"
        )
        parser = Parser(prog="baton worker")
        configuration.add_arguments(parser, WorkerConfig)
        flags, _ = parser.parse_known_args(command[command.index(worker.role) + 1 :])
        loaded.append(configuration.load(WorkerConfig, flags, environ))
    lifeline.close()
    for each in loaded:
        assert (each.kv_host_bytes, each.kv_disk_bytes, each.kv_backend) == ("1MiB", "2GiB", backend)
        assert each.kv_disk == "kv", "the workers have the same working directory"
        for tier in tiers_of(each, LAYOUT, each.worker_id):
            tier.close()
    assert len(list((tmp_path / "kv").iterdir())) == 2


def test_stores_of_a_cluster() -> None:
    model = ResolvedModel("m", pathlib.Path("/m"))
    ports: dict[str, int] = {"port": 0, "control_port": 7009, "metrics_port": 7000}
    config = UpConfig(**ports, kvtransfer=2, kvtransfer_bytes="1GiB", transport="grpc", allow_plain_kv=True)
    plan = make_plan(config, ["prefill", "decode"], model)
    assert [(store.worker_id, store.metrics_port) for store in plan.stores] == [("store-0", 7003), ("store-1", 7004)]
    lifeline = Lifeline()
    command = LocalCluster(plan, lifeline, PlainOutput())._store_command(plan.stores[1])
    lifeline.close()
    parser = Parser(prog="baton kvtransfer")
    configuration.add_arguments(parser, StoreConfig)
    store = configuration.load(StoreConfig, parser.parse_known_args(command[command.index("kvtransfer") + 1 :])[0], {})
    assert (store.worker_id, store.transport, store.allow_plain_kv) == ("store-1", "grpc", True)
    assert (store.kvtransfer_bytes, store.served_model_name) == ("1GiB", "m")
    assert make_plan(UpConfig(), ["mixed"], model).stores == ()
