"""Keeps the whole simulated cluster: routers, workers, network, truth. What a fault does to it is a method here.

Never: which faults happen when (`faults`), what must hold (`invariants`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from services.core.errors import BatonError, NoWorker, WorkerFailed
from services.kv.lease import Lease
from services.router.coordinator.config import CoordinatorConfig
from services.worker.host import WorkerHost
from tests.sim.client import SimRequest
from tests.sim.disk import SimDisk
from tests.sim.model import Truth
from tests.sim.network import Network
from tests.sim.node import Node
from tests.sim.one_sided import Fabric
from tests.sim.record import Record
from tests.sim.router import SimRouter
from tests.sim.shared_memory import SharedMemory
from tests.sim.sockets import Sockets
from tests.sim.worker import SimWorker, WorkerPlan
from tests.sim.world import World

# Moments of a handoff at which faults like to strike: (where, method of that table).
_MOMENTS = {
    "leases": ("open", "publish", "seal", "open_fetch", "release", "adopt"),
    "imports": ("reserve", "begin", "copy_started", "copy_ended", "validate", "ready"),
}


_ROUNDING_S = 1e-6
_LINGERS_S = 0.5
_BACK_AFTER_S = 0.2


class Cluster:
    def __init__(self, world: World, network: Network, truth: Truth) -> None:
        self.world = world
        self.network = network
        self.truth = truth
        self.shared_memory = SharedMemory(world)
        self.sockets = Sockets(network)
        self.fabric = Fabric(network)
        self.disks: dict[str, SimDisk] = {}
        """Those of workers with a disk tier, which outlive them."""
        self.kept_verdicts: dict[str, dict[int, int]] = {}
        """What they keep of verdicts, by name."""
        self.workers: dict[str, SimWorker] = {}
        self.wrong_worker: SimWorker | None = None
        """The one that has computed wrong from some moment on."""
        self.routers: dict[str, SimRouter] = {}
        self.requests: list[SimRequest] = []
        self.released_by: dict[bytes, int] = {}
        """Leases that were handed over, and to which leg."""
        self.gone: set[str] = set()
        """Nodes that are dead or frozen for ever."""
        self.record = Record()
        self.on_moment: Callable[[str, str], None] = lambda moment, node: None
        self.on_lease_end: Callable[[SimWorker, Lease], None] = lambda worker, lease: None

    # What runs.

    def start_worker(self, plan: WorkerPlan) -> None:
        self.workers[plan.name] = SimWorker(self, plan)

    def disk(self, name: str, block_bytes: int) -> SimDisk:
        if name not in self.disks:
            self.disks[name] = SimDisk(self.world, name, block_bytes)
        return self.disks[name]

    def start_router(self, name: str, address: str, config: CoordinatorConfig) -> None:
        self.routers[name] = SimRouter(self, name, address, config)

    def submit(self, request: SimRequest) -> None:
        """Submits a request at its router, at its time."""
        self.requests.append(request)
        request.may_be_wrong = lambda: self._may_be_wrong(request)
        self.world.at(request.arrival_s, lambda: self._arrive(request))

    def _may_be_wrong(self, request: SimRequest) -> bool:
        """Returns whether some worker has computed wrong, and the request's router has not found it yet."""
        wrong, heard_in_turn = self.wrong_worker, self.routers[request.router].heard_in_turn
        # What it had passed on before the verdict may be told of in the same turn.
        now = self.world.num_turns
        return wrong is not None and heard_in_turn.get(wrong.host.incarnation, now) == now

    def _arrive(self, request: SimRequest) -> None:
        router = self.routers[request.router]
        if not router.node.alive or request.router in self.gone:
            request.router_lost()
            return
        router.node.loop.call_soon(self._ask, router, request)
        request.on_tokens = self._leave_at_token
        if request.cancel_after_s is not None:
            self.world.after(request.cancel_after_s, lambda: self.cancel(request))

    def _ask(self, router: SimRouter, request: SimRequest) -> None:
        if request.over:
            return
        self.world.note("request", request.request_id, len(request.message.token_ids.ids))
        if router.queue_is_full:  # now whoever waits may be refused, or crowded out
            for other in self.requests:
                other.queue_was_full |= other.router == request.router and not other.over
        try:
            router.submit(request)
        except BatonError as error:
            request.refused(error)
        else:
            self.world.require(not router.admits_no_more, f"{request.request_id} is admitted by a router that stops")

    def _leave_at_token(self, request: SimRequest) -> None:
        if request.cancel_at_token is not None and len(request.received) >= request.cancel_at_token:
            self.world.after(self.world.random.random() * 0.004, lambda: self.cancel(request))

    def cancel(self, request: SimRequest) -> None:
        router = self.routers[request.router]
        if router.node.alive and not request.over:
            request.cancelled = True
            self.world.note("cancel", request.request_id)
            router.node.loop.call_soon(router.cancel, request)

    # What happens to it.

    def crash(self, name: str, silent_s: float = 0.0) -> None:
        """Kills a process; its peers' kernels notice after `silent_s`."""
        node = self.node(name)
        if not node.alive or name in self.gone:
            return
        self.world.note("crash", name)
        self.network.drop_node(node, silent_s)
        node.kill()
        self._clients_leave(name)

    def _clients_leave(self, router: str) -> None:
        for request in self.requests:
            if request.router == router and request.arrival_s <= self.world.now_s:
                request.router_lost()

    def lose(self, name: str, *, silent: bool) -> None:
        """Kills a process for ever. With `silent` its host is gone too, and nobody is told."""
        node = self.node(name)
        if name in self.gone or not node.alive:
            return
        if silent:
            self.world.note("lost", name)
            self.network.starve_node(node)
            node.kill()
            self._clients_leave(name)
        else:
            self.crash(name)
        self.gone.add(name)

    def stop_for_ever(self, name: str) -> None:
        """Freezes a process for ever: its kernel keeps its connections, and takes new ones."""
        if name in self.gone or not self.node(name).alive:
            return
        self.freeze(name)
        self.gone.add(name)
        self.network.starve_node(self.node(name))
        self._clients_leave(name)

    def node(self, name: str) -> Node:
        return (self.workers.get(name) or self.routers[name]).node

    def restart(self, name: str) -> None:
        if name in self.gone:
            return
        self.crash(name)
        self.world.note("restart", name)
        if name in self.workers:
            self.start_worker(self.workers[name].plan)
        else:
            old = self.routers[name]
            self.start_router(name, old.node.address, old.config)

    def freeze(self, name: str) -> None:
        self.world.note("freeze", name)
        self.node(name).freeze()

    def thaw(self, name: str) -> None:
        if name not in self.gone:
            self.world.note("thaw", name)
            self.node(name).thaw()

    def terminate(self, name: str, deadline_s: float) -> None:
        """Sends SIGTERM."""
        worker = self.workers[name]
        if worker.node.alive and name not in self.gone and not worker.host.draining:
            self.world.note("terminate", name)
            worker.node.loop.enter(lambda: worker.host.leave(deadline_s, "SIGTERM"))

    def exited(self, worker: SimWorker) -> None:
        """Notes that a node has left by a drain; its supervisor starts another."""
        self.world.note("left", worker.plan.name)
        self.world.require(not worker.left_over(), f"{worker.plan.name} leaves behind {worker.left_over()}")
        # What it has sent still arrives: the kernel sees to that after its exit.
        self.world.after(_LINGERS_S, lambda: self.crash(worker.plan.name) if worker.node.alive else None)
        self.world.after(_LINGERS_S + _BACK_AFTER_S, lambda: self._start_again(worker))

    def _start_again(self, gone: SimWorker) -> None:
        if self.workers[gone.plan.name] is gone and gone.plan.name not in self.gone:
            self.start_worker(gone.plan)

    def stop_router(self, name: str, deadline_s: float) -> None:
        """SIGTERM, as the router's main does it: nothing new, what runs may end in its time, then every session ends.
        Its supervisor starts another."""
        router = self.routers[name]
        if not router.node.running or router.stopping:
            return
        router.stopping = True
        self.world.note("stop router", name)

        async def stop() -> None:
            began_s, router.admits_no_more = self.world.now_s, True
            await router.conductor.drain(deadline_s)
            given_up = [other.request_id for other in self.requests if router.serves(other.request_id)]
            in_time = self.world.now_s >= began_s + deadline_s - _ROUNDING_S
            self.world.require(in_time or not given_up, f"{name} gives {given_up} up before its deadline")
            await router.close()
            self.world.require(not router.coordinator.num_live, f"{name} leaves requests behind")
            self.world.after(_LINGERS_S, lambda: self.crash(name) if router.node.alive else None)
            self.world.after(_LINGERS_S + _BACK_AFTER_S, lambda: self._start_router_again(router))

        loop = router.node.loop
        loop.enter(lambda: loop.create_task(stop(), name="stop"))

    def _start_router_again(self, gone: SimRouter) -> None:
        name = gone.node.name
        if self.routers[name] is gone and name not in self.gone:
            self.start_router(name, gone.node.address, gone.config)

    def drain(self, router_name: str, worker_name: str, deadline_s: float) -> None:
        """Calls `ControlService.Drain`."""
        router = self.routers[router_name]
        if not router.node.alive or worker_name not in {w.info.worker_id for w in router.coordinator.workers.all()}:
            return
        self.world.note("drain", router_name, worker_name)

        async def drain() -> None:
            with contextlib.suppress(NoWorker, WorkerFailed):  # not there, or lost meanwhile
                await router.conductor.drain_worker(worker_name, deadline_s)

        loop = router.node.loop
        loop.enter(lambda: loop.create_task(drain(), name="drain"))

    def kill_all(self) -> None:
        """Closes every coroutine at the end of a run, where nobody sees it."""
        for node in [*(w.node for w in self.workers.values()), *(r.node for r in self.routers.values())]:
            node.kill()

    # What is left of it.

    @property
    def block_sizes(self) -> set[int]:
        return {worker.plan.config.block_size for worker in self.workers.values()}

    @property
    def present(self) -> list[SimWorker]:
        return [worker for name, worker in self.workers.items() if name not in self.gone]

    @property
    def present_routers(self) -> list[SimRouter]:
        return [router for name, router in self.routers.items() if name not in self.gone]

    def within_reach(self, router: SimRouter) -> list[SimWorker]:
        """Returns the workers that this router can still talk to."""
        severed = self.network.cut_for_ever
        return [worker for worker in self.present if frozenset((worker.plan.name, router.node.name)) not in severed]

    # What is watched.

    def watch(self, host: WorkerHost, name: str) -> None:
        """Reports the moments of its handoffs, and notes which leg a lease was handed to."""
        tables: dict[str, Any] = {"leases": host.leases, "imports": host.imports}
        for where, methods in _MOMENTS.items():
            for method in methods:
                setattr(tables[where], method, self._reporting(getattr(tables[where], method), method, name))

    def _reporting(self, act: Any, moment: str, name: str) -> Any:
        def reporting(*args: Any, **kwargs: Any) -> Any:
            result = act(*args, **kwargs)
            if moment in ("release", "adopt") and (moment == "adopt" or result.valid):
                self._handed_over(args[0], args[1])
            self.on_moment(moment, name)
            return result

        return reporting

    def _handed_over(self, lease_id: bytes, leg: int) -> None:
        before = self.released_by.setdefault(lease_id, leg)
        self.world.require(before == leg, f"a lease is handed to leg {leg} after leg {before}")
