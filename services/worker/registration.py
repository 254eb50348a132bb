"""Registers a worker with routers: it joins every address that it is given, again and again.

So a router that was restarted, or was not up yet, is joined without being asked. Owns: which routers are joined now.
Any failure ends one attempt and never the task: the attempt is repeated, and each change is logged once. Never: what
being joined means for the worker (WorkerHost).
"""

from __future__ import annotations

import asyncio
import logging
import socket
import zlib
from collections.abc import Callable

import grpc

from baton.v1 import control_pb2, control_pb2_grpc
from services.core.addresses import join, parse
from services.core.cluster_token import with_advice
from services.core.printable import printable
from services.rpc.channels import Dial

log = logging.getLogger(__name__)

_RESOLVE_EVERY_S = 1.0
_MAX_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 0.02
"""Lower bound of the seconds between registrations, whatever interval a router asks for."""
_FIRST_PAUSE_S = 0.25
_TOLD_FAILURES = 3
"""Failed attempts in a row after which a router that was there is told to be lost: after about a second."""
_MAX_PAUSE_S = 2.0
_CALL_TIMEOUT_S = 2.0


class Registrations:
    """Keeps a worker's registrations.

    Make it on the event loop. Each `join` runs in a task of its caller's until cancelled.
    """

    def __init__(
        self,
        worker_id: str,
        request: Callable[[], control_pb2.RegisterRequest],
        dial: Dial,
        changed: Callable[[], None],
    ) -> None:
        """`request` returns what to register with; `changed` is called when the number of joined routers changes."""
        self._worker_id = worker_id
        self._request = request
        self._dial = dial
        self._changed = changed
        self._joined: set[_Router] = set()

    @property
    def num_joined(self) -> int:
        """Returns the number of routers whose last answer was that this worker is registered."""
        return len(self._joined)

    async def join(self, target: str) -> None:
        """Registers with every address that `target` (host:port) resolves to, until it is cancelled.

        If the name stops resolving, the addresses it had are kept.
        """
        tasks: dict[str, asyncio.Task[None]] = {}
        complaint = ""
        try:
            while True:
                addresses, problem = await _resolve(target)
                if problem != complaint:
                    log.warning("router %s: %s", target, problem or "its name resolves again")
                    complaint = problem
                if not problem:
                    for gone in tasks.keys() - addresses:
                        await _cancel(tasks.pop(gone))
                for new in addresses - tasks.keys():
                    tasks[new] = asyncio.create_task(self._keep(new), name=f"register {new}")
                await asyncio.sleep(_RESOLVE_EVERY_S)
        finally:
            await _cancel(*tasks.values())

    async def _keep(self, address: str) -> None:
        router = _Router(address)
        channel = self._dial(address)
        try:
            while True:
                pause_s = await self._register(router, control_pb2_grpc.RegistryServiceStub(channel))
                await asyncio.sleep(pause_s)
        finally:
            self._note(router, joined=False)
            await channel.close()

    async def _register(self, router: _Router, stub: control_pb2_grpc.RegistryServiceStub) -> float:
        """Makes one attempt to register. Returns the seconds until the next."""
        try:
            request = self._request()
            answer = await stub.Register(request, timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            router.failed(error.code().name, printable(error.details() or ""))
        except Exception as error:  # a defect of this process must not end the registration while the worker lives
            log.exception("router %s: the attempt to register failed", router.address)
            router.failed("INTERNAL", type(error).__name__)
        else:
            router.answered(answer.router_incarnation, loading=request.HasField("loading"))
            self._note(router, joined=True)
            interval_s: float = answer.interval_ms / 1000
            return min(max(interval_s, _MIN_INTERVAL_S), _MAX_INTERVAL_S)
        self._note(router, joined=False)
        return pause_s(router.num_failures, f"{self._worker_id} {router.address}")

    def _note(self, router: _Router, *, joined: bool) -> None:
        if joined != (router in self._joined):
            (self._joined.add if joined else self._joined.discard)(router)
            self._changed()


class _Router:
    """Keeps one address and the state of the router there. It logs each change of that state."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.num_failures = 0
        """Failed attempts in a row."""
        self._state: int | str | None = None
        """The router's incarnation, or the code of the failure that was last told; None before the first answer."""

    def answered(self, incarnation: int, *, loading: bool) -> None:
        self.num_failures = 0
        if self._state != incarnation:
            self._state = incarnation
            what = "announced this load to" if loading else "joined"
            log.info("%s router %s (incarnation %x)", what, self.address, incarnation)

    def failed(self, code: str, details: str) -> None:
        self.num_failures += 1
        # A router that has ended in order is gone for a moment before this worker is told to stop as well.
        if self._state == code or (isinstance(self._state, int) and self.num_failures < _TOLD_FAILURES):
            return
        before, self._state = self._state, code
        if isinstance(before, int):
            log.warning("router %s lost: %s %s", self.address, code, details)
        elif code == "UNAVAILABLE":
            log.warning("router %s cannot be reached: %s", self.address, details)
        elif code == "UNIMPLEMENTED":
            log.warning("%s is not a router's control port (--control-port, usually 50052): %s", self.address, details)
        else:
            log.warning("router %s refuses this worker: %s %s", self.address, code, with_advice(str(details)))


def pause_s(num_failures: int, who: str) -> float:
    """Returns the seconds to wait after a number of failures in a row.

    They vary by a quarter to each side, differently for each worker: workers that lost a router together do not all
    come back at once.
    """
    doubled_s = min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2.0 ** min(num_failures - 1, 10))
    spread = zlib.crc32(f"{who} {num_failures}".encode()) / 0xFFFFFFFF
    return doubled_s * (0.75 + spread / 2)


async def _resolve(target: str) -> tuple[set[str], str]:
    """Returns the addresses that `target` resolves to and an empty text, or no addresses and the reason."""
    try:
        host, port = parse(target)
        infos = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:  # ValueError: also for names that the resolver cannot encode
        return set(), f"its name cannot be resolved: {error}"
    return {join(str(sockaddr[0]), port) for *_, sockaddr in infos}, ""


async def _cancel(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
