"""Translates between the session protos and the coordinator's plain data. Decides nothing.

Numbers from a worker are bounded here, where they enter. Its load and its timings are advice: an impossible figure is
read as one that was not measured, since a NaN among costs or a negative count of blocks would spread through every
forecast, score and histogram. What it reports of a request's output is not advice, and fails the leg.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable
from typing import Any

from baton.v1 import control_pb2, inference_pb2, types_pb2, worker_pb2
from services.core.config import DAY_S
from services.core.errors import InvalidRequest, ProtocolViolation
from services.router.coordinator.actions import SendLeg
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeRefused,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegEvent,
    LegFailed,
    PrefillStarted,
    SequenceEnd,
    Tokens,
    WorkerInfo,
)
from services.router.coordinator.known_answers import NUM_LIKELIEST
from services.router.policy import Fingerprint, Load, Role
from services.router.workers.description import check_source
from services.rpc.status import from_status

ROLES = {
    types_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    types_pb2.WORKER_ROLE_DECODE: Role.DECODE,
}
# Any other reason, of a newer worker, still ends the sequence.
_FINISHES = {types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}
FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_LEASE_ENDS = {
    worker_pb2.LEASE_END_REASON_RELEASED: LeaseEnd.RELEASED,
    worker_pb2.LEASE_END_REASON_EXPIRED: LeaseEnd.EXPIRED,
}
# A canary has none of a client's options: it is greedy, never ends before its length, and can be compared.
_CANARY = inference_pb2.GenerateRequest(
    sampling=types_pb2.SamplingParams(temperature=0.0),
    stopping=types_pb2.StoppingParams(ignore_eos=True),
    response=inference_pb2.ResponseOptions(logprobs=NUM_LIKELIEST),
)
_LOAD_FIELDS = tuple(Load.__dataclass_fields__)
_MOST_MS = DAY_S * 1000
_MOST_BYTES = 1 << 50
_LEASE_ID_BYTES = 16


def worker_info(worker: control_pb2.WorkerDescription) -> WorkerInfo:
    """Returns what the coordinator needs of a description that `description.py` has checked."""
    return WorkerInfo(
        worker_id=worker.worker_id,
        roles=functools.reduce(operator.or_, (ROLES[role] for role in worker.roles)),
        incarnation=worker.incarnation,
        fingerprint=Fingerprint(worker.fingerprint.kv, worker.fingerprint.numerics),
        block_size=worker.layout.block_size,
        num_blocks=worker.num_blocks,
        max_model_len=worker.max_model_len,
        max_num_seqs=worker.max_num_seqs,
        model_id=worker.layout.model_id,
        host_id=worker.host_id,
        capacity=worker.capacity if worker.HasField("capacity") else 1.0,
        hardware=f"{worker.device.partition(':')[0]} {worker.kernels}".strip(),
        description=worker,
    )


def milliseconds(seconds: float) -> int:
    """Returns a duration as it travels: whole milliseconds, never negative, and at most a day.

    The fields hold 64 bits, and a deadline further away than a day is as good as none.
    """
    return max(0, round(seconds * 1000)) if seconds < DAY_S else round(DAY_S * 1000)


def load(snapshot: types_pb2.LoadSnapshot) -> Load:
    figures = {name: _figure(getattr(snapshot, name)) for name in _LOAD_FIELDS}
    figures["prefix_tokens_hit"] = min(figures["prefix_tokens_hit"], figures["prefix_tokens_queried"])
    return Load(**figures)


def timings(message: types_pb2.PhaseTimings) -> types_pb2.PhaseTimings:
    """Returns the timings without those that are impossible."""
    measured = types_pb2.PhaseTimings()
    for field, value in message.ListFields():
        most = _MOST_MS if field.name.endswith("_ms") else _MOST_BYTES
        if 0 <= value <= most:
            setattr(measured, field.name, value)
    return measured


def _figure(value: Any) -> Any:
    """Returns a count or milliseconds, with 0, the proto's "not known", in place of an impossible value."""
    if isinstance(value, float):
        return value if 0 <= value <= _MOST_MS else 0.0
    return max(value, 0)


