"""Checks whether this installation can compute: torch and the packages around it come with the extra `worker`."""

from __future__ import annotations

from importlib import util

from services.core.errors import BatonError


def demand_torch(purpose: str) -> None:
    """Raises a BatonError that says what to install if there is no torch. `purpose` names what needs it."""
    if util.find_spec("torch") is None:
        raise BatonError(f"{purpose} needs torch, which is not installed: pip install 'baton-serving[worker]'")
