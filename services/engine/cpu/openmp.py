"""Sets how OpenMP threads wait for each other: libgomp reads the setting when torch loads it.

Owns: how long a thread spins at the end of each parallel region, unless the user has chosen. libgomp's own default
spins for milliseconds. Nothing is faster on cores that no other process uses; where others use them too, steps take
thirty times longer. Measured with 2 threads on 2 cores, in ms for a decode step of SmolLM2-135M, alone and beside
another such worker: spinning 500 times 34 and 43, 5000 times 25 and 99, 20000 times 25 and 289.

libgomp spins only while each of its threads in a process has a core, including those that wait for the next region of
another thread. A process that computes on two threads is therefore slow on both (see `Engine`).
"""

from __future__ import annotations

import os

_CHOSEN_BY_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SPINS_ON_SHARED_CORES, _SPINS_ON_OWN_CORES = "500", "5000"


def expect_own_cores() -> None:
    """Sets a long spin, for a process whose cores nothing else uses. Call before torch is loaded; the first call of
    this or `expect_shared_cores` counts."""
    _spin(_SPINS_ON_OWN_CORES)


def expect_shared_cores() -> None:
    """Sets a short spin, for a process whose cores others may use. See `expect_own_cores` for when to call it."""
    _spin(_SPINS_ON_SHARED_CORES)


def _spin(times: str) -> None:
    if not any(name in os.environ for name in _CHOSEN_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = times
