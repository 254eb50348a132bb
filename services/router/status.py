"""Says how the router's models, workers and pairs are at one moment: to operators, the console and the activity line.

Owns: in which words. Never: a clock, or a state of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from baton.v1 import control_pb2, types_pb2
from services.router.catalogue import Catalogue, ServedModel
from services.router.components import components
from services.router.conductor import Conductor
from services.router.coordinator.loading import Loading
from services.router.coordinator.request import Phase
from services.router.coordinator.workers import Pair, Worker, WorkerState
from services.router.policy import BreakEven, PrefixBreakEven
from services.router.policy.health import Health, HealthRecord
from services.router.workers import wire

_STATES = {
    WorkerState.JOINING: control_pb2.WORKER_STATE_JOINING,
    WorkerState.READY: control_pb2.WORKER_STATE_READY,
    WorkerState.DRAINING: control_pb2.WORKER_STATE_DRAINING,
    WorkerState.LOST: control_pb2.WORKER_STATE_DOWN,
    WorkerState.LEFT: control_pb2.WORKER_STATE_LEFT,
}
_UNHEALTHY = {
    Health.NEW: control_pb2.WORKER_STATE_JOINING,
    Health.DOWN: control_pb2.WORKER_STATE_DOWN,
    Health.PROBING: control_pb2.WORKER_STATE_DOWN,
}
"""The state that is shown for a worker with an open session instead of READY, if its health is one of these."""
_PAIR_STATES = {
    Health.UP: control_pb2.PAIR_STATE_PROVEN,
    Health.RISING: control_pb2.PAIR_STATE_PROVEN,
    Health.DOWN: control_pb2.PAIR_STATE_BROKEN,
    Health.PROBING: control_pb2.PAIR_STATE_BROKEN,
}
_MOST_TOKENS = 1 << 31
"""No prompt is longer: what pays only beyond, pays for none."""


def status(catalogue: Catalogue, now: float) -> control_pb2.GetStatusResponse:
    """Returns all but the pairs, of which there may be thousands, and what is known of the router's process."""
    models, phases = catalogue.all(), catalogue.phases()
    return control_pb2.GetStatusResponse(
        ready=catalogue.ready,
        workers=[worker for model in models for worker in _workers(model, now)],
        num_queued=phases[Phase.QUEUED],
        num_prefilling=phases[Phase.PREFILLING],
        num_parked=phases[Phase.PARKED],
        num_decoding=phases[Phase.BINDING] + phases[Phase.DECODING],
        models=[_model(model, now) for model in models],
    )


def components_of(catalogue: Catalogue, found: control_pb2.GetStatusResponse) -> list[control_pb2.Component]:
    """Returns how the parts of the cluster are, of which `found` is the status."""
    states = Counter(_pair_state(pair) for _, pair in pairs(catalogue))
    share = max(model.conductor.coordinator.queue_share for model in catalogue.all())
    return components(found, states, share, stopping=catalogue.stopping)


def pairs(catalogue: Catalogue) -> Iterator[tuple[Worker, Pair]]:
    """Yields each destination with each of its pairs, of all models."""
    for model in catalogue.all():
        yield from model.conductor.pairs()


def pair_status(worker: Worker, pair: Pair) -> control_pb2.PairStatus:
    found = control_pb2.PairStatus(
        prefill=pair.source.worker_id,
        decode=worker.info.worker_id,
        state=_pair_state(pair),
        reason=_reason_of(pair.health),
    )
    if pair.timings is not None and pair.timings.HasField("transport"):
        found.transport = pair.timings.transport
    if (bytes_per_s := worker.sources.bytes_per_s(pair.source.worker_id)) is not None:
        found.bytes_per_s = int(bytes_per_s)
    return found


def _pair_state(pair: Pair) -> control_pb2.PairState:
    return _PAIR_STATES.get(pair.health.state, control_pb2.PAIR_STATE_UNPROVEN)


def state_of(worker: Worker) -> control_pb2.WorkerState:
    state = _STATES[worker.state]
    if worker.state is WorkerState.READY:
        usual = control_pb2.WORKER_STATE_EJECTED if worker.ejection is not None else state
        state = _UNHEALTHY.get(worker.health.state, usual)
    return state


