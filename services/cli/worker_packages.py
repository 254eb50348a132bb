"""Checks what this installation can do: torch and the packages around it come with the extra `worker`, what a worker
needs whose engine is vLLM with `worker-vllm`, what draws pictures with `plot`."""

from __future__ import annotations

from importlib import util

from services.core.errors import BatonError


def demand_torch(purpose: str) -> None:
    """Raises a BatonError that says what to install if there is no torch. `purpose` names what needs it."""
    _demand("torch", "worker", purpose)


def demand_numpy(purpose: str) -> None:
    """Raises a BatonError that says what to install if a worker without torch lacks what copies blocks."""
    _demand("numpy", "worker-vllm", purpose)


def demand_plots(purpose: str) -> None:
    """Raises a BatonError that says what to install if there is no matplotlib."""
    _demand("matplotlib", "plot", purpose)


def _demand(package: str, extra: str, purpose: str) -> None:
    if util.find_spec(package) is None:
        raise BatonError(f"{purpose} needs {package}, which is not installed: pip install 'baton-serving[{extra}]'")
