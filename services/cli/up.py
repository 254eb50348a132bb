"""`baton up`: a local cluster of real processes under one supervisor.

Owns: its flags, its signals and its output. Never: restarts (supervisor.py), the division of the machine (plan.py),
what the processes are (cluster.py).
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import os
import signal
import sys
from collections.abc import Sequence

from services.cli import machine
from services.cli.arguments import Parser
from services.cli.child import Lifeline
from services.cli.cluster import PROGRAM, Cluster, ClusterPlan, Worker
from services.cli.model_cache import DEFAULT_MODEL, ResolvedModel, resolve_model
from services.cli.plan import divide_cores, memory_utilization, plan_http_port, plan_metrics_ports, plan_workers
from services.core import config as configuration
from services.core.config import option, positive
from services.core.config import port as is_port

_EXIT_INTERRUPTED = 130


def _count(value: int) -> bool:
    return 0 <= value <= 256


@dataclasses.dataclass(frozen=True)
class UpConfig:
    model: str = option(DEFAULT_MODEL, "default model's name, local directory, GGUF file or hub id")
    prefill: int | None = option(None, "prefill workers (default: 1 if no worker is asked for)", check=_count)
    decode: int | None = option(None, "decode workers (default: 1 if no worker is asked for)", check=_count)
    mixed: int | None = option(None, "workers that do both (default: none)", check=_count)
    host: str = option("127.0.0.1", "address the router binds")
    port: int = option(50051, "the router's gRPC port; 0 picks a free one", check=is_port, must="must be in [0, 65535]")
    http_port: int | None = option(
        None,
        "the router's OpenAI-style HTTP port; 0 picks a free one, -1 none (default: 8000, or a free one with --port 0)",
        check=lambda value: -1 <= value <= 65535,
        must="must be in [-1, 65535]",
    )
    metrics_port: int | None = option(
        None,
        "the router's Prometheus port, from which the workers' count up; 0 picks free ones "
        "(default: 9400, or free ones with --port 0)",
        check=is_port,
        must="must be in [0, 65535]",
    )
    device: str = option("cpu", "torch device of the workers")
    dtype: str = option("auto", "type of weights and KV cache", choices=("auto", "float32", "bfloat16", "float16"))
    threads: int | None = option(
        None, "compute threads of each worker (default: the cores, divided)", check=positive, must="must be positive"
    )
    kv_blocks: int | None = option(
        None, "blocks in each pool (default: what memory allows, divided)", check=positive, must="must be positive"
    )
    transport: str = option("auto", "how KV is moved", choices=("auto", "shm", "grpc"))
    trace_file: str = option("", "append all spans to this file as OTLP JSON lines")
    drain_s: float = option(30.0, "time requests get to finish when stopping, seconds", check=lambda value: value >= 0)


def main(argv: Sequence[str], prog: str) -> int:
    parser = Parser(prog=prog, description="Starts a local cluster and keeps it running until Ctrl-C.")
    configuration.add_arguments(parser, UpConfig)
    config = configuration.load(UpConfig, parser.parse_args(argv))
    roles = plan_workers(config.prefill, config.decode, config.mixed)
    _plan_ports(config, roles)  # a wrong flag is told before a long download
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.WARNING)
    plan = make_plan(config, roles, resolve_model(config.model))
    announce(f"model        {plan.model.model_id}  ({plan.model.path})")
    try:
        return asyncio.run(supervise(plan))
    except ExceptionGroup as group:
        raise group.exceptions[0] from None  # the first that failed; the others fell with it


def make_plan(config: UpConfig, roles: Sequence[str], model: ResolvedModel) -> ClusterPlan:
    """Divides this machine as it is now among the router and workers of these roles."""
    metrics_ports, http_port = _plan_ports(config, roles)
    shares = divide_cores(machine.usable_cores(), len(roles), threads=config.threads, quota=machine.cpu_quota())
    workers = [
        Worker(f"{role}-{roles[:index].count(role)}", role, metrics_ports[1 + index], shares[index])
        for index, role in enumerate(roles)
    ]
    return ClusterPlan(
        model=model,
        host=config.host,
        port=config.port,
        router_metrics_port=metrics_ports[0],
        workers=tuple(workers),
        worker_flags=_worker_flags(config, model, len(workers)),
        trace_file=config.trace_file,
        drain_s=config.drain_s,
        http_port=http_port,
    )


def _plan_ports(config: UpConfig, roles: Sequence[str]) -> tuple[list[int], int]:
    """Metrics ports, the router's first, and the HTTP port."""
    metrics_ports = plan_metrics_ports(config.port, config.metrics_port, 1 + len(roles))
    return metrics_ports, plan_http_port(config.port, config.http_port, metrics_ports)


def _worker_flags(config: UpConfig, model: ResolvedModel, num_workers: int) -> tuple[str, ...]:
    flags = ["--device", config.device, "--dtype", config.dtype, "--transport", config.transport]
    if config.kv_blocks is not None:
        flags += ["--kv-blocks", str(config.kv_blocks)]
    elif config.device == "cpu":
        available, total = machine.memory_bytes()
        widening = 2 if config.dtype == "float32" else 1  # files usually hold 16 bits
        weights_bytes = widening * machine.directory_bytes(model.path)
        share = memory_utilization(available, total, weights_bytes, num_workers)
        flags += ["--memory-utilization", f"{share:.5f}"]
    return tuple(flags)


async def supervise(plan: ClusterPlan, program: Sequence[str] = PROGRAM) -> int:
    """Runs the cluster of children `program ROLE FLAGS`; the exit status. The first SIGINT or SIGTERM drains, the
    second kills. Raises an ExceptionGroup of what could not be started."""
    stopping = asyncio.Event()
    lifeline = Lifeline()
    loop = asyncio.get_running_loop()
    running = loop.create_task(Cluster(plan, lifeline, announce, program).run(stopping))

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
    """One line on stdout, at once. Without a reader the cluster runs on in silence."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
