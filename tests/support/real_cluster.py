"""Runs a cluster of real processes: routers, and workers that are reached only through proxies.

Owns: the processes, that they end with the test, and how they are killed, stopped, cut off and started again. Never:
what a test expects of them. What `baton up` starts is `processes.py`'s: that supervises its children itself, and here
it is the test that ends them and starts them again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc
from benchmarks.ports import free_ports
from services.cli.child import Child, Lifeline
from services.rpc.authentication import ROUTER
from tests.support.certificates import certificates
from tests.support.cluster import Answer, receive, receive_several
from tests.support.footprint import Footprint
from tests.support.patience import Patience
from tests.support.processes import BATON, environment
from tests.support.proxy import Fault, Proxy
from tests.support.text_model import write_model
from tests.support.trusted import dial

READY_WITHIN_S = 60.0
_OUTSIDE = "127.0.0.2"
"""Where recorded workers are reached, at the ports that they have at 127.0.0.1: sockets for KV say their own ports."""
LEFT_WITHIN_S = 240.0
"""It may have much to finish, on a busy machine."""
IDLE_WITHIN_S = 5.0
HEARTBEAT_S = 0.5
"""The workers' default."""
_LAST_STEPS = 4
"""Steps under way when the wait begins send snapshots too."""
_SILENT_S = 120.0
"""Workers that send nothing for so long are lost, not slow."""
_LOOK_EVERY_S = 0.005
_STOPPED_S = 0.045
"""Of a slowed process, at a time: far less than anybody takes for silence."""

Status = control_pb2.GetStatusResponse


class Service:
    """Keeps one place in the cluster, and the process that fills it now."""

    def __init__(self, name: str, command: Callable[[], list[str]], lifeline: Lifeline, proxy: Proxy | None) -> None:
        self.name = name
        self.proxy = proxy
        """A worker's: whoever dials it goes through this."""
        self.port = 0
        self.control_port = 0
        """A router's."""
        self.metrics_port = 0
        self.http_port = 0
        """A router's."""
        self._command = command
        self._lifeline = lifeline
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        """Returns the process id, or 0 while there is none."""
        return self._child.pid if self._child is not None else 0

    async def start(self) -> None:
        assert self._child is None
        child = self._child = Child(self.name, self._command(), self._lifeline)
        ready = await child.ready()
        if ready is None:
            raise AssertionError(f"{self.name} ended before it was ready: {await child.wait()}")
        self.port, self.control_port, self.metrics_port = ready.port, ready.control_port, ready.metrics_port
        self.http_port = ready.http_port
        if self.proxy is not None:
            self.proxy.aim(ready.port)

    async def kill(self) -> None:
        """Kills the process as `kill -9` does."""
        if self._child is not None:
            await self._child.kill()
            self._gone()

    async def terminate(self) -> None:
        """Asks the process to end, as `kill` does; it ends in order."""
        os.kill(self.pid, signal.SIGTERM)
        await self.left()

    async def left(self) -> None:
        """Returns when it has ended, in order."""
        assert self._child is not None
        async with asyncio.timeout(LEFT_WITHIN_S):
            status = await self._child.wait()
        self._gone()
        assert status == 0, f"{self.name}: {status}"

    def resident_mib(self) -> float:
        return self._memory_mib("VmRSS")

    def peak_mib(self) -> float:
        """Returns the most that was resident since `forget_peak`, in MiB."""
        return self._memory_mib("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def _memory_mib(self, name: str) -> float:
        found = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{self.pid}/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) / 1024

    @contextlib.contextmanager
    def stopped(self) -> Any:
        """Inside the context the process is there and does nothing."""
        pid = self.pid
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    @contextlib.asynccontextmanager
    async def slowed(self) -> AsyncIterator[None]:
        """Inside the context the process runs a tenth of the time, so that what it does outlasts what a test waits for,
        however fast the machine is. It may end meanwhile."""
        over = asyncio.create_task(self._stop_and_go())
        try:
            yield
        finally:
            over.cancel()
            await asyncio.gather(over, return_exceptions=True)

    async def _stop_and_go(self) -> None:
        pid = self.pid
        with contextlib.suppress(ProcessLookupError):
            while self.pid == pid:
                with self.stopped():
                    await asyncio.sleep(_STOPPED_S)
                await asyncio.sleep(_STOPPED_S / 9)

    def _gone(self) -> None:
        self._child = None
        if self.proxy is not None:
            self.proxy.aim(None)


