"""Runs one service in this process: `baton router`, `prefill`, `decode`, `mixed` and `kvtransfer`.

Owns: the process around a service: the lifeline and the cores come first, before torch is imported; then the
configuration, the model's place on disk, the loop. Never: what a service does.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import pathlib
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from services.cli.arguments import Parser
from services.core import config as configuration
from services.core.descriptors import raise_descriptor_limit
from services.core.errors import ConfigError
from services.core.lifecycle import Lifecycle, run
from services.core.listening import require_free
from services.core.start_progress import StartProgress
from services.engine.cpu.openmp import expect_own_cores, expect_shared_cores

_DESCRIPTIONS = {
    "router": "Takes requests, places both phases on workers, streams the answers. Workers join it.",
    "prefill": "Runs prompts and hands their KV over.",
    "decode": "Takes over KV and produces tokens.",
    "mixed": "Runs prompts and produces tokens over one pool.",
    "kvtransfer": "Keeps KV for workers in host memory: handoffs that no decode worker has room for.",
}


def main(argv: Sequence[str], prog: str) -> int:
    """Runs the service that `prog` ends with, until it is told to stop."""
    role = prog.rpartition(" ")[2]
    supervised, rest = _supervision().parse_known_args(argv)
    raise_descriptor_limit()
    if supervised.cores:
        os.sched_setaffinity(0, supervised.cores)
    if supervised.own_cores:
        expect_own_cores()
    else:
        expect_shared_cores()
    lifecycle = Lifecycle(ready_fd=supervised.ready_fd, lifeline_fd=supervised.lifeline_fd)
    lifecycle.watch_lifeline()
    if role == "router":
        _run_router(rest, prog, lifecycle)
    elif role == "kvtransfer":
        _run_store(rest, prog, lifecycle)
        _leave()
    else:
        _run_worker(role, rest, prog, lifecycle)
        _leave()
    return 0


def _leave() -> NoReturn:
    """Ends the process now: everything of Baton's is closed, and the interpreter would take seconds to unload torch."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def _run_router(argv: Sequence[str], prog: str, lifecycle: Lifecycle) -> None:
    from services.router.config import RouterConfig

    config = _configure(RouterConfig, argv, prog, lifecycle)  # before slow imports: a wrong flag is reported at once
    from services.router.main import serve

    run(lambda: serve(config, lifecycle), lifecycle, loop_factory=_loop_factory())


def _run_worker(role: str, argv: Sequence[str], prog: str, lifecycle: Lifecycle) -> None:
    from services.cli.engine_setup import choose_types
    from services.worker.config import WorkerConfig
    from services.worker.engine_choice import TORCH

    config = _configure(WorkerConfig, argv, prog, lifecycle, computes=True)
    choice = choose_types(config, pathlib.Path(config.model))
    config = dataclasses.replace(
        config, dtype=choice.dtype, quantization=choice.quantization, dtype_reason=choice.reason
    )
    if config.engine == TORCH:
        lifecycle.report_progress(StartProgress("import", "torch"))
    serve = _worker_service(role)
    run(lambda: serve(config, lifecycle), lifecycle, loop_factory=_loop_factory())


def _run_store(argv: Sequence[str], prog: str, lifecycle: Lifecycle) -> None:
    from services.store.config import StoreConfig

    config = _parsed(StoreConfig, argv, prog, lifecycle)
    _demand_shm_dir(config.shm_dir)
    from services.store.main import serve

    run(lambda: serve(config, lifecycle), lifecycle, loop_factory=_loop_factory())


def _worker_service(role: str) -> Callable[[Any, Lifecycle], Coroutine[Any, Any, None]]:
    if role == "prefill":
        from services.prefill.main import serve as serve_prefill

        return serve_prefill
    if role == "decode":
        from services.decode.main import serve as serve_decode

        return serve_decode
    from services.cli.mixed import serve as serve_mixed

    return serve_mixed


def _configure(
    config_type: type[Any], argv: Sequence[str], prog: str, lifecycle: Lifecycle, *, computes: bool = False
) -> Any:
    """Reads the flags and finds the model. With `computes` it is a worker's, and demands what a worker
    needs before a model is downloaded."""
    config = _parsed(config_type, argv, prog, lifecycle)
    if computes:
        from services.cli.engine_setup import demand_engine

        config = dataclasses.replace(config, vllm_python=demand_engine(config))
        _demand_shm_dir(config.shm_dir)
        if not lifecycle.is_supervised:  # the supervisor has looked, and it takes seconds
            from services.cli.machine import demand_device

            demand_device(config.device, config.vllm_python)
    from services.cli.model_names import demand_weights, resolve_model

    model = resolve_model(config.model)
    if computes:
        demand_weights(model)
    return dataclasses.replace(
        config, model=str(model.path), served_model_name=config.served_model_name or model.model_id
    )


def _parsed(config_type: type[Any], argv: Sequence[str], prog: str, lifecycle: Lifecycle) -> Any:
    """Reads the flags, and looks whether the ports are free."""
    parser = Parser(prog=prog, description=_DESCRIPTIONS[prog.rpartition(" ")[2]])
    configuration.add_arguments(parser, config_type)
    config = configuration.load(config_type, parser.parse_args(argv))
    lifecycle.drain_s = config.drain_s
    config.demand_safe()
    _require_free_ports(config)
    return config


def _require_free_ports(config: Any) -> None:
    """Raises ConfigError if a port is taken. Without this, a worker would tell it only when it has loaded its model."""
    wanted = [("--port", config.host, config.port), ("--metrics-port", config.host, config.metrics_port)]
    if hasattr(config, "control_port"):
        wanted.append(("--control-port", config.control_host, config.control_port))
        wanted.append(("--http-port", config.host, config.http_port))
    for flag, host, port in wanted:
        if port >= 0:
            require_free(flag, host, port)


def _demand_shm_dir(folder: str) -> None:
    """Raises ConfigError if no socket can be made there. Without this, it would show only when the model is loaded."""
    if folder and not (os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK)):
        raise ConfigError(f"--shm-dir: {folder} is no folder that this process may write to")


def _loop_factory() -> Any:
    import uvloop

    return uvloop.new_event_loop


def _supervision() -> argparse.ArgumentParser:
    """Returns the parser of the flags that `baton up` gives its children; people do not use them."""
    parser = Parser(add_help=False)
    parser.add_argument("--ready-fd", type=_fd)
    parser.add_argument("--lifeline-fd", type=_fd)
    parser.add_argument("--cores", type=_cores, default=())
    parser.add_argument("--own-cores", action="store_true")
    return parser


def _fd(text: str) -> int:
    fd = int(text)
    try:
        os.fstat(fd)
    except OSError as error:
        raise ConfigError(f"file descriptor {fd} is not open") from error
    return fd


def _cores(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))
