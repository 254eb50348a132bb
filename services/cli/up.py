"""Runs `baton up`: a local cluster of real processes under one supervisor.

Owns: its flags, its signals, and which form its output has. Never: restarts (supervisor.py), the division of the
machine (plan.py), what the processes are (cluster.py), what the output looks like (cluster_output.py, start_screen.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import pathlib
import signal
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

from services.cli import machine
from services.cli.arguments import DEFAULT_CONTROL_TARGET, DEFAULT_TARGET, Parser, command_line
from services.cli.child import Lifeline
from services.cli.cluster import (
    CONTROL_HOST,
    PROGRAM,
    WORKER_HOST,
    ClusterPlan,
    LocalCluster,
    PlannedStore,
    PlannedWorker,
)
from services.cli.cluster_output import ClusterOutput, PlainOutput, is_screen_wanted
from services.cli.cluster_status import ClusterStatus, read_status
from services.cli.engine_setup import choose_types, demand_engine, demand_one_gpu_each
from services.cli.model_cache import ResolvedModel
from services.cli.model_names import demand_weights, resolve_model
from services.cli.plan import (
    demand_memory,
    divide_cores,
    memory_utilization,
    plan_control_port,
    plan_http_port,
    plan_metrics_ports,
    plan_workers,
    spread_devices,
)
from services.cli.readiness import local_address
from services.cli.tables import size
from services.core import config as configuration
from services.core.config import DEFAULT_PORT, option, port_option
from services.core.container import cpu_quota
from services.core.errors import ConfigError
from services.core.lifecycle import Lifecycle
from services.core.listening import require_free
from services.core.printable import printable
from services.core.process_config import DrainConfig, ModelChoice, TraceConfig
from services.core.sizes import parse_size
from services.router.config import PublicConfig, RouterConfig, demand_private_keys
from services.router.placement_config import RoutingConfig
from services.router.text.output.choice import ParserChoice
from services.router.text.output.families import REASONING_PARSERS, TOOL_PARSERS
from services.rpc.certificates import Certificates, TlsFlags
from services.rpc.membership import TOKEN, ClusterAuthConfig
from services.store.config import StoreConfig, StoreMemory
from services.worker.config import ComputeConfig, TransferConfig, WorkerConfig
from services.worker.engine_choice import EngineChoice
from services.worker.tier_config import TierConfig

logger = logging.getLogger(__name__)

_EXIT_INTERRUPTED = 130

_COUNTS = "must be in [0, 256]"


def _count(value: int) -> bool:
    return 0 <= value <= 256


@dataclasses.dataclass(frozen=True)
class ClusterConfig:
    """Keeps the flags of the cluster itself, and those that mean something else to a single process."""

    prefill: int | None = option(
        None, "prefill workers (default: 1 if no worker is asked for)", check=_count, must=_COUNTS
    )
    decode: int | None = option(
        None, "decode workers (default: 1 if no worker is asked for)", check=_count, must=_COUNTS
    )
    mixed: int | None = option(None, "workers that do both (default: none)", check=_count, must=_COUNTS)
    kvtransfer: int = option(
        0, "stores: processes that keep KV for the workers in host memory", check=_count, must=_COUNTS
    )
    host: str = option("127.0.0.1", "address the router binds")
    port: int = port_option(DEFAULT_PORT, "the router's gRPC port; 0 picks a free one")
    http_port: int | None = option(
        None,
        "the router's OpenAI-style HTTP port; 0 picks a free one, -1 none (default: 8000, or a free one with --port 0)",
        check=lambda value: -1 <= value <= 65535,
        must="must be in [-1, 65535]",
    )
    control_port: int | None = port_option(
        None,
        "the router's port for workers, baton status and baton drain, on this machine only; 0 picks a free one "
        "(default: 50052, or a free one with --port 0)",
    )
    metrics_port: int | None = option(
        None,
        "the router's Prometheus port, from which the workers' count up; 0 picks free ones, -1 none "
        "(default: 9400, or free ones with --port 0)",
        check=lambda value: -1 <= value <= 65535,
        must="must be in [-1, 65535]",
    )
    tls_dir: str = option(
        "",
        "folder with ca.pem, and NAME.pem and NAME.key for router, worker, store and operator, as baton certs dev "
        "makes it: all processes speak TLS (default: none does)",
    )
    log_level: str | None = option(
        None,
        "write the logs of all processes to stderr, from this level on (default: info; on a terminal the start is "
        "drawn, logs go to a file, and warnings are shown)",
        choices=("debug", "info", "warning", "error"),
    )


@dataclasses.dataclass(frozen=True)
class UpConfig(
    TierConfig,
    StoreMemory,
    TransferConfig,
    EngineChoice,
    ComputeConfig,
    PublicConfig,
    RoutingConfig,
    DrainConfig,
    TraceConfig,
    ClusterAuthConfig,
    ClusterConfig,
    ModelChoice,
):
    """Keeps the configuration of `baton up`: the cluster's, and the options that its processes get as they are."""


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Starts a local cluster and keeps it running until Ctrl-C.")
    configuration.add_arguments(parser, UpConfig)
    parser.add_argument("--lifeline-fd", type=int, help=argparse.SUPPRESS)  # by `baton run`, scripts/demo.py
    arguments = parser.parse_args(argv)
    Lifecycle(lifeline_fd=arguments.lifeline_fd).watch_lifeline()
    config = configuration.load(UpConfig, arguments)
    roles = plan_workers(config.prefill, config.decode, config.mixed)
    if config.tenants:
        demand_private_keys(config.host, config.allow_plain_token or _has_public_tls(config))
    certificates = _operator_certificates(config)  # what is wrong with a flag is reported before a long download
    token = config.token()
    _demand_alone(config, roles, token, certificates)
    _require_writable(config.trace_file)
    config.selection()
    ParserChoice("--tool-parser", config.tool_parser, TOOL_PARSERS)
    ParserChoice("--reasoning-parser", config.reasoning_parser, REASONING_PARSERS)
    config = dataclasses.replace(config, vllm_python=demand_engine(config))
    demand_one_gpu_each(config)
    machine.demand_device(config.device, config.vllm_python)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    began_s = time.monotonic()
    model = resolve_model(config.model)
    demand_weights(model)
    with _output(config, model, token, certificates) as output:
        output.fact(f"model        {model.model_id}  ({model.path})")
        output.done("model", f"{model.model_id}  ({model.path})", time.monotonic() - began_s)
        plan = make_plan(_with_dtype(config, model, output), roles, model)
        plan = dataclasses.replace(plan, certificates=certificates)
        if kept_bytes := _kept_bytes(config, len(roles)):
            output.fact(f"{'memory':<12} {size(kept_bytes)} for host tiers and stores, beside the pools")
        try:
            return asyncio.run(supervise(plan, output=output))
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # the first that failed; the others failed because of it


