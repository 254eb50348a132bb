"""Tests how `baton up` divides cores, ports and memory."""

from __future__ import annotations

import dataclasses
import pathlib
import socket
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from services.cli import machine, up
from services.cli.arguments import Parser
from services.cli.child import Ready
from services.cli.cluster import ClusterPlan, line_of, worker_flags
from services.cli.model_cache import ResolvedModel
from services.cli.plan import (
    MAX_POOL_BYTES,
    MEMORY_SHARE,
    CoreShare,
    divide_cores,
    memory_utilization,
    plan_control_port,
    plan_http_port,
    plan_metrics_ports,
    plan_workers,
    spread_devices,
)
from services.cli.up import UpConfig, make_plan
from services.core import config as configuration
from services.core.errors import ConfigError
from services.router.config import RouterConfig

GIB = 1 << 30


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "expected"),
    [
        (2, 2, [CoreShare((0,), 1, True), CoreShare((1,), 1, True)]),
        (2, 1, [CoreShare((0, 1), 2, True)]),
        (8, 3, [CoreShare((0, 1, 2), 3, True), CoreShare((3, 4, 5), 3, True), CoreShare((6, 7), 2, True)]),
        (2, 3, [CoreShare((0,), 1, False), CoreShare((1,), 1, False), CoreShare((0,), 1, False)]),
        (4, 0, []),
    ],
)
def test_even_division(num_cores: int, num_workers: int, expected: list[CoreShare]) -> None:
    assert divide_cores(range(num_cores), num_workers) == expected


@pytest.mark.parametrize(
    ("num_cores", "num_workers", "threads", "expected", "own"),
    [
        (8, 2, 3, [(0, 1, 2), (3, 4, 5)], True),
        (4, 2, 4, [(0, 1, 2, 3), (0, 1, 2, 3)], False),
        (4, 2, 3, [(0, 1, 2), (0, 2, 3)], False),
        (2, 2, 9, [(0, 1), (0, 1)], False),
        (2, 1, 3, [(0, 1)], False),
    ],
)
def test_threads_asked_for(
    num_cores: int, num_workers: int, threads: int, expected: list[tuple[int, ...]], own: bool
) -> None:
    shares = divide_cores(range(num_cores), num_workers, threads=threads)
    assert [share.cores for share in shares] == expected
    assert {(share.threads, share.own) for share in shares} == {(threads, own)}


def test_a_cpu_quota_is_not_spent_on_waiting() -> None:
    assert divide_cores(range(8), 2, quota=2.0) == [
        CoreShare((0, 1, 2, 3), 1, False),
        CoreShare((4, 5, 6, 7), 1, False),
    ]


@given(st.integers(1, 64), st.integers(1, 80), st.none() | st.integers(1, 80), st.none() | st.floats(0.1, 64))
def test_shares_are_sound(num_cores: int, num_workers: int, threads: int | None, quota: float | None) -> None:
    cores = list(range(100, 100 + num_cores))
    shares = divide_cores(cores, num_workers, threads=threads, quota=quota)
    assert len(shares) == num_workers
    for share in shares:
        assert share.cores
        assert len(set(share.cores)) == len(share.cores)
        assert set(share.cores) <= set(cores)
        assert share.threads >= 1
    if threads is None and num_workers <= num_cores:
        assert sorted(core for share in shares for core in share.cores) == cores


def test_quota_limits_threads_not_cores() -> None:
    shares = divide_cores(range(16), 2, quota=4.0)
    assert [(len(share.cores), share.threads) for share in shares] == [(8, 2), (8, 2)]


def test_no_core_is_told() -> None:
    with pytest.raises(ConfigError, match="no CPU core"):
        divide_cores([], 1)


@pytest.mark.parametrize(
    ("port", "metrics_port", "expected"),
    [
        (50051, None, [9400, 9401, 9402]),
        (0, None, [0, 0, 0]),
        (50051, 0, [0, 0, 0]),
        (0, 7000, [7000, 7001, 7002]),
        (50051, -1, [-1, -1, -1]),
    ],
)
def test_metrics_ports_count_up(port: int, metrics_port: int | None, expected: list[int]) -> None:
    assert plan_metrics_ports(port, metrics_port, 3) == expected


@pytest.mark.parametrize(
    ("port", "metrics_port", "words"), [(0, 65534, "pass 65535"), (7001, 7000, "include --port 7001")]
)
def test_metrics_ports_that_cannot_be(port: int, metrics_port: int, words: str) -> None:
    with pytest.raises(ConfigError, match=f"--metrics-port: .*{words}"):
        plan_metrics_ports(port, metrics_port, 3)


def test_the_http_port_follows_the_router() -> None:
    assert plan_http_port(50051, None, [9400]) == 8000
    assert plan_http_port(0, None, [0, 0]) == 0
    assert plan_http_port(50051, 0, [9400]) == 0
    assert plan_http_port(50051, -1, [9400]) == -1
    for port, metrics_ports in ((7000, [9400]), (50051, [6999, 7000])):
        with pytest.raises(ConfigError, match="--http-port: 7000"):
            plan_http_port(port, 7000, metrics_ports)


