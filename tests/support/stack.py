"""Runs the compose stack in a real engine: built, started, looked at, and gone afterwards.

Owns: one compose project of its own, on ports of its own. Never: what a test expects of it; other containers.
A machine whose builds or downloads need more than a plain network says so in two variables: COMPOSE_TEST_BUILD, further
options of `docker build`, and COMPOSE_TEST_FILE, a further compose file.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from baton.v1 import control_pb2, control_pb2_grpc
from benchmarks.ports import free_ports
from services.rpc.channels import dial
from tests.support.compose import COMPOSE_FILE, DEPLOY

UP_WITHIN_S = 600.0
IMAGE, ROUTER_IMAGE = "baton:test-cpu", "baton:test-router"
_LOOK_EVERY_S = 0.2


def missing_engine() -> str | None:
    """Why there is no engine here; None if there is one."""
    if shutil.which("docker") is None:
        return "docker is not on this machine"
    asked = subprocess.run(["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, text=True)
    if asked.returncode or not asked.stdout.strip():
        return "no Docker engine answers on this machine"
    environ = {**os.environ, "DOCKER_BUILDKIT": "1"}
    builds = subprocess.run(["docker", "build", "--help"], env=environ, capture_output=True, text=True, check=False)
    return None if "--secret" in builds.stdout else "this machine's docker builds without BuildKit"


def has_compose(command: Sequence[str]) -> bool:
    if shutil.which(command[0]) is None:
        return False
    return subprocess.run([*command, "version"], capture_output=True, check=False).returncode == 0


def docker(*arguments: str, timeout_s: float = 120.0, check: bool = True) -> str:
    """Returns the output of one docker command."""
    result = subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)
    assert not check or result.returncode == 0, f"docker {' '.join(arguments)}: {result.stderr[-2000:]}"
    return result.stdout


def build() -> None:
    more = shlex.split(os.environ.get("COMPOSE_TEST_BUILD", ""))
    environ = {**os.environ, "DOCKER_BUILDKIT": "1"}
    for tag in (["--tag", IMAGE], ["--tag", ROUTER_IMAGE, "--target", "router"]):
        command = ["docker", "build", "--file", str(DEPLOY / "Dockerfile"), *tag, *more, str(DEPLOY.parent)]
        result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=1800, check=False)
        assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


class Stack:
    def __init__(self, command: Sequence[str], *on_top: Path, **settings: str) -> None:
        """`command`: docker compose or docker-compose. `on_top`: further files; `settings`: more of the environment."""
        self.project = f"batontest{os.getpid()}"
        self.port, self.http_port, self.metrics_port = free_ports(3)
        self.target = f"127.0.0.1:{self.port}"
        files = [str(COMPOSE_FILE), *map(str, on_top), *filter(None, [os.environ.get("COMPOSE_TEST_FILE")])]
        self._command = [*command, *(part for file in files for part in ("--file", file))]
        ours = ("BATON_", "COMPOSE_", "OTEL_")
        self._environ = {name: value for name, value in os.environ.items() if not name.startswith(ours)} | {
            "COMPOSE_PROJECT_NAME": self.project,
            "BATON_TAG": "test",
            "CPU_THREADS": "1",  # five containers share the cores
            "ROUTER_PORT": str(self.port),
            "HTTP_PORT": str(self.http_port),
            "ROUTER_METRICS_PORT": str(self.metrics_port),
            **settings,
        }

    def compose(self, *arguments: str, timeout_s: float = UP_WITHIN_S) -> str:
        result = subprocess.run(
            [*self._command, *arguments],
            env=self._environ,
            cwd=DEPLOY,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert result.returncode == 0, f"{' '.join(arguments)}: {result.stdout[-1000:]} {result.stderr[-3000:]}"
        return result.stdout

    def containers(self, service: str = "", *, gone_too: bool = False) -> list[dict[str, Any]]:
        """Returns the containers as `docker inspect` shows them."""
        filters = [f"label=com.docker.compose.project={self.project}"]
        filters += [f"label=com.docker.compose.service={service}"] if service else []
        flags = [part for each in filters for part in ("--filter", each)]
        ids = docker("ps", "--quiet", *(["--all"] if gone_too else []), *flags).split()
        found: list[dict[str, Any]] = json.loads(docker("inspect", *ids)) if ids else []
        return found

    def await_healthy(self, num_containers: int) -> None:
        def healthy() -> bool:
            running = self.containers()
            return len(running) == num_containers and all(
                each["State"].get("Health", {}).get("Status") == "healthy" for each in running
            )

        wait_for(healthy, f"{num_containers} healthy containers", lambda: self.compose("ps") + self.logs()[-3000:])

    def logs(self, service: str = "") -> str:
        return "".join(docker("logs", each["Id"]) for each in self.containers(service, gone_too=True)) + "".join(
            _stderr_of("logs", each["Id"]) for each in self.containers(service, gone_too=True)
        )

    def control(self) -> tuple[str, str]:
        """(address, token) of the router's control port, as an operator on the host has them: it is not published."""
        return self.control_address(), self.read("/run/cluster/token").strip()

    def control_address(self) -> str:
        (router,) = self.containers("router")
        (network,) = router["NetworkSettings"]["Networks"].values()
        return f"{network['IPAddress']}:50052"

    def read(self, path: str) -> str:
        """Returns what a file in the router's container has."""
        (router,) = self.containers("router")
        return docker("exec", router["Id"], "cat", path)

    def remains(self) -> list[str]:
        """Returns everything of the project that the engine still has."""
        label = f"label=com.docker.compose.project={self.project}"
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return [line for kind in kinds for line in docker(*kind, "--quiet", "--filter", label).split()]


class Operator:
    """Looks at the router as `baton status` does."""

    def __init__(self, target: str, token: str) -> None:
        self._target, self._token = target, token

    async def status(self) -> control_pb2.GetStatusResponse:
        async with dial(self._target, self._token) as channel:
            stub = control_pb2_grpc.ControlServiceStub(channel)
            return await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=30.0, wait_for_ready=True)

    async def until(self, condition: Callable[[control_pb2.GetStatusResponse], Any], what: str) -> Any:
        """Returns the first true answer of `condition`."""
        deadline_s = time.monotonic() + UP_WITHIN_S
        while not (found := condition(status := await self.status())):
            assert time.monotonic() < deadline_s, f"{what}: {status}"
            await asyncio.sleep(_LOOK_EVERY_S)
        return found


def ready(status: control_pb2.GetStatusResponse, role: str) -> list[control_pb2.WorkerStatus]:
    return [
        each
        for each in status.workers
        if each.state == control_pb2.WORKER_STATE_READY and each.worker.worker_id.startswith(f"{role}-")
    ]


def wait_for(condition: Callable[[], bool], what: str, explain: Callable[[], str] = str) -> None:
    deadline_s = time.monotonic() + UP_WITHIN_S
    while not condition():
        assert time.monotonic() < deadline_s, f"not within {UP_WITHIN_S} s: {what}\n{explain()}"
        time.sleep(_LOOK_EVERY_S)


def _stderr_of(*arguments: str) -> str:
    return subprocess.run(["docker", *arguments], capture_output=True, text=True, timeout=60, check=True).stderr