@contextlib.contextmanager
def _output(
    config: UpConfig, model: ResolvedModel, token: str | None, certificates: Certificates | None
) -> Iterator[ClusterOutput]:
    if is_screen_wanted(config.log_level):
        from services.cli.run_log import RunLog
        from services.cli.start_screen import StartScreen

        # Until the event loop handles it: who ends by it must give the terminal back as it was.
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
        with StartScreen(
            RunLog(),
            token,
            host=config.host,
            model_id=model.model_id,
            drain_s=config.drain_s,
            has_console=config.serves_console(config.host),
            needs_key=bool(config.tenants),
            console_token_file=config.console_token_file,
            cluster_token_file=config.cluster_token_file,
            certificates=certificates,
            tls_dir=config.tls_dir,
            has_public_tls=_has_public_tls(config),
        ) as screen:
            yield screen
    else:
        yield PlainOutput()


def _with_dtype(config: UpConfig, model: ResolvedModel, output: ClusterOutput) -> UpConfig:
    """Returns the configuration with types that are chosen here, so that all workers have the same."""
    output.begun("dtype")
    choice = choose_types(config, model.path)
    if choice.reason:
        output.fact(f"dtype        {choice.dtype}  ({choice.reason})")
    weights = f" over {choice.quantization} weights" if choice.quantization != "none" else ""
    output.done("dtype", (choice.dtype if choice.dtype != "auto" else "as saved") + weights)
    return dataclasses.replace(config, dtype=choice.dtype, quantization=choice.quantization)