def test_the_control_port_follows_the_router() -> None:
    assert plan_control_port(50051, None, [8000, 9400]) == 50052
    assert plan_control_port(0, None, [0, 0]) == 0
    assert plan_control_port(50051, 0, [8000]) == 0
    for port, others in ((7000, [9400]), (50051, [7000, 9400])):
        with pytest.raises(ConfigError, match="--control-port: 7000"):
            plan_control_port(port, 7000, others)
    with pytest.raises(ConfigError, match="--control-port: 50052"):
        plan_control_port(50052, None, [])


@pytest.mark.parametrize(
    ("counts", "roles"),
    [
        ((None, None, None), ["prefill", "decode"]),
        ((2, 1, None), ["prefill", "prefill", "decode"]),
        ((None, None, 1), ["mixed"]),
        ((1, None, 1), ["prefill", "mixed"]),
    ],
)
def test_workers(counts: tuple[int | None, int | None, int | None], roles: list[str]) -> None:
    assert plan_workers(*counts) == roles


@pytest.mark.parametrize(
    ("counts", "flag"), [((1, None, None), "--decode"), ((0, 1, None), "--prefill"), ((0, 0, 0), "--decode")]
)
def test_clusters_that_cannot_serve(counts: tuple[int | None, int | None, int | None], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        plan_workers(*counts)


def test_memory_is_divided_and_bounded() -> None:
    small = memory_utilization(4 * GIB, 8 * GIB, GIB // 4, 2)
    assert small == pytest.approx(MEMORY_SHARE * 4 / 2 / 8)
    large = memory_utilization(200 * GIB, 256 * GIB, GIB, 2)
    assert large == pytest.approx((GIB + MAX_POOL_BYTES) / (256 * GIB))


def test_pools_get_what_tiers_and_stores_leave() -> None:
    share = memory_utilization(10 * GIB, 16 * GIB, GIB // 4, 2, 3 * GIB)
    assert share == pytest.approx((MEMORY_SHARE * 10 - 3) / 2 / 16)
    with pytest.raises(ConfigError, match=r"--kv-host-bytes, --kvtransfer-bytes: .*7\.0 GiB.*10\.0 GiB.*2 workers"):
        memory_utilization(10 * GIB, 16 * GIB, GIB // 4, 2, 7 * GIB)
    with pytest.raises(ConfigError, match="weights"):
        memory_utilization(10 * GIB, 16 * GIB, 2 * GIB, 2, 4 * GIB)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kv_blocks", [0, 64])
def test_more_memory_for_tiers_and_stores_than_there_is_is_refused(
    device: str, kv_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda _: 1)
    monkeypatch.setattr(machine, "memory_bytes", lambda: (32 * GIB, 64 * GIB))
    model, roles = ResolvedModel("m", pathlib.Path("/m")), ["prefill", "decode"]

    def plan(**config: Any) -> ClusterPlan:
        return make_plan(UpConfig(device=device, kv_blocks=kv_blocks, **config), roles, model)

    assert plan(kvtransfer_bytes="1TiB"), "there are no stores"
    assert plan(kv_host_bytes="4GiB", kvtransfer=2, kvtransfer_bytes="2GiB")
    for too_much in ({"kv_host_bytes": "16GiB"}, {"kvtransfer": 4, "kvtransfer_bytes": "8GiB"}):
        with pytest.raises(ConfigError, match=r"--kv-host-bytes, --kvtransfer-bytes: .*32\.0 GiB.*available"):
            plan(**too_much)


def test_plan_of_a_cluster() -> None:
    config = UpConfig(prefill=2, decode=1, port=0, metrics_port=7000, kv_blocks=64, dtype="bfloat16", transport="grpc")
    plan = make_plan(config, ["prefill", "prefill", "decode"], ResolvedModel("m", pathlib.Path("/m")))
    assert [(worker.worker_id, worker.metrics_port) for worker in plan.workers] == [
        ("prefill-0", 7001),
        ("prefill-1", 7002),
        ("decode-0", 7003),
    ]
    assert plan.router_metrics_port == 7000
    assert sorted(plan.worker_flags) == ["--dtype=bfloat16", "--kv-blocks=64", "--transport=grpc"]
    assert {worker.device for worker in plan.workers} == {"cpu"}


@pytest.mark.parametrize("flag", ["--policy=robin", "--policy-weight=near=1", "--policy-file=/none", "--tool-parser=x"])
def test_a_wrong_policy_is_reported_before_anything_is_downloaded(flag: str) -> None:
    with pytest.raises(ConfigError, match=flag.partition("=")[0] + ": "):
        up.main([flag, "--port", "0"], "baton up")


def test_every_port_that_a_service_can_do_without_can_be_left_out_of_a_cluster() -> None:
    """For the flags that both have, `baton up` takes the same values as `baton router`."""
    for name in {field.name for field in dataclasses.fields(UpConfig)} & {"port", "http_port", "metrics_port"}:
        flag = "--" + name.replace("_", "-")
        for value in (-2, -1, 0, 65535, 65536):
            taken = [_takes(kind, f"{flag}={value}") for kind in (RouterConfig, UpConfig)]
            assert taken[0] == taken[1], f"{flag} {value}"


def _takes(kind: type, flag: str) -> bool:
    parser = Parser(prog="baton")
    configuration.add_arguments(parser, kind)
    try:
        configuration.load(kind, parser.parse_args([flag]), {})
    except ConfigError:
        return False
    return True


def test_a_process_without_metrics_is_announced_without_their_address() -> None:
    ready = Ready(port=7, metrics_port=0, pid=3)
    assert line_of("router", "127.0.0.1", ready) == "router       127.0.0.1:7            pid 3"
    assert "metrics http://127.0.0.1:9/metrics" in line_of("router", "127.0.0.1", Ready(port=7, metrics_port=9, pid=3))


def test_pools_are_sized_by_memory_unless_told() -> None:
    model = ResolvedModel("m", pathlib.Path("/m"))
    plan = make_plan(UpConfig(), ["mixed"], model)
    assert 0 < (plan.workers[0].memory_utilization or 0) < 1
    assert make_plan(UpConfig(kv_blocks=64), ["mixed"], model).workers[0].memory_utilization is None


@pytest.mark.parametrize(
    ("device", "num_gpus", "num_workers", "expected"),
    [
        ("cuda", 2, 2, [("cuda:0", 0.9), ("cuda:1", 0.9)]),
        ("cuda", 1, 2, [("cuda:0", 0.45), ("cuda:0", 0.45)]),
        ("cuda", 2, 3, [("cuda:0", 0.45), ("cuda:1", 0.9), ("cuda:0", 0.45)]),
        ("cuda", 8, 3, [("cuda:0", 0.9), ("cuda:1", 0.9), ("cuda:2", 0.9)]),
        ("cuda:1", 2, 2, [("cuda:1", 0.45), ("cuda:1", 0.45)]),
        ("cuda:0", 1, 1, [("cuda:0", 0.9)]),
    ],
)
def test_workers_are_spread_over_all_gpus_and_share_what_they_share(
    device: str, num_gpus: int, num_workers: int, expected: list[tuple[str, float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda _: num_gpus)
    plan = make_plan(UpConfig(device=device), ["mixed"] * num_workers, ResolvedModel("m", pathlib.Path("/m")))
    assert [(worker.device, pytest.approx(worker.memory_utilization)) for worker in plan.workers] == expected
    commands = [worker_flags(worker) for worker in plan.workers]
    assert [flags[flags.index("--device") + 1] for flags in commands] == [name for name, _ in expected]
    assert [float(flags[flags.index("--memory-utilization") + 1]) for flags in commands] == [
        pytest.approx(share, abs=1e-5) for _, share in expected
    ]


@given(st.integers(1, 16), st.integers(1, 64))
def test_no_gpu_is_promised_twice(num_gpus: int, num_workers: int) -> None:
    placed = spread_devices("cuda", num_workers, num_gpus)
    per_gpu = Counter(device for device, _ in placed)
    assert max(per_gpu.values()) - min(per_gpu.values()) <= 1
    assert len(per_gpu) == min(num_gpus, num_workers)
    for device in per_gpu:
        assert sum(share for name, share in placed if name == device) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("device", "num_gpus"), [("cuda", 0), ("cuda:2", 2), ("cuda:0", 0), ("cuda:x", 2), ("cuda:-1", 2)]
)
def test_gpus_that_are_not_there_are_told(device: str, num_gpus: int) -> None:
    with pytest.raises(ConfigError, match="--device"):
        spread_devices(device, 1, num_gpus)


def test_pools_of_a_given_size_are_divided_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "num_gpus", lambda _: 1)
    config = UpConfig(device="cuda", kv_blocks=64)
    plan = make_plan(config, ["prefill", "decode"], ResolvedModel("m", pathlib.Path("/m")))
    assert [(worker.device, worker.memory_utilization) for worker in plan.workers] == [("cuda:0", None)] * 2


@pytest.mark.process
def test_gpus_are_counted_by_torch_in_another_process() -> None:
    """The supervisor itself stays without torch."""
    assert machine.num_gpus() == torch.cuda.device_count()


@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_a_gpu_that_is_not_there_is_told_before_anything_long(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told before a model is fetched."""
    monkeypatch.setattr(machine, "num_gpus", lambda _: 0)
    with pytest.raises(ConfigError, match=r"^--device: "):
        up.main(["--port", "0", "--metrics-port", "-1", "--device", device, "--model", "/no/such/model"], "baton up")


@pytest.mark.parametrize("flag", ["--port", "--http-port", "--control-port", "--metrics-port"])
def test_a_port_that_is_taken_is_told_before_anything_long(flag: str) -> None:
    """It is told, with what to do, before a download, a timing and the start of any process."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        flags = [flag, str(port)] if flag == "--port" else ["--port", "0", flag, str(port)]
        with pytest.raises(ConfigError, match=f"^{flag}: cannot listen on 127.0.0.1:{port}: .*; 0 picks a free one"):
            up.main([*flags, "--model", "/no/such/model"], "baton up")