def _workers(model: ServedModel, now: float) -> Iterator[control_pb2.WorkerStatus]:
    """Yields the model's workers. One that loads is shown so, and not as the process of its name that is gone."""
    loading = {each.worker.worker_id: each for each in model.conductor.coordinator.loading.all()}
    for worker in model.conductor.coordinator.workers.all():
        if worker.info.worker_id not in loading:
            yield _worker(model.conductor, worker, now)
    for each in loading.values():
        roles = [role for role, known in wire.ROLES.items() if known in each.worker.roles]
        yield control_pb2.WorkerStatus(
            worker=control_pb2.WorkerDescription(
                worker_id=each.worker.worker_id, roles=roles, layout=types_pb2.KVLayout(model_id=model.model_id)
            ),
            state=control_pb2.WORKER_STATE_LOADING,
            reason=_loads(each, now),
        )


def _loads(loading: Loading, now: float) -> str:
    left_s = loading.until_s - now
    ends = f"expected within {left_s:.0f} s" if left_s > 0 else "it takes longer than it expected"
    return f"{loading.worker.progress or 'loading'}, for {now - loading.since_s:.0f} s; {ends}"


def _worker(conductor: Conductor, worker: Worker, now: float) -> control_pb2.WorkerStatus:
    description = worker.info.description
    assert description is not None, "every worker has described itself"
    found = control_pb2.WorkerStatus(
        worker=description,
        state=state_of(worker),
        reason=_why_unready(worker, now),
        num_requests=len(set(worker.legs.values())),
    )
    link = conductor.links.get(worker.info.worker_id)
    if link is not None:
        found.has_session = link.is_open
        if link.load is not None and worker.load_s is not None:
            found.load.CopyFrom(link.load)
            found.load_age_ms = round((now - worker.load_s) * 1000)
    return found


def _why_unready(worker: Worker, now: float) -> str:
    """Returns, for people, why the worker is not ready, or what it is blamed for; empty when all is well."""
    ejected = "" if worker.ejection is None else worker.ejection.reason(now)
    return worker.reason or _reason_of(worker.health) or ejected


def _reason_of(health: HealthRecord) -> str:
    """Returns, for people, why the worker or pair is not fully trusted; empty if it is."""
    match health.state:
        case Health.UP:
            return ""
        case Health.NEW:
            return f"not proven yet: {health.reason}" if health.reason else "not proven yet"
        case Health.RISING:
            return f"back again; it was down: {health.reason}"
        case _:
            return f"{health.state.value}: {health.reason}"


def _model(model: ServedModel, now: float) -> control_pb2.ModelStatus:
    coordinator = model.conductor.coordinator
    phases = coordinator.phases()
    split, prefix = coordinator.split_break_even(now), coordinator.prefix_break_even()
    return control_pb2.ModelStatus(
        model_id=model.model_id,
        ready=model.ready,
        context_tokens=model.context_tokens,
        num_workers=sum(worker.has_session for worker in coordinator.workers.all()),
        num_queued=phases[Phase.QUEUED],
        num_live=phases.total(),
        kv_groups=[control_pb2.KVGroup(**group._asdict()) for group in coordinator.workers.kv_groups()],
        policy=model.policy,
        split_break_even=_split(split) if split is not None else None,
        prefix_break_even=_prefix(prefix) if prefix is not None else None,
    )


def _split(found: BreakEven) -> control_pb2.SplitBreakEven:
    return control_pb2.SplitBreakEven(
        prefill=found.prefill_id,
        decode=found.decode_id,
        tokens=_tokens(found.tokens),
        handoff_ms=found.handoff_ms,
    )


def _prefix(found: PrefixBreakEven) -> control_pb2.PrefixBreakEven:
    return control_pb2.PrefixBreakEven(
        source=found.source_id,
        target=found.target_id,
        tokens=_tokens(found.tokens),
        fixed_ms=found.fixed_ms,
        token_ms=found.token_ms,
        num_seen=found.num_seen,
    )


def _tokens(break_even: float) -> int | None:
    """Returns from how many tokens on it pays; None if for no prompt."""
    return None if break_even > _MOST_TOKENS else math.ceil(break_even)