def make_plan(config: UpConfig, roles: Sequence[str], model: ResolvedModel) -> ClusterPlan:
    """Returns the plan that divides this machine, as it is now, among the router and workers of these roles."""
    metrics_ports, http_port, control_port = _plan_ports(config, roles)
    shares = divide_cores(machine.usable_cores(), len(roles), threads=config.threads or None, quota=cpu_quota())
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
        stores=tuple(
            PlannedStore(f"store-{index}", metrics_ports[1 + len(roles) + index]) for index in range(config.kvtransfer)
        ),
        store_flags=_flags(config, StoreConfig),
        worker_flags=_flags(config, WorkerConfig),
        router_flags=_flags(config, RouterConfig),
        drain_s=config.drain_s,
        http_port=http_port,
        control_port=control_port,
        tls_dir=config.tls_dir,
        has_public_tls=_has_public_tls(config),
    )


def _has_public_tls(config: UpConfig) -> bool:
    return bool(config.tls_dir or config.public_tls_cert)


def _operator_certificates(config: UpConfig) -> Certificates | None:
    """Returns the certificates with which the cluster is asked for its state. Raises ConfigError."""
    if not config.tls_dir:
        if config.cluster_auth != TOKEN:
            raise ConfigError(f"--cluster-auth: {config.cluster_auth} needs certificates: give --tls-dir")
        return None
    folder = pathlib.Path(config.tls_dir)
    if not folder.is_dir():
        raise ConfigError(f"--tls-dir: {printable(config.tls_dir)} is no folder; baton certs dev makes one")
    return Certificates(
        *(str(folder / name) for name in ("operator.pem", "operator.key", "ca.pem")),
        flags=TlsFlags("--tls-dir", "--tls-dir", "--tls-dir"),
    )


def _plan_ports(config: UpConfig, roles: Sequence[str]) -> tuple[list[int], int, int]:
    """Returns the metrics ports (the router's first), the HTTP port and the control port."""
    metrics_ports = plan_metrics_ports(config.port, config.metrics_port, 1 + len(roles) + config.kvtransfer)
    http_port = plan_http_port(config.port, config.http_port, metrics_ports)
    return metrics_ports, http_port, plan_control_port(config.port, config.control_port, (http_port, *metrics_ports))


def _demand_alone(config: UpConfig, roles: Sequence[str], token: str | None, certificates: Certificates | None) -> None:
    """Raises ConfigError if a port is taken: by a cluster that runs here, it says how to use it, or to end it."""
    metrics_ports, http_port, control_port = _plan_ports(config, roles)
    wanted = [("--port", config.host, config.port), ("--http-port", config.host, http_port)]
    wanted += [("--control-port", CONTROL_HOST, control_port)]
    wanted += [
        ("--metrics-port", WORKER_HOST if index else config.host, port) for index, port in enumerate(metrics_ports)
    ]
    for flag, host, port in wanted:
        if port <= 0:
            continue
        try:
            require_free(flag, host, port)  # one that is taken later is told by the process that wants it
        except ConfigError as taken:
            control = local_address(CONTROL_HOST, control_port)
            running = asyncio.run(read_status(control, token, certificates)) if control_port else None
            if running is None or port not in (running.port, running.http_port, control_port):
                raise
            raise ConfigError(_how_to_use(running, local_address(config.host, running.port), control)) from taken


