"""Defines a phase: what a worker does with the commands of one of its roles.

A worker's roles are the phases that it has. `services.prefill` and `services.decode` have one each. Never: sessions, or
what else a worker is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from baton.v1 import types_pb2
from services.worker.session import RouterSession


class WorkerPhase(Protocol):
    def begin(self, session: RouterSession, command: Any) -> None:
        """Starts the leg of a command, which adds itself to `session.legs`.

        If it raises, the caller tells the router that the leg has failed.
        """
        ...


def phase_name(role: types_pb2.WorkerRole) -> str:
    return types_pb2.WorkerRole.Name(role).removeprefix("WORKER_ROLE_").lower()


def role_name(roles: Collection[types_pb2.WorkerRole]) -> str:
    """Returns the name of a worker with these roles: that of its one phase, or "mixed"."""
    return phase_name(*roles) if len(roles) == 1 else "mixed"
