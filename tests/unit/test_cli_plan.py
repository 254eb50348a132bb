"""How `baton up` divides cores, ports and memory."""

from __future__ import annotations

import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli import machine
from services.cli.model_cache import ResolvedModel
from services.cli.plan import (
    MAX_POOL_BYTES,
    MEMORY_SHARE,
    CoreShare,
    divide_cores,
    memory_utilization,
    plan_http_port,
    plan_metrics_ports,
    plan_workers,
)
from services.cli.up import UpConfig, make_plan
from services.core.errors import ConfigError

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


def test_container_limits_are_heeded(tmp_path: pathlib.Path) -> None:
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.cpu_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    assert machine.cpu_quota(tmp_path) == 1.5
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("2000\n")
    assert machine.memory_bytes(tmp_path) == (3000, 5000)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine.memory_bytes(tmp_path)[0] > 3000


def test_plan_of_a_cluster() -> None:
    config = UpConfig(prefill=2, decode=1, port=0, metrics_port=7000, kv_blocks=64, dtype="bfloat16", transport="grpc")
    plan = make_plan(config, ["prefill", "prefill", "decode"], ResolvedModel("m", pathlib.Path("/m")))
    assert [(worker.worker_id, worker.metrics_port) for worker in plan.workers] == [
        ("prefill-0", 7001),
        ("prefill-1", 7002),
        ("decode-0", 7003),
    ]
    assert plan.router_metrics_port == 7000
    flags = dict(zip(plan.worker_flags[::2], plan.worker_flags[1::2], strict=True))
    assert flags == {"--device": "cpu", "--dtype": "bfloat16", "--transport": "grpc", "--kv-blocks": "64"}


def test_pools_are_sized_by_memory_unless_told() -> None:
    plan = make_plan(UpConfig(), ["mixed"], ResolvedModel("m", pathlib.Path("/m")))
    assert 0 < float(plan.worker_flags[plan.worker_flags.index("--memory-utilization") + 1]) < 1
    assert (
        "--memory-utilization"
        not in make_plan(UpConfig(device="cuda"), ["mixed"], ResolvedModel("m", pathlib.Path("/m"))).worker_flags
    )
