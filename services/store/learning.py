"""Learns from the routers what a store is to keep: the layout of the workers of one model.

Owns: which layout that is, and when it is of no more use. Never: what is kept.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

import grpc

from baton.v1 import control_pb2, control_pb2_grpc, types_pb2
from services.core.clock import Clock
from services.kv.layout import Layout
from services.kvtransfer.wire import layout_from_proto
from services.rpc.channels import Dial

log = logging.getLogger(__name__)

_ASK_EVERY_S = 1.0
_CALL_TIMEOUT_S = 2.0


class Teachers:
    """Asks routers which workers they have. Close it at the end."""

    def __init__(self, routers: Sequence[str], dial: Dial) -> None:
        """`routers` are their control ports, host:port."""
        self._channels = [dial(address) for address in routers]
        self._complaint = ""

    async def workers(self) -> list[control_pb2.WorkerDescription]:
        """Returns the workers that compute and have a session with a router that answers."""
        answers = await asyncio.gather(*map(self._ask, self._channels))
        return [worker for answer in answers for worker in answer]

    async def close(self) -> None:
        for channel in self._channels:
            await channel.close()

    async def _ask(self, channel: grpc.aio.Channel) -> list[control_pb2.WorkerDescription]:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        try:
            answer = await stub.GetStatus(control_pb2.GetStatusRequest(), timeout=_CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            complaint = f"{error.code().name} {error.details()}"
            if complaint != self._complaint:
                log.warning("a router cannot be asked for its workers: %s", complaint[:300])
                self._complaint = complaint
            return []
        return [each.worker for each in answer.workers if each.has_session and computes(each.worker)]


def computes(worker: control_pb2.WorkerDescription) -> bool:
    return types_pb2.WORKER_ROLE_STORE not in worker.roles


def chosen(workers: Iterable[control_pb2.WorkerDescription], model: str) -> control_pb2.WorkerDescription | None:
    """Returns a worker whose layout a store of that model is to keep: the layout that most of its workers have.

    With an empty name it is the model of the first worker by name, so that all who are asked say the same.
    """
    ordered = sorted(workers, key=lambda each: each.worker_id)
    of_model = [each for each in ordered if each.layout.model_id == (model or ordered[0].layout.model_id)]
    numbers = Counter(each.fingerprint.kv for each in of_model)
    return max(of_model, key=lambda each: numbers[each.fingerprint.kv], default=None)


async def learn(teachers: Teachers, model: str) -> control_pb2.WorkerDescription:
    """Waits until a worker of the model is there whose layout makes sense, and returns its description."""
    told = False
    while True:
        worker = chosen(await teachers.workers(), model)
        if worker is not None and is_sound(worker):
            return worker
        if not told:
            log.info("waiting for workers of %s, whose KV is to be kept", f"model {model!r}" if model else "any model")
            told = True
        await asyncio.sleep(_ASK_EVERY_S)


def is_sound(worker: control_pb2.WorkerDescription) -> bool:
    """Returns whether the layout is the one that the fingerprint names, with blocks of a size that can be reckoned."""
    layout = layout_from_proto(worker.layout)
    try:
        return layout.block_bytes > 0 and layout.fingerprint == worker.fingerprint.kv
    except KeyError:  # a type of cache that this version does not know
        return False


async def outlived(teachers: Teachers, layout: Layout, model: str, *, after_s: float, clock: Clock) -> None:
    """Returns when for `after_s` no worker had this layout, and others of the model were there."""
    since_s: float | None = None
    while since_s is None or clock.now() - since_s < after_s:
        await asyncio.sleep(min(_ASK_EVERY_S, after_s / 4))
        workers = await teachers.workers()
        useful = any(each.fingerprint.kv == layout.fingerprint for each in workers)
        if useful or (other := chosen(workers, model)) is None or not is_sound(other):
            since_s = None
        elif since_s is None:
            since_s = clock.now()
