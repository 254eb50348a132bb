"""Phases of a request as a router's status shows them: each finds the worker that is in it, if there is one now."""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from baton.v1 import control_pb2
from tests.support.real_cluster import RealCluster, Status
from tests.support.streams import Missed, Streams

PHASE_WITHIN_S = 30.0
ATTEMPTS = 6
Phase = Callable[[Status], str | None]


def queued(status: Status) -> str | None:
    """Returns a prefill worker that runs some requests while others wait."""
    return _busy(status, "prefill", "num_running") if status.num_queued else None


def prefilling(status: Status) -> str | None:
    return _busy(status, "prefill", "num_running") if status.num_prefilling else None


def handing_over(status: Status) -> str | None:
    """Returns the source of a transfer that is under way."""
    return _busy(status, "prefill", "num_leases") if taking_over(status) else None


def taking_over(status: Status) -> str | None:
    """Returns the destination of a transfer that is under way."""
    return _busy(status, "decode", "num_importing")


def parking(status: Status) -> str | None:
    """Returns a store that is taking a handoff in."""
    return _busy(status, "store", "num_importing")


def parked(status: Status) -> str | None:
    """Returns a store at which a handoff waits."""
    return _busy(status, "store", "num_leases")


def decoding(status: Status) -> str | None:
    return _busy(status, "decode", "num_running") if status.num_decoding else None


def _busy(status: Status, role: str, count: str) -> str | None:
    names = (each.worker.worker_id for each in status.workers if getattr(each.load, count))
    return next((name for name in names if name.startswith(role)), None)


async def reach(cluster: RealCluster, phase: Phase, running: Streams, router: int = 0) -> str:
    """Waits for the phase; the worker that is in it. Raises Missed."""
    status = await cluster.routers[router].until(
        lambda status: phase(status) is not None or running.are_done, phase.__name__, PHASE_WITHIN_S
    )
    worker_id = phase(status)
    if worker_id is None:
        raise Missed(phase.__name__)
    return worker_id


async def strike(attempt: Callable[[], Awaitable[bool]]) -> None:
    """Tries until the attempt says that its fault has struck something: phases are short, and on a busy machine what
    the status shows may be over. What it struck, and what not, must be right every time."""
    for _ in range(ATTEMPTS):
        with contextlib.suppress(Missed):
            if await attempt():
                return
    raise AssertionError(f"the fault struck nothing in {ATTEMPTS} attempts")


async def reaches(cluster: RealCluster, worker_id: str, state: control_pb2.WorkerState, within_s: float) -> None:
    """Returns when the router has the worker in this state."""

    def is_there(status: Status) -> bool:
        return any(each.worker.worker_id == worker_id and each.state == state for each in status.workers)

    await cluster.router.until(is_there, f"{worker_id} is {control_pb2.WorkerState.Name(state)}", within_s)
