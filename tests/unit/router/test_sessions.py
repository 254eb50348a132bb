"""Tests how the end of a worker's session is understood."""

from __future__ import annotations

from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2
from services.core.clock import MonotonicClock
from services.router.coordinator.events import WorkerInfo
from services.router.policy import Fingerprint, Role
from services.router.workers.sessions import SessionTimes, WorkerLink
from tests.support.link_owner import FakeChannel, Owner


@pytest.mark.parametrize(
    ("draining", "told", "details", "crashed"),
    [
        (True, False, "Internal error from Core", False),
        (False, True, "Internal error from Core", False),
        (False, False, "Internal error from Core", True),
        (True, True, "a defect", True),
    ],
    ids=["it said that it leaves", "it was told to", "out of nowhere", "a defect of the worker"],
)
async def test_a_write_that_meets_the_end_of_a_leaving_worker(
    draining: bool, told: bool, details: str, crashed: bool
) -> None:
    owner = Owner()
    info = WorkerInfo(
        "p", Role.PREFILL, 1, Fingerprint("L"), 16, 8, 128, 4, description=control_pb2.WorkerDescription(worker_id="p")
    )
    channel: Any = FakeChannel(types_pb2.LoadSnapshot(sequence_number=1, draining=draining), failure=details)
    link = WorkerLink(info, owner, 1, 1, SessionTimes(0.5, 2.0), MonotonicClock(), dial=lambda _: channel)
    if told:
        link.send_leave(5.0)
    link.start()
    assert (await owner.lost)[1] is crashed
    await link.close()