def _how_to_use(running: ClusterStatus, target: str, control: str) -> str:
    return (
        f"a cluster runs here already, as pid {_supervisor_of(running.router_pid)}. To talk to it: "
        f"{command_line('chat', target, DEFAULT_TARGET)}; to see it: "
        f"{command_line('status', control, DEFAULT_CONTROL_TARGET)}; to stop it: Ctrl-C there, or kill that pid; "
        f"to start another beside it: baton up --port 0"
    )


def _supervisor_of(router_pid: int) -> int:
    """Returns the `baton up` that keeps the router running; the router itself if nobody does."""
    try:
        parent = psutil.Process(router_pid).parent()
        return parent.pid if parent is not None and "up" in parent.cmdline() else router_pid
    except psutil.Error:  # another user's, or it has ended
        return router_pid


def _require_writable(trace_file: str) -> None:
    if trace_file:
        try:
            os.close(os.open(trace_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600))
        except OSError as error:
            raise ConfigError(f"--trace-file: {printable(trace_file)}: {error.strerror}") from error


def _flags(config: UpConfig, of: type) -> tuple[str, ...]:
    """Returns the flags of a process that is configured by `of`: its options as they are here."""
    flags = configuration.flags(config, of)
    return (*flags, f"--log-level={config.log_level}") if config.log_level is not None else tuple(flags)


def _place(config: UpConfig, model: ResolvedModel, num_workers: int) -> list[tuple[str, float | None]]:
    """Returns (device, share of its memory) for each worker; no share where the pools have a given size."""
    placed: list[tuple[str, float | None]]
    available, total = machine.memory_bytes()
    kept_bytes = _kept_bytes(config, num_workers)
    demand_memory(available, kept_bytes)
    kind = config.device.partition(":")[0]
    if kind == "cuda":
        placed = [*spread_devices(config.device, num_workers, machine.num_gpus(config.vllm_python))]
    elif kind != "cpu":
        placed = [(config.device, None)] * num_workers
    else:
        widening = 2 if config.dtype == "float32" else 1  # files usually hold 16 bits
        weights_bytes = widening * machine.directory_bytes(model.path)
        share = memory_utilization(available, total, weights_bytes, num_workers, kept_bytes)
        placed = [(config.device, share)] * num_workers
    return [(device, None) for device, _ in placed] if config.kv_blocks else placed


def _kept_bytes(config: UpConfig, num_workers: int) -> int:
    """Returns the bytes of host memory that the workers' tiers and the stores may take."""
    tier_bytes = parse_size(config.kv_host_bytes) if config.kv_host_bytes else 0
    return num_workers * tier_bytes + config.kvtransfer * parse_size(config.kvtransfer_bytes)


async def supervise(plan: ClusterPlan, program: Sequence[str] = PROGRAM, output: ClusterOutput | None = None) -> int:
    """Runs the cluster of children `program ROLE FLAGS` and returns the exit status. `output` is plain by default.

    The first SIGINT or SIGTERM drains, the second kills. Raises an ExceptionGroup of what could not be started.
    """
    output = output or PlainOutput()
    stopping = asyncio.Event()
    lifeline = Lifeline()
    loop = asyncio.get_running_loop()
    running = loop.create_task(LocalCluster(plan, lifeline, output, program).run(stopping))
    following = loop.create_task(output.follow(), name="output")

    def on_signal(number: signal.Signals) -> None:
        if stopping.is_set():
            running.cancel()
        else:
            output.stopping(number.name)
            stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal, number)
    last, status = "stopped", 0
    try:
        await running
    except asyncio.CancelledError:
        last, status = "stopped at once", _EXIT_INTERRUPTED
    finally:
        lifeline.close()
        await _end(following)
    output.stopped(last)
    return status


async def _end(following: asyncio.Task[None]) -> None:
    """Ends what showed the cluster. If it had failed, the cluster has run on, and that is told."""
    following.cancel()
    try:
        await following
    except asyncio.CancelledError:
        pass
    except Exception:
        logger.warning("what shows the cluster has failed", exc_info=True)
