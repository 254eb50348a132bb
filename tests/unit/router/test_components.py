"""Tests when a part of the cluster is told to be degraded or down, and why."""

from __future__ import annotations

import pytest

from baton.v1 import control_pb2, types_pb2
from services.router.components import components

PREFILL, DECODE, STORE = types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE, types_pb2.WORKER_ROLE_STORE
READY, DOWN, LEFT = control_pb2.WORKER_STATE_READY, control_pb2.WORKER_STATE_DOWN, control_pb2.WORKER_STATE_LEFT
PROVEN, UNPROVEN, BROKEN = (
    control_pb2.PAIR_STATE_PROVEN,
    control_pb2.PAIR_STATE_UNPROVEN,
    control_pb2.PAIR_STATE_BROKEN,
)


def worker(worker_id: str, *roles, state=READY, reason: str = "", held: int = 0) -> control_pb2.WorkerStatus:
    third = held // 3
    return control_pb2.WorkerStatus(
        worker=control_pb2.WorkerDescription(worker_id=worker_id, roles=roles),
        state=state,
        reason=reason,
        load=types_pb2.LoadSnapshot(
            blocks_importing=third,
            blocks_leased=third,
            blocks_active=held - 2 * third,
            blocks_cached=5,
            blocks_free=95 - held,
        ),
    )


def amiss(*workers, pairs=None, queued: int = 0, queue_share: float = 0.0, stopping: bool = False) -> dict[str, str]:
    """Returns the parts that are not ok, with the state and the reason."""
    status = control_pb2.GetStatusResponse(workers=workers, num_queued=queued)
    found = components(status, pairs or {}, queue_share, stopping=stopping)
    state = control_pb2.ComponentState
    assert all(bool(each.reason) == (each.state != control_pb2.COMPONENT_STATE_OK) for each in found)
    return {
        each.name: f"{state.Name(each.state).rpartition('_')[2].lower()}: {each.reason}"
        for each in found
        if each.reason
    }


SPLIT = (worker("p", PREFILL), worker("d", DECODE))


def test_all_parts_are_named_and_a_store_only_if_there_is_one() -> None:
    def names(*workers) -> list[str]:
        found = components(control_pb2.GetStatusResponse(workers=workers), {}, 0.0, stopping=False)
        return [each.name for each in found]

    assert names(*SPLIT) == ["router", "prefill", "decode", "pairs", "queue", "kv"]
    assert names(*SPLIT, worker("s", STORE)) == ["router", "prefill", "decode", "store", "pairs", "queue", "kv"]


@pytest.mark.parametrize(
    ("workers", "about", "expected"),
    [
        (SPLIT, {"pairs": {PROVEN: 1}}, {}),
        ([worker("m", PREFILL, DECODE)], {}, {}),
        ([*SPLIT, worker("gone", DECODE, state=LEFT)], {}, {}),
        (
            [worker("p", PREFILL)],
            {},
            {"decode": "down: no worker has this role"},
        ),
        (
            [*SPLIT, worker("e", DECODE, state=DOWN, reason="silent for 3 s")],
            {},
            {"decode": "degraded: 1 of 2 not ready: e: silent for 3 s"},
        ),
        (
            [worker("p", PREFILL), worker("d", DECODE, state=DOWN)],
            {},
            {"decode": "down: 1 of 1 not ready: d: down"},
        ),
        (SPLIT, {"pairs": {PROVEN: 2, UNPROVEN: 1, BROKEN: 1}}, {"pairs": "degraded: 2 of 4 pairs proven, 1 broken"}),
        (SPLIT, {"pairs": {BROKEN: 1}}, {"pairs": "down: 0 of 1 pairs proven, 1 broken"}),
        (
            SPLIT,
            {"queued": 600, "queue_share": 0.6},
            {"queue": "degraded: 600 requests wait: it is 60% full (--max-queue)"},
        ),
        (
            SPLIT,
            {"queued": 9, "queue_share": 1.0},
            {"queue": "down: it is full: 9 requests wait, and more are refused (--max-queue)"},
        ),
        (
            [worker("p", PREFILL), worker("d", DECODE, held=95)],
            {},
            {"kv": "degraded: 95% of the blocks of decode workers are held"},
        ),
        ([worker("p", PREFILL), worker("d", DECODE, held=95), worker("e", DECODE)], {}, {}),
        (SPLIT, {"stopping": True}, {"router": "degraded: it stops, and takes no more requests"}),
    ],
)
def test_what_is_amiss_is_told_with_the_reason(workers, about, expected: dict[str, str]) -> None:
    assert amiss(*workers, **about) == expected
