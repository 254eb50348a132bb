"""Sets how long OpenMP threads spin while they wait for each other, and whether each keeps to one core. libgomp reads
the settings when torch loads it.

Owns: the number of spins at the end of a parallel region, unless the user has chosen how threads wait, and the binding
of threads to cores, unless the user has chosen how they wait or where they run.

By default libgomp spins for milliseconds. That is the fastest on cores that no other process uses, but where others use
them, steps take about thirty times as long. Decode steps of SmolLM2-135M on 2 threads and 2 cores take, in
milliseconds, alone and beside another such worker: with 500 spins 34 and 43, with 5000 spins 25 and 99, with 20000
spins 25 and 289.

libgomp spins that long only while a process has no more OpenMP threads than cores, including those that wait for the
next region of another thread. A process that computes on two threads is therefore slow on both (see `Engine`).

Threads that are not bound may all wake up on one core after a pause, if something else has run on the others, and wait
there for one another until the system moves one: a prompt of 97 tokens that comes half a second after the last one then
takes 150 to 170 ms on 2 threads and a busy machine, and 92 where each thread has its core. Only threads that compute
are bound, by their first parallel region; the event loop, which computes nothing, runs where there is room.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

_WAITING_CHOSEN_BY_USERS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_BINDING_CHOSEN_BY_USERS = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY")
_SPINS_ON_SHARED_CORES, _SPINS_ON_OWN_CORES = "500", "5000"


def expect_own_cores() -> None:
    """Lets threads spin long, and keeps each to one core, for a process whose cores no other worker uses.

    Call it before torch is loaded. Of all calls of this function and `expect_shared_cores`, the first counts.
    """
    if not _chosen(_WAITING_CHOSEN_BY_USERS) and not _chosen(_BINDING_CHOSEN_BY_USERS):
        os.environ["OMP_PROC_BIND"] = "true"
    _spin(_SPINS_ON_OWN_CORES)


def expect_shared_cores() -> None:
    """Lets threads spin briefly, for a process whose cores others may use. Call it as `expect_own_cores`."""
    _spin(_SPINS_ON_SHARED_CORES)


def _spin(times: str) -> None:
    if not _chosen(_WAITING_CHOSEN_BY_USERS):
        os.environ["GOMP_SPINCOUNT"] = times


def _chosen(names: Sequence[str]) -> bool:
    return any(name in os.environ for name in names)
