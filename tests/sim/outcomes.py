"""Checks how a request ends: by its own doing, or because nobody could have served it, and the world's record says so.

Owns: for each request the workers that could have served it throughout, and what that forbids. Never: the tokens
(`client`).
"""

from __future__ import annotations

from tests.sim.client import SimRequest
from tests.sim.cluster import Cluster
from tests.sim.recovery import recovery_s
from tests.sim.worker import SimWorker
from tests.sim.world import World

_CRASHES = 3
"""That a request survives all but so many is what `CoordinatorConfig.max_crashes` promises."""
_JOINED_S = 1.0
"""Every worker has joined by then, if nothing is in its way."""
_NOT_SERVED = frozenset({"NO_WORKER", "OVERLOADED"})


def copies_may_stall(cluster: Cluster) -> bool:
    """A copy may take longer than a source waits for it, so imports fail now and then with nobody at fault."""
    return any(w.plan.slowest_copy_s > w.plan.config.stall_s for w in cluster.workers.values())


def waited_for_a_cut(cluster: Cluster, request: SimRequest) -> bool:
    """A way between workers was cut for ever, and the request came before that had to be known: handoffs that cannot
    cross it hold blocks until they are given up, and a pair is given up after several of them."""
    return any(
        link <= cluster.workers.keys() and request.arrival_s <= cut_s + recovery_s(cluster)
        for link, cut_s in cluster.network.cut_for_ever.items()
    )


def copies_s(cluster: Cluster) -> float:
    """Returns the most that the copies of all prompts take, one after the other through small pools."""
    block_size = min(worker.engine.info.block_size for worker in cluster.workers.values())
    num_blocks = sum(len(other.message.token_ids.ids) // block_size + 1 for other in cluster.requests)
    return num_blocks * max(worker.plan.slowest_copy_s for worker in cluster.workers.values())


def waited_for_copies(cluster: Cluster, request: SimRequest) -> bool:
    """The copies of all prompts may take as long as a request may wait."""
    return copies_s(cluster) >= cluster.routers[request.router].config.queue_timeout_s


def check_outcomes(world: World, cluster: Cluster, *, num_faults: int, num_blows: int) -> None:
    """Requires that every request ended, and in a way that it may."""
    computing = [worker for worker in cluster.workers.values() if not worker.plan.is_store]
    smallest = min(worker.engine.info.max_model_len for worker in computing)
    for request in cluster.requests:
        outcome, what = request.outcome, f"request {request.request_id} ended with {request.outcome}"
        world.require(request.over, f"request {request.request_id} never ends")
        if outcome in ("stop", "length"):
            _check_in_time(world, cluster, request)
        elif outcome == "CONSTRAINT_UNSATISFIED":
            world.require(request.message.HasField("constraint"), what)  # the request itself checks that it is so
        elif outcome == "CANCELLED":
            world.require(request.cancelled, what)
        elif outcome == "DEADLINE_EXCEEDED":
            world.require(request.deadline_s is not None, what)
        elif outcome == "CONTEXT_LENGTH_EXCEEDED":
            world.require(request.num_tokens_at_most > smallest, what)
        elif outcome == "WORKER_FAILED":
            world.require(num_blows >= _CRASHES or copies_may_stall(cluster), what)
        elif outcome == "WRONG_OUTPUT":
            world.require(cluster.wrong_worker is not None, what)
        elif outcome in ("router lost", "DRAINING"):
            world.require(num_faults or cluster.wrong_worker is not None, what)
        else:
            world.require(outcome in _NOT_SERVED, what)
            _check_refusal(world, cluster, request)


def able(cluster: Cluster, request: SimRequest, since_s: float, until_s: float) -> list[SimWorker]:
    """Returns the workers that could have computed all of it, well and in reach of its router all that time."""
    if request.has_begun and (len(request.answers) > 1 or len(cluster.block_sizes) > 1):
        return []  # it goes on where it began, and what it has received does not say by whose weights and blocks
    return [
        worker
        for name, worker in cluster.workers.items()
        if worker.plan.can_decode
        and request.num_tokens_at_most <= worker.engine.info.max_model_len
        and worker.plan.weights in request.answers  # a stream goes on where it began
        and cluster.record.calm(name, request.router, since_s, until_s)
    ]


def _check_refusal(world: World, cluster: Cluster, request: SimRequest) -> None:
    """Nobody refuses what could have been served. (A full queue, a deadline that others stand in the way of, and blocks
    that stay leased because copies of them are slow, stall or cannot pass, are reasons of their own.)"""
    assert request.ended_s is not None
    others = request.queue_was_full or request.deadline_s is not None or copies_may_stall(cluster)
    others = others or waited_for_a_cut(cluster, request) or waited_for_copies(cluster, request)
    if request.outcome == "OVERLOADED" and request.received:
        waited_s = request.ended_s - request.arrival_s
        can_have_waited = waited_s >= cluster.routers[request.router].config.queue_timeout_s
        what = f"request {request.request_id} gives way after {len(request.received)} tokens and {waited_s:.1f} s"
        world.require(can_have_waited, what)
    if request.outcome == "OVERLOADED" and others:
        return
    served_by = able(cluster, request, 0.0, request.ended_s)
    names = [worker.plan.name for worker in served_by]
    early = request.ended_s < _JOINED_S
    what = f"request {request.request_id} ended with {request.outcome}, though {names} could have served it"
    world.require(early or not names, what)


def _check_in_time(world: World, cluster: Cluster, request: SimRequest) -> None:
    """Requires that what was served was served soon, if some worker could all along: others' faults cost it their
    detection only, and slow copies their time."""
    assert request.ended_s is not None
    if copies_may_stall(cluster) or not able(cluster, request, 0.0, request.ended_s):
        return
    took_s = request.ended_s - max(request.arrival_s, _JOINED_S)
    limit_s = recovery_s(cluster) + copies_s(cluster)
    names = [worker.plan.name for worker in able(cluster, request, 0.0, request.ended_s)]
    what = f"request {request.request_id} took {took_s:.1f} s, though {names} could have served it"
    world.require(took_s <= limit_s, what)
