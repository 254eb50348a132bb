"""Says how the parts of a cluster are: the router, each role, the pairs, the queue and the KV blocks. Pure.

Owns: when a part works with less than at other times (degraded) and when not at all (down), and the reason in words.
Never: whether requests are served (`Catalogue.ready`): they may all be while a part is down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from baton.v1 import control_pb2, types_pb2

_OK = control_pb2.COMPONENT_STATE_OK
_DEGRADED = control_pb2.COMPONENT_STATE_DEGRADED
_DOWN = control_pb2.COMPONENT_STATE_DOWN
_ROLES = {
    types_pb2.WORKER_ROLE_PREFILL: "prefill",
    types_pb2.WORKER_ROLE_DECODE: "decode",
    types_pb2.WORKER_ROLE_STORE: "store",
}
_CROWDED, _HELD = 0.5, 0.9
"""Shares of the queue, and of the blocks of all workers of a role, from which on a part is degraded."""

_Verdict = tuple["control_pb2.ComponentState", str]


def components(
    status: control_pb2.GetStatusResponse,
    pairs: Mapping[control_pb2.PairState, int],
    queue_share: float,
    *,
    stopping: bool,
) -> list[control_pb2.Component]:
    """Returns the parts. `pairs` counts the pairs of workers by state; `queue_share` is how full the fullest queue of a
    model is, from 0 to 1."""
    workers = [each for each in status.workers if each.state != control_pb2.WORKER_STATE_LEFT]
    by_role = {role: [each for each in workers if role in each.worker.roles] for role in _ROLES}
    found: dict[str, _Verdict] = {
        "router": (_DEGRADED, "it stops, and takes no more requests") if stopping else (_OK, ""),
        **{
            name: _role(by_role[role])
            for role, name in _ROLES.items()
            if by_role[role] or role != types_pb2.WORKER_ROLE_STORE
        },
        "pairs": _pairs(pairs),
        "queue": _queue(status.num_queued, queue_share),
        "kv": _blocks(by_role),
    }
    return [control_pb2.Component(name=name, state=state, reason=why) for name, (state, why) in found.items()]


def _role(workers: Sequence[control_pb2.WorkerStatus]) -> _Verdict:
    amiss = [each for each in workers if not _is_ready(each)]
    if not workers:
        return _DOWN, "no worker has this role"
    if not amiss:
        return _OK, ""
    first = amiss[0]
    why = first.reason or control_pb2.WorkerState.Name(first.state).removeprefix("WORKER_STATE_").lower()
    which = f"{len(amiss)} of {len(workers)} not ready: {first.worker.worker_id}: {why}"
    return (_DOWN if len(amiss) == len(workers) else _DEGRADED), which


def _pairs(states: Mapping[control_pb2.PairState, int]) -> _Verdict:
    num, proven = sum(states.values()), states.get(control_pb2.PAIR_STATE_PROVEN, 0)
    broken = states.get(control_pb2.PAIR_STATE_BROKEN, 0)
    if proven == num:  # workers that do both need none
        return _OK, ""
    why = f"{proven} of {num} pairs proven" + (f", {broken} broken" if broken else "")
    return (_DOWN if broken == num else _DEGRADED), why


def _queue(num_queued: int, share: float) -> _Verdict:
    if share >= 1:
        return _DOWN, f"it is full: {num_queued} requests wait, and more are refused (--max-queue)"
    if share >= _CROWDED:
        return _DEGRADED, f"{num_queued} requests wait: it is {share:.0%} full (--max-queue)"
    return _OK, ""


def _blocks(by_role: Mapping[types_pb2.WorkerRole, Sequence[control_pb2.WorkerStatus]]) -> _Verdict:
    for role in (types_pb2.WORKER_ROLE_PREFILL, types_pb2.WORKER_ROLE_DECODE):
        held = total = 0
        for load in (each.load for each in by_role[role] if _is_ready(each)):
            of_worker = load.blocks_importing + load.blocks_leased + load.blocks_active
            held += of_worker
            total += of_worker + load.blocks_cached + load.blocks_free
        if total and held >= _HELD * total:
            return _DEGRADED, f"{held / total:.0%} of the blocks of {_ROLES[role]} workers are held"
    return _OK, ""


def _is_ready(worker: control_pb2.WorkerStatus) -> bool:
    return worker.state == control_pb2.WORKER_STATE_READY