class RouterClient:
    """Does what a client and an operator of one router do."""

    def __init__(self, channel: Any, control_channel: Any) -> None:
        self.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        self.control = control_pb2_grpc.ControlServiceStub(control_channel)
        self._channels = (channel, control_channel)

    async def status(self) -> Status:
        return await self.control.GetStatus(control_pb2.GetStatusRequest(), timeout=60.0, wait_for_ready=True)

    async def is_reached(self) -> None:
        """Returns when both ports answer: a channel that has failed waits before it dials again, and fails calls until
        then."""
        async with asyncio.timeout(READY_WITHIN_S):
            await asyncio.gather(*(channel.channel_ready() for channel in self._channels))

    async def stream(self, request: inference_pb2.GenerateRequest, timeout_s: float = 300.0) -> Answer:
        return await receive(self.inference.GenerateStream(request, timeout=timeout_s))

    async def several(self, request: inference_pb2.GenerateRequest, timeout_s: float = 300.0) -> list[Answer]:
        return await receive_several(self.inference.GenerateStream(request, timeout=timeout_s), request.n)

    async def until(self, condition: Callable[[Status], bool], what: str, timeout_s: float = IDLE_WITHIN_S) -> Status:
        """Looks again and again at the status, as an operator would."""
        patience = Patience(timeout_s)
        while not condition(status := await self.status()):
            assert not patience.is_over(), f"not within {timeout_s} s (in {patience.waited_s:.1f}): {what}; {status}"
            await asyncio.sleep(_LOOK_EVERY_S)
        return status


