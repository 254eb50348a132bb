"""Sets how long OpenMP threads spin while they wait for each other. libgomp reads the setting when torch loads it.

Owns: the number of spins at the end of a parallel region, unless the user has chosen it. By default libgomp spins for
milliseconds. That is the fastest on cores that no other process uses, but where others use them, steps take about
thirty times as long. Decode steps of SmolLM2-135M on 2 threads and 2 cores take, in milliseconds, alone and beside
another such worker: with 500 spins 34 and 43, with 5000 spins 25 and 99, with 20000 spins 25 and 289.

libgomp spins that long only while a process has no more OpenMP threads than cores, including those that wait for the
next region of another thread. A process that computes on two threads is therefore slow on both (see `Engine`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping

_CHOSEN_BY_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS_ON_SHARED_CORES, _SPINS_ON_OWN_CORES = "500", "5000"


def expect_own_cores() -> None:
    """Lets threads spin long, for a process whose cores no other process uses.

    Call it before torch is loaded. Of all calls of this function and `expect_shared_cores`, the first counts.
    """
    _spin(_SPINS_ON_OWN_CORES)


def expect_shared_cores() -> None:
    """Lets threads spin briefly, for a process whose cores others may use. Call it as `expect_own_cores`."""
    _spin(_SPINS_ON_SHARED_CORES)


def cores_are_own(environment: Mapping[str, str]) -> bool:
    """Returns whether `expect_own_cores` has decided how long threads spin in this environment."""
    return environment.get("GOMP_SPINCOUNT") == _SPINS_ON_OWN_CORES


def _spin(times: str) -> None:
    if not any(name in os.environ for name in _CHOSEN_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = times
