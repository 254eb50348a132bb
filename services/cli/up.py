"""Runs `baton up`: a local cluster of real processes under one supervisor.

Owns: its flags, its signals and its output. Never: restarts (supervisor.py), the division of the machine (plan.py),
what the processes are (cluster.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from services.cli import machine
from services.cli.arguments import Parser
from services.cli.child import Lifeline
from services.cli.cluster import CONTROL_HOST, PROGRAM, WORKER_HOST, ClusterPlan, LocalCluster, PlannedWorker
from services.cli.dtype_choice import choose_dtype
from services.cli.model_cache import DEFAULT_MODEL, ResolvedModel
from services.cli.model_names import demand_weights, resolve_model
from services.cli.plan import (
    divide_cores,
    memory_utilization,
    plan_control_port,
    plan_http_port,
    plan_metrics_ports,
    plan_workers,
    spread_devices,
)
from services.cli.worker_packages import demand_torch
from services.core import config as configuration
from services.core.cluster_token import FILE_HELP, cluster_token
from services.core.config import (
    A_DEVICE,
    A_DURATION_OR_ZERO,
    DTYPE_HELP,
    DTYPES,
    FEWEST_BLOCKS,
    KV_DTYPE_HELP,
    KV_DTYPES,
    QUANTIZATION,
    QUANTIZATION_HELP,
    duration_or_zero,
    option,
)
from services.core.config import device as is_device
from services.core.config import port as is_port
from services.core.errors import ConfigError
from services.core.listening import require_free
from services.core.printable import printable
from services.router.policy import DEFAULT_SPLIT, Split
from services.router.policy.long_prompts import ISOLATIONS, LongPromptConfig
from services.router.policy.outliers import OutlierConfig, is_slow_factor
from services.router.policy.presets import DEFAULT, PRESETS
from services.router.policy_file import read_selection

_EXIT_INTERRUPTED = 130

_COUNTS = "must be in [0, 256]"


def _count(value: int) -> bool:
    return 0 <= value <= 256


@dataclasses.dataclass(frozen=True)
class UpConfig:
    model: str = option(DEFAULT_MODEL, "default model's name, local directory, GGUF file or hub id")
    prefill: int | None = option(
        None, "prefill workers (default: 1 if no worker is asked for)", check=_count, must=_COUNTS
    )
    decode: int | None = option(
        None, "decode workers (default: 1 if no worker is asked for)", check=_count, must=_COUNTS
    )
    mixed: int | None = option(None, "workers that do both (default: none)", check=_count, must=_COUNTS)
    host: str = option("127.0.0.1", "address the router binds")
    port: int = option(50051, "the router's gRPC port; 0 picks a free one", check=is_port, must="must be in [0, 65535]")
    http_port: int | None = option(
        None,
        "the router's OpenAI-style HTTP port; 0 picks a free one, -1 none (default: 8000, or a free one with --port 0)",
        check=lambda value: -1 <= value <= 65535,
        must="must be in [-1, 65535]",
    )
    control_port: int | None = option(
        None,
        "the router's port for workers, baton status and baton drain, on this machine only; 0 picks a free one "
        "(default: 50052, or a free one with --port 0)",
        check=is_port,
        must="must be in [0, 65535]",
    )
    cluster_token_file: str = option("", FILE_HELP)
    metrics_port: int | None = option(
        None,
        "the router's Prometheus port, from which the workers' count up; 0 picks free ones, -1 none "
        "(default: 9400, or free ones with --port 0)",
        check=lambda value: -1 <= value <= 65535,
        must="must be in [-1, 65535]",
    )
    device: str = option(
        "cpu",
        "device of the workers: cpu; cuda spreads them over all GPUs, cuda:1 is that one",
        check=is_device,
        must=A_DEVICE,
    )
    dtype: str = option("auto", DTYPE_HELP, choices=DTYPES)
    kv_dtype: str = option("auto", KV_DTYPE_HELP, choices=KV_DTYPES)
    quantization: str = option("auto", QUANTIZATION_HELP, choices=QUANTIZATION)
    threads: int | None = option(
        None,
        "compute threads of each worker (default: the cores, divided)",
        check=lambda value: 1 <= value <= 1024,
        must="must be in [1, 1024]",
    )
    kv_blocks: int | None = option(
        None,
        "blocks in each pool (default: what memory allows, divided)",
        check=lambda blocks: blocks >= FEWEST_BLOCKS,
        must=f"must be at least {FEWEST_BLOCKS}",
    )
    transport: str = option("auto", "how KV is moved", choices=("auto", "shm", "grpc"))
    policy: tuple[str, ...] = option(
        (), f"how the router places requests: {', '.join(PRESETS)}; repeatable as MODEL=NAME (default: {DEFAULT})"
    )
    policy_file: str = option("", "TOML file with the policies and weights of models; --policy comes before it")
    policy_weight: tuple[str, ...] = option((), "changes or adds a term of placement, PHASE.TERM=W; repeatable")
    split: str = option(
        DEFAULT_SPLIT.value,
        "which prompts run apart from their decodes: where it pays, all, or none",
        choices=tuple(split.value for split in Split),
    )
    isolate_long_prompts: str = option(
        LongPromptConfig.isolation, "keep long prompts off some of the prefill workers", choices=ISOLATIONS
    )
    slow_factor: float = option(
        OutlierConfig.slow_factor,
        "eject workers whose steps take this many times the median of their peers'; 0: never",
        check=is_slow_factor,
        must="must be 0, or above 1 and at most 1000",
    )
    trace_file: str = option("", "append all spans to this file as OTLP JSON lines")
    drain_s: float = option(
        30.0, "time requests get to finish when stopping, seconds", check=duration_or_zero, must=A_DURATION_OR_ZERO
    )


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Starts a local cluster and keeps it running until Ctrl-C.")
    configuration.add_arguments(parser, UpConfig)
    config = configuration.load(UpConfig, parser.parse_args(argv))
    roles = plan_workers(config.prefill, config.decode, config.mixed)
    _require_free(config, *_plan_ports(config, roles))  # a wrong flag is reported before a long download
    cluster_token(config.cluster_token_file)  # and so is a token file that must not be used
    _require_writable(config.trace_file)
    read_selection(config.policy, config.policy_weight, config.policy_file)
    demand_torch("a worker")
    machine.demand_device(config.device)
    configuration.demand_kv_dtype(config.kv_dtype, config.device)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    model = resolve_model(config.model)
    demand_weights(model)
    announce(f"model        {model.model_id}  ({model.path})")
    # Chosen here, so that all workers have the same.
    choice = choose_dtype(
        config.dtype,
        config.device,
        model.path,
        config.quantization,
        kv_dtype=config.kv_dtype,
        tell=lambda line: announce(f"{'dtype':<12} {line}"),
    )
    if choice.reason:
        announce(f"dtype        {choice.dtype}  ({choice.reason})")
    plan = make_plan(dataclasses.replace(config, dtype=choice.dtype, quantization=choice.quantization), roles, model)
    try:
        return asyncio.run(supervise(plan))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first that failed; the others failed because of it


def make_plan(config: UpConfig, roles: Sequence[str], model: ResolvedModel) -> ClusterPlan:
    """Returns the plan that divides this machine, as it is now, among the router and workers of these roles."""
    metrics_ports, http_port, control_port = _plan_ports(config, roles)
    shares = divide_cores(machine.usable_cores(), len(roles), threads=config.threads, quota=machine.cpu_quota())
    workers = [
        PlannedWorker(
            f"{role}-{roles[:index].count(role)}", role, metrics_ports[1 + index], shares[index], device, memory
        )
        for index, (role, (device, memory)) in enumerate(zip(roles, _place(config, model, len(roles)), strict=True))
    ]
    return ClusterPlan(
        model=model,
        host=config.host,
        port=config.port,
        router_metrics_port=metrics_ports[0],
        workers=tuple(workers),
        worker_flags=_worker_flags(config),
        router_flags=_router_flags(config),
        trace_file=config.trace_file,
        drain_s=config.drain_s,
        http_port=http_port,
        control_port=control_port,
        cluster_token_file=config.cluster_token_file,
    )


def _plan_ports(config: UpConfig, roles: Sequence[str]) -> tuple[list[int], int, int]:
    """Returns the metrics ports (the router's first), the HTTP port and the control port."""
    metrics_ports = plan_metrics_ports(config.port, config.metrics_port, 1 + len(roles))
    http_port = plan_http_port(config.port, config.http_port, metrics_ports)
    return metrics_ports, http_port, plan_control_port(config.port, config.control_port, (http_port, *metrics_ports))


def _require_free(config: UpConfig, metrics_ports: Sequence[int], http_port: int, control_port: int) -> None:
    """Raises ConfigError if a port is taken now. One that is taken later is told by the process that wants it."""
    wanted = [("--port", config.host, config.port), ("--http-port", config.host, http_port)]
    wanted += [("--control-port", CONTROL_HOST, control_port)]
    wanted += [
        ("--metrics-port", WORKER_HOST if index else config.host, port) for index, port in enumerate(metrics_ports)
    ]
    for flag, host, port in wanted:
        if port > 0:
            require_free(flag, host, port)


def _require_writable(trace_file: str) -> None:
    if trace_file:
        try:
            open(trace_file, "ab").close()
        except OSError as error:
            raise ConfigError(f"--trace-file: {printable(trace_file)}: {error.strerror}") from error


def _worker_flags(config: UpConfig) -> tuple[str, ...]:
    flags = ["--dtype", config.dtype, "--kv-dtype", config.kv_dtype, "--quantization", config.quantization]
    flags += ["--transport", config.transport]
    if config.kv_blocks is not None:
        flags += ["--kv-blocks", str(config.kv_blocks)]
    return tuple(flags)


def _router_flags(config: UpConfig) -> tuple[str, ...]:
    flags = [  # even the defaults: the router would look at the environment
        f"--split={config.split}",
        f"--isolate-long-prompts={config.isolate_long_prompts}",
        f"--slow-factor={config.slow_factor:g}",
    ]
    flags += [f"--policy={policy}" for policy in config.policy]
    flags += [f"--policy-weight={weight}" for weight in config.policy_weight]
    if config.policy_file:
        flags += [f"--policy-file={pathlib.Path(config.policy_file).absolute()}"]
    return tuple(flags)


def _place(config: UpConfig, model: ResolvedModel, num_workers: int) -> list[tuple[str, float | None]]:
    """Returns (device, share of its memory) for each worker; no share where the pools have a given size."""
    placed: list[tuple[str, float | None]]
    kind = config.device.partition(":")[0]
    if kind == "cuda":
        placed = [*spread_devices(config.device, num_workers, machine.num_gpus())]
    elif kind != "cpu":
        placed = [(config.device, None)] * num_workers
    else:
        available, total = machine.memory_bytes()
        widening = 2 if config.dtype == "float32" else 1  # files usually hold 16 bits
        weights_bytes = widening * machine.directory_bytes(model.path)
        placed = [(config.device, memory_utilization(available, total, weights_bytes, num_workers))] * num_workers
    return placed if config.kv_blocks is None else [(device, None) for device, _ in placed]


async def supervise(plan: ClusterPlan, program: Sequence[str] = PROGRAM) -> int:
    """Runs the cluster of children `program ROLE FLAGS` and returns the exit status.

    The first SIGINT or SIGTERM drains, the second kills. Raises an ExceptionGroup of what could not be started.
    """
    stopping = asyncio.Event()
    lifeline = Lifeline()
    loop = asyncio.get_running_loop()
    running = loop.create_task(LocalCluster(plan, lifeline, announce, program).run(stopping))

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            running.cancel()
        else:
            announce(f"stopping ({number.name}); once more to stop at once")
            stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    try:
        await running
    except asyncio.CancelledError:
        announce("stopped at once")
        return _EXIT_INTERRUPTED
    finally:
        lifeline.close()
    announce("stopped")
    return 0


def announce(line: str) -> None:
    """Prints one line on stdout at once. If its reader has gone, the cluster runs on without output."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