class RealCluster:
    def __init__(
        self, model: Path, temp: Path, worker_flags: Sequence[str], *, records: bool = False, tls: Path | None = None
    ) -> None:
        """`records`: of its one router and its workers every port has a proxy that keeps what passes. `tls`: a folder
        with certificates; None for all in the clear."""
        self.services: dict[str, Service] = {}
        self.routers: list[RouterClient] = []
        self.footprint = Footprint()
        self.temp = temp
        self.recorders: dict[str, Proxy] = {}
        """By what they stand before, if it records: public, http, control, and for each worker its name and its name
        with -kv."""
        self._records = records
        self._tls = tls
        self._model = model
        self._worker_flags = worker_flags
        self._lifeline = Lifeline()
        settings = [f"{name}={value}" for name, value in environment(temp).items()]
        self._program = ["env", "-i", *settings, *BATON]

    @property
    def router(self) -> RouterClient:
        return self.routers[0]

    def __getitem__(self, name: str) -> Service:
        return self.services[name]

    def pids(self) -> list[int]:
        return [service.pid for service in self.services.values() if service.pid]

    async def add_router(self, stack: contextlib.AsyncExitStack, *flags: str) -> None:
        name = f"router-{len(self.routers)}"
        service = Service(name, lambda: self._router_command(service, flags), self._lifeline, None)
        self.services[name] = service
        # Nobody else gets them while it is down.
        ports = service.port, service.control_port, service.http_port = free_ports(3)
        dialled = [await self._door(*each) for each in zip(("public", "control", "http"), ports, strict=True)]
        await service.start()
        shown = None if self._tls is None else certificates(self._tls, "operator")
        public = dial(f"127.0.0.1:{dialled[0]}", certificates=shown)
        control = dial(f"127.0.0.1:{dialled[1]}", certificates=shown, role=ROUTER if shown is not None else "")
        channels = [await stack.enter_async_context(channel) for channel in (public, control)]
        self.routers.append(RouterClient(*channels))

    async def _door(self, name: str, port: int, host: str = "127.0.0.1", at: int = 0) -> int:
        """Returns the port to dial for another one: that of its recorder, if it has one."""
        if not self._records:
            return port
        door = self.recorders[name] = Proxy(self.pids, keeps=True)
        await door.open(host, at)
        door.aim(port)
        return door.port

    async def add_worker(self, name: str, *flags: str, model: Path | None = None) -> None:
        """Its role is its name's first part; a store gets no flags but its own. It joins every router there is.

        `model`: the folder of its model, if it is not the cluster's."""
        proxy, host = Proxy(self.pids, keeps=self._records), "127.0.0.1"
        if self._records:
            host, (port, kv_port) = _OUTSIDE, free_ports(2)
            flags = (*flags, f"--port={port}", f"--kv-port={kv_port}")
            await proxy.open(host, port)
            await self._door(f"{name}-kv", kv_port, host, kv_port)
            self.recorders[name] = proxy
        else:
            await proxy.open()
        control_ports = [service.control_port for service in self.services.values() if service.proxy is None]
        if self._records:
            control_ports = [self.recorders["control"].port]
        routers = [part for port in control_ports for part in ("--router", f"127.0.0.1:{port}")]
        role = name.partition("-")[0]
        common = ["--worker-id", name, "--log-level", "warning", "--advertise", f"{host}:{proxy.port}", *routers]
        common += self._tls_flags("store" if role == "store" else "worker")
        command = [*self._program, role, "--model", str(model or self._model), *common, *self._worker_flags, *flags]
        if role == "store":  # it learns from the routers what it keeps
            command = [*self._program, "kvtransfer", *common, *flags]
        self.services[name] = Service(name, lambda: command, self._lifeline, proxy)
        await self.services[name].start()

    def _router_command(self, service: Service, flags: Iterable[str]) -> list[str]:
        """A restarted router is found where it was."""
        command = [*self._program, "router", "--model", str(self._model), "--log-level", "warning"]
        command += ["--split", "always", *self._tls_flags("router")]  # tests look at the handoff, whatever it costs
        command += ["--http-port", str(service.http_port), *flags]  # a test may have chosen that port itself
        return [*command, "--port", str(service.port), "--control-port", str(service.control_port)]

    def _tls_flags(self, role: str) -> list[str]:
        if self._tls is None:
            return []
        files = (f"{role}.pem", f"{role}.key", "ca.pem")
        flags = zip(("--tls-cert", "--tls-key", "--tls-ca"), files, strict=True)
        return ["--cluster-auth", "both", *(part for flag, file in flags for part in (flag, str(self._tls / file)))]

    @contextlib.contextmanager
    def cut(self, fault: Fault, worker: str, dialled_by: Iterable[str]) -> Any:
        """Lets what these services dial at a worker fail while the context is open, also when they are restarted."""
        proxy, names = self.services[worker].proxy, list(dialled_by)
        assert proxy is not None
        with proxy.failing(fault, lambda: [self.services[name].pid for name in names]):
            yield

    async def restart(self, *names: str) -> None:
        """Kills all of them in the same moment, and starts them again."""
        self.watch()
        await asyncio.gather(*(self.services[name].kill() for name in names))
        await asyncio.gather(*(self.services[name].start() for name in names))

    def watch(self) -> None:
        """Notes what the processes have, for the check that nothing is left."""
        for pid in self.pids():
            self.footprint.watch(pid)

    async def whole(self) -> None:
        """Waits until every service runs, and every router has every worker."""
        missing = [service for service in self.services.values() if not service.pid]
        await asyncio.gather(*(service.start() for service in missing))
        workers = {name for name in self.services if not name.startswith("router-")}
        for router in self.routers:
            await router.is_reached()
            await router.until(lambda status: _ready(status) == workers, f"{workers} are ready", READY_WITHIN_S)

    async def idle(self, within_s: float = IDLE_WITHIN_S) -> None:
        """Waits until no router that runs has a request, and no worker it knows holds a block, a lease or a sequence.

        Within so many seconds of the workers' own: a worker sends a load snapshot at least every heartbeat, so what it
        still holds after that many of them it holds for good, however slow the machine is.
        """
        most = round(within_s / HEARTBEAT_S) + _LAST_STEPS
        for number, router in enumerate(self.routers):
            if self.services[f"router-{number}"].pid:
                await _idle_within(router, most)

    async def close(self) -> None:
        """Kills what still runs; nothing is left of any of them."""
        self.watch()
        for service in self.services.values():
            await service.kill()
        workers = [service.proxy for service in self.services.values() if service.proxy is not None]
        for proxy in {*workers, *self.recorders.values()}:
            await proxy.close()
        self._lifeline.close()
        await asyncio.to_thread(self.footprint.await_gone, READY_WITHIN_S)
        assert list(self.temp.iterdir()) == []