def request_of(command: SendLeg, traceparent: str) -> worker_pb2.SessionRequest:
    if command.phase is Role.DECODE:
        return worker_pb2.SessionRequest(decode=_decode_command(command, traceparent))
    message = worker_pb2.PrefillCommand()
    _fill(message, command, traceparent)
    return worker_pb2.SessionRequest(prefill=message)


def _decode_command(command: SendLeg, traceparent: str) -> worker_pb2.DecodeCommand:
    message = worker_pb2.DecodeCommand(age_ms=milliseconds(command.age_s))
    _fill(message, command, traceparent)
    if command.handoff is not None:
        message.handoff.lease_id = command.handoff.lease_id
        message.handoff.source.CopyFrom(command.handoff.source)
    return message


def _fill(message: Any, command: SendLeg, traceparent: str) -> None:
    """Fills in the fields that both commands have."""
    request = _CANARY if command.spec.payload is None else command.spec.payload
    message.leg = command.leg
    message.request_id = command.spec.request_id
    message.token_ids.extend(command.token_ids)
    message.output_base = command.output_base
    message.sampling.CopyFrom(request.sampling)
    message.stopping.CopyFrom(request.stopping)
    message.stopping.ClearField("stop")  # text exists only in the router
    message.stopping.max_tokens = command.max_tokens
    if request.response.HasField("logprobs"):
        message.logprobs = request.response.logprobs
    message.priority = command.spec.priority
    message.cache_salt = command.spec.cache_salt
    message.traceparent = traceparent
    if command.remaining_s is not None:
        message.remaining_ms = milliseconds(command.remaining_s)


def leg_event(event: worker_pb2.LegEvent) -> LegEvent:
    """Returns the event. It has one of the kinds that this router knows."""
    match event.WhichOneof("event"):
        case "tokens":
            return _tokens(event.tokens)
        case "started":
            return _started(event.started)
        case "lease_ended":
            ended = event.lease_ended
            return LeaseEnded(ended.leg, ended.lease_id, _LEASE_ENDS.get(ended.reason, LeaseEnd.ABORTED))
        case "admitted":
            return DecodeAdmitted(event.admitted.leg, max(0, event.admitted.cached_tokens))
        case "refused":
            return DecodeRefused(event.refused.leg, event.refused.needed_blocks, event.refused.missing_blocks)
        case "ready":
            return ImportReady(event.ready.leg)
        case "import_failed":
            failed = event.import_failed
            return ImportFailed(failed.leg, failed.lease_alive, from_status(failed.status))
        case _:
            return LegFailed(event.failed.leg, from_status(event.failed.status))


def _started(message: worker_pb2.PrefillStarted) -> PrefillStarted | LegFailed:
    if len(message.lease_id) > _LEASE_ID_BYTES:
        return LegFailed(message.leg, ProtocolViolation(f"a lease's name of {len(message.lease_id)} bytes"))
    try:
        check_source(message.source)
    except InvalidRequest as error:
        return LegFailed(message.leg, ProtocolViolation(str(error)))
    return PrefillStarted(message.leg, message.lease_id, message.source, max(0, message.cached_tokens))


def _tokens(message: types_pb2.SequenceTokens) -> Tokens | LegFailed:
    if not _are_logprobs(message.logprobs):
        return LegFailed(message.leg, ProtocolViolation("log-probabilities that are none"))
    finish = None
    if message.HasField("finish"):
        ending = message.finish
        finish = SequenceEnd(
            _FINISHES.get(ending.reason, FinishReason.STOP),
            ending.stop_token_id if ending.HasField("stop_token_id") else None,
            timings(ending.timings) if ending.HasField("timings") else None,
        )
    return Tokens(
        message.leg,
        message.position,
        tuple(message.token_ids),
        tuple(message.logprobs),
        finish,
        timings(message.timings) if message.HasField("timings") else None,
    )


def _are_logprobs(entries: Iterable[types_pb2.TokenLogprobs]) -> bool:
    """Returns whether no log-probability is NaN or infinity, which JSON lacks. Minus infinity is a masked token's."""
    return all(
        entry.logprob < math.inf and all(top.token_id >= 0 and top.logprob < math.inf for top in entry.top)
        for entry in entries
    )
