"""How threads that compute wait for each other: a setting of libgomp, which reads it when torch loads it.

Owns: the length of the spin at the end of each parallel region, unless the user has chosen. Its own default spins for
milliseconds: nothing is faster on cores of one's own, and where others want them too, steps take thirty times longer.
Measured with 2 threads on 2 cores, ms a decode step of SmolLM2-135M, alone and beside another such worker: spinning
500 times 34 and 43, 5000 times 25 and 99, 20000 times 25 and 289.

libgomp spins only while all its threads in a process have a core each, those that wait for the next region of another
thread included: whoever computes on two threads of a process computes slowly on both (see `Engine`).
"""

from __future__ import annotations

import os

_CHOSEN_BY_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_SHARED, _OWN = "500", "5000"


def expect_own_cores() -> None:
    """Nothing else is to run on this process's cores. The first of the two calls counts, before torch is loaded."""
    _spin(_OWN)


def expect_shared_cores() -> None:
    """Others may want this process's cores."""
    _spin(_SHARED)


def _spin(times: str) -> None:
    if not any(name in os.environ for name in _CHOSEN_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = times