def _ready(status: Status) -> set[str]:
    return {each.worker.worker_id for each in status.workers if each.state == control_pb2.WORKER_STATE_READY}


def _idle(status: Status) -> bool:
    requests = status.num_queued + status.num_prefilling + status.num_parked + status.num_decoding
    return requests == 0 and all(
        holds_nothing(each) for each in status.workers if each.state == control_pb2.WORKER_STATE_READY
    )


def holds_nothing(worker: control_pb2.WorkerStatus) -> bool:
    """Returns whether a snapshot that is younger than two heartbeats shows nothing."""
    load = worker.load
    held = load.blocks_importing + load.blocks_leased + load.blocks_active
    work = load.num_running + load.num_waiting + load.num_importing + load.num_leases
    total = held + load.blocks_cached + load.blocks_free
    return not held and not work and total == worker.worker.num_blocks and worker.load_age_ms < 1000


async def _idle_within(router: RouterClient, most: int) -> None:
    """Fails when every worker has sent `most` snapshots since the first look and something is still held."""
    first: dict[tuple[str, int], int] = {}
    async with asyncio.timeout(_SILENT_S):
        while not _idle(status := await router.status()):
            sent = []
            for each in status.workers:
                number = each.load.sequence_number
                sent.append(number - first.setdefault((each.worker.worker_id, each.worker.incarnation), number))
            assert not sent or min(sent) <= most, f"not idle after {min(sent)} snapshots of each worker: {status}"
            await asyncio.sleep(_LOOK_EVERY_S)


@contextlib.asynccontextmanager
async def real_cluster(
    model: Path,
    temp: Path,
    workers: Sequence[str],
    *worker_flags: str,
    routers: Sequence[Sequence[str]] = ((),),
    flags_of: Mapping[str, Sequence[str]] = MappingProxyType({}),
    records: bool = False,
    tls: Path | None = None,
) -> AsyncIterator[RealCluster]:
    """Yields a cluster that is ready. `temp` is an empty folder; `workers` go by name, such as decode-0; `routers` are
    the flags of each, `flags_of` those of single workers. `records` and `tls`: see
    `RealCluster`."""
    async with contextlib.AsyncExitStack() as stack:
        cluster = RealCluster(model, temp, worker_flags, records=records, tls=tls)
        stack.push_async_callback(cluster.close)
        for flags in routers:
            await cluster.add_router(stack, *flags)
        await asyncio.gather(*(cluster.add_worker(name, *flags_of.get(name, ())) for name in workers))
        await cluster.whole()
        yield cluster


@contextlib.asynccontextmanager
async def lone_router(folder: Path, *flags: str) -> AsyncIterator[Service]:
    """Yields a router without workers, of a model that is only text."""
    temp = folder / "temp"
    temp.mkdir()
    model = write_model(folder / "model")
    async with real_cluster(model, temp, (), routers=[flags]) as cluster:
        yield cluster["router-0"]
