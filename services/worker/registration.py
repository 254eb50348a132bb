"""Workers find routers: join every address given, again and again, so that a restarted router is rejoined unasked."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

import grpc

from baton.v1 import control_pb2, control_pb2_grpc

log = logging.getLogger(__name__)

Dial = Callable[[str], grpc.aio.Channel]

_RETRY_S = 1.0
_CALL_TIMEOUT_S = 2.0


async def keep_registered(target: str, describe: Callable[[], control_pb2.WorkerDescription], dial: Dial) -> None:
    """Registers with every address `target` (host:port) resolves to, until cancelled."""
    channels: dict[str, grpc.aio.Channel] = {}
    joined: dict[str, int] = {}
    try:
        while True:
            addresses = await _resolve(target)
            for gone in channels.keys() - addresses:
                await channels.pop(gone).close()
            for address in addresses - channels.keys():
                channels[address] = dial(address)
            answers = await asyncio.gather(
                *(_register(address, channels[address], describe(), joined) for address in sorted(addresses))
            )
            await asyncio.sleep(min([_RETRY_S, *(answer for answer in answers if answer is not None)]))
    finally:
        for channel in channels.values():
            await channel.close()


async def _register(
    address: str, channel: grpc.aio.Channel, worker: control_pb2.WorkerDescription, joined: dict[str, int]
) -> float | None:
    """Seconds until the next registration, or None when the router cannot be reached."""
    stub = control_pb2_grpc.RegistryServiceStub(channel)
    try:
        answer = await stub.Register(control_pb2.RegisterRequest(worker=worker), timeout=_CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        if joined.pop(address, None) is not None:
            log.warning("router %s lost: %s %s", address, error.code().name, error.details())
        elif error.code() is not grpc.StatusCode.UNAVAILABLE:
            log.warning("router %s refuses this worker: %s %s", address, error.code().name, error.details())
        return None
    if joined.get(address) != answer.router_incarnation:
        joined[address] = answer.router_incarnation
        log.info("joined router %s (incarnation %x)", address, answer.router_incarnation)
    return answer.interval_ms / 1000


async def _resolve(target: str) -> set[str]:
    host, _, port = target.rpartition(":")
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        log.warning("cannot resolve router %s: %s", target, error)
        return set()
    return {f"[{sockaddr[0]}]:{port}" if ":" in str(sockaddr[0]) else f"{sockaddr[0]}:{port}" for *_, sockaddr in infos}
