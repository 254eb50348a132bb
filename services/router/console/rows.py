"""Describes workers, pairs and requests as JSON data for the console's page.

Owns: the names and units of what the page is given. Never: when it is given (`feed.py`), or text of clients beyond what
timelines keep.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from baton.v1 import control_pb2, types_pb2
from services.router.catalogue import Catalogue
from services.router.coordinator.workers import Pair, Worker
from services.router.front.operator.timeline_messages import now_of, phase, stages
from services.router.telemetry.timelines import Timeline, TimelineStage
from services.router.workers.wire import worker_info
from services.rpc.plain import enum_word

_FEWER_STAGES = 12
_TIMINGS = [field.name for field in types_pb2.PhaseTimings.DESCRIPTOR.fields if field.name != "transport"]


def phases_row(status: control_pb2.GetStatusResponse) -> dict[str, int]:
    return {
        "queued": status.num_queued,
        "prefilling": status.num_prefilling,
        "parked": status.num_parked,
        "decoding": status.num_decoding,
    }


def model_row(model: control_pb2.ModelStatus) -> dict[str, Any]:
    split = None
    if model.HasField("split_break_even"):
        found = model.split_break_even
        split = {
            "prefill": found.prefill,
            "decode": found.decode,
            "tokens": found.tokens if found.HasField("tokens") else None,
            "handoff_ms": _rounded(found.handoff_ms) if found.HasField("handoff_ms") else None,
        }
    return {
        "id": model.model_id,
        "ready": model.ready,
        "policy": model.policy,
        "queued": model.num_queued,
        "live": model.num_live,
        "workers": model.num_workers,
        "context_tokens": model.context_tokens,
        "split": split,
    }


def worker_row(status: control_pb2.WorkerStatus) -> dict[str, Any]:
    about, info, load = status.worker, worker_info(status.worker), status.load
    return {
        "id": info.worker_id,
        "roles": [info.roles.label],
        "model": info.model_id,
        "state": enum_word(control_pb2.WorkerState.DESCRIPTOR, status.state),
        "reason": status.reason,
        "address": about.address,
        "host": about.host_id,
        "pid": about.pid,
        "device": about.device,
        "kernels": about.kernels,
        "fingerprint": str(info.fingerprint),
        "blocks": {
            "importing": load.blocks_importing,
            "leased": load.blocks_leased,
            "active": load.blocks_active,
            "cached": load.blocks_cached,
            "free": load.blocks_free,
        },
        "running": load.num_running,
        "waiting": load.num_waiting,
        "queued_tokens": load.queued_prefill_tokens,
        "requests": status.num_requests,
        "prefill_step_ms": _rounded(load.prefill_step.ms) if load.HasField("prefill_step") else None,
        "decode_step_ms": _rounded(load.decode_step.ms) if load.HasField("decode_step") else None,
        "current_step_ms": _rounded(load.current_step_ms),
        "prefix_queried": load.prefix_tokens_queried,
        "prefix_hit": load.prefix_tokens_hit,
        "preemptions": load.num_preemptions,
        "load_age_ms": round(status.load_age_ms / 1000) * 1000 if status.HasField("load") else None,
    }


def pair_key(worker: Worker, pair: Pair, now: float) -> tuple[Any, ...]:
    """Returns what the pair's row shows, to find out cheaply whether that has changed."""
    time_ = worker.sources.handoff_times.get(pair.source.worker_id)
    transport = pair.timings.transport if pair.timings is not None and pair.timings.HasField("transport") else 0
    return pair.health.state, pair.health.reason, transport, _rounded(time_.average_ms(now) if time_ else None)


def pair_row(pair: control_pb2.PairStatus, handoff_ms: float | None) -> dict[str, Any]:
    return {
        "prefill": pair.prefill,
        "decode": pair.decode,
        "state": enum_word(control_pb2.PairState.DESCRIPTOR, pair.state),
        "reason": pair.reason,
        "transport": _transport(pair.transport),
        "handoff_ms": handoff_ms,
    }


def request_row(catalogue: Catalogue, timeline: Timeline, epoch_s: float, *, in_full: bool = True) -> dict[str, Any]:
    """Returns what the page shows of a request. `epoch_s` is what makes Unix time of the router's
    clock. Without `in_full` it has no text, and the newest stages only: so rows of many requests stay small."""
    live, times, arrived_s = now_of(catalogue, timeline), timeline.times, timeline.arrived_s
    return {
        "number": timeline.number,
        "id": timeline.label,
        "model": timeline.model,
        "trace_id": timeline.trace_id,
        "arrived": round(epoch_s + arrived_s, 3),
        "phase": phase(timeline, live),
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": live.cached_tokens if live is not None else timeline.cached_tokens,
        "output_tokens": times.num_tokens,
        "max_tokens": timeline.max_tokens,
        "priority": timeline.priority,
        "ttft_ms": None if times.first_s is None else _ms(times.first_s - arrived_s),
        "total_ms": None if timeline.ended_s is None else _ms(timeline.ended_s - arrived_s),
        "tpot_ms": None if times.per_token_s is None else _ms(times.per_token_s),
        "longest_itl_ms": None if times.num_tokens < 2 else _ms(times.longest_gap_s),
        "prefill_worker": timeline.prefill_worker,
        "decode_worker": timeline.decode_worker,
        "outcome": timeline.outcome,
        "failure": timeline.failure,
        "retries": live.num_retries if live is not None else timeline.num_retries,
        "stages": [_stage(each, arrived_s) for each in stages(timeline, live)[0 if in_full else -_FEWER_STAGES :]],
        "timings": timings_row(timeline.timings),
        "prompt": timeline.prompt if in_full else "",
        "output": timeline.output if in_full else "",
    }


def request_key(catalogue: Catalogue, timeline: Timeline) -> Hashable:
    """Returns something that changes whenever the request's row does by more than tokens and the times of these."""
    live, num_over = now_of(catalogue, timeline), sum(stage.ended_s is not None for stage in timeline.stages)
    where = None if live is None else (live.phase, live.cached_tokens, live.num_retries)
    return timeline.ended_s, where, len(timeline.stages), num_over


def timings_row(timings: types_pb2.PhaseTimings | None) -> dict[str, Any]:
    """Returns what is known of the phases, by the names of the protocol, with the transport in a word."""
    if timings is None:
        return {}
    found: dict[str, Any] = {name: _rounded(getattr(timings, name)) for name in _TIMINGS if timings.HasField(name)}
    if timings.HasField("transport"):
        found["transport"] = _transport(timings.transport)
    return found


def _stage(stage: TimelineStage, arrived_s: float) -> dict[str, Any]:
    return {
        "name": stage.name,
        "start_ms": _ms(stage.started_s - arrived_s),
        "end_ms": None if stage.ended_s is None else _ms(stage.ended_s - arrived_s),
        "worker": stage.worker_id,
        "leg": stage.leg,
        "attempt": stage.attempt,
        "outcome": stage.outcome,
    }


def _transport(value: int) -> str | None:
    return enum_word(types_pb2.Transport.DESCRIPTOR, value) if value else None


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)
