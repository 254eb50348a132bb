"""Stands for a service under `baton up`: it reports ready, notes what happens to it, and ends when told.

`fake_service.py FOLDER ROLE FLAGS...`. It appends `NAME EVENT PID` lines to FOLDER/events. FOLDER/NAME.fail makes it
exit 3 before it is ready, FOLDER/NAME.stubborn makes it ignore that it should stop.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import pathlib
import signal
import sys
from concurrent import futures

from services.core.lifecycle import Lifecycle, run


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("role")
    for flag in ("--ready-fd", "--lifeline-fd", "--port"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--worker-id", default="router")
    arguments, _ = parser.parse_known_args()
    folder, name = arguments.folder, arguments.worker_id
    note(folder, name, "started")
    if (folder / f"{name}.fail").exists():
        return 3
    lifecycle = Lifecycle(ready_fd=arguments.ready_fd, lifeline_fd=arguments.lifeline_fd, orphan_grace_s=0.2)
    lifecycle.watch_lifeline()
    run(lambda: serve(lifecycle, arguments), lifecycle)
    note(folder, name, "ended")
    return 0


async def serve(lifecycle: Lifecycle, arguments: argparse.Namespace) -> None:
    folder, name = arguments.folder, arguments.worker_id
    server, port = start_router(arguments.port) if arguments.role == "router" else (None, 1)
    stubborn = (folder / f"{name}.stubborn").exists()
    if stubborn:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
    lifecycle.report_ready(port=port, metrics_port=2, control_port=port if server is not None else 0)
    await lifecycle.stopping.wait()
    note(folder, name, "stopping")
    if stubborn:
        await asyncio.Event().wait()
    if server is not None:
        server.stop(None)


def start_router(port: int):
    """Serves the health of an InferenceService that is ready."""
    import grpc
    from grpc_health.v1 import health, health_pb2, health_pb2_grpc

    checks = health.HealthServicer()
    checks.set("baton.v1.InferenceService", health_pb2.HealthCheckResponse.SERVING)
    server = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    server.start()
    return server, bound


def note(folder: pathlib.Path, name: str, event: str) -> None:
    with open(folder / "events", "a") as events:
        events.write(f"{name} {event} {os.getpid()}\n")


if __name__ == "__main__":
    sys.exit(main())
