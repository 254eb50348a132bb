"""Between the session protos and the coordinator's plain data. Decides nothing."""

from __future__ import annotations

from typing import Any

from baton.v1 import control_pb2, decode_pb2, inference_pb2, prefill_pb2, types_pb2
from services.core.errors import InvalidRequest
from services.router.coordinator.actions import SendDecode, SendPrefill
from services.router.coordinator.events import (
    DecodeAdmitted,
    DecodeEvent,
    DecodeRefused,
    Finish,
    FinishReason,
    ImportFailed,
    ImportReady,
    LeaseEnd,
    LeaseEnded,
    LegFailed,
    PrefillEvent,
    PrefillStarted,
    Tokens,
    WorkerInfo,
)
from services.router.policy import Load, Role
from services.rpc.status import from_status

ROLES = {
    types_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    types_pb2.WORKER_ROLE_DECODE: Role.DECODE,
    types_pb2.WORKER_ROLE_MIXED: Role.MIXED,
}
# Anything else a newer worker might say still ends the sequence.
_FINISHES = {types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}
FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}
_LEASE_ENDS = {
    prefill_pb2.LEASE_END_REASON_RELEASED: LeaseEnd.RELEASED,
    prefill_pb2.LEASE_END_REASON_EXPIRED: LeaseEnd.EXPIRED,
}
# What the coordinator asks of itself has no client's options: greedy, and never over before its length.
_CANARY = inference_pb2.GenerateRequest(
    sampling=types_pb2.SamplingParams(temperature=0.0), stopping=types_pb2.StoppingParams(ignore_eos=True)
)
_LOAD_FIELDS = tuple(Load.__dataclass_fields__)


def worker_info(worker: control_pb2.WorkerDescription) -> WorkerInfo:
    """Raises InvalidRequest naming the field."""
    for name in ("worker_id", "role", "address", "incarnation"):
        if not getattr(worker, name):
            raise InvalidRequest(f"worker.{name}", "is missing")
    for name in ("num_blocks", "max_model_len", "max_num_seqs"):
        if getattr(worker, name) < 1:
            raise InvalidRequest(f"worker.{name}", "must be positive")
    if worker.role not in ROLES:
        raise InvalidRequest("worker.role", "is unknown")
    if worker.layout.block_size < 1:
        raise InvalidRequest("worker.layout.block_size", "must be positive")
    return WorkerInfo(
        worker_id=worker.worker_id,
        role=ROLES[worker.role],
        incarnation=worker.incarnation,
        layout=worker.layout.SerializeToString(deterministic=True),
        block_size=worker.layout.block_size,
        num_blocks=worker.num_blocks,
        max_model_len=worker.max_model_len,
        max_num_seqs=worker.max_num_seqs,
        host_id=worker.host_id,
        description=worker,
    )


def load(snapshot: types_pb2.LoadSnapshot) -> Load:
    return Load(**{name: getattr(snapshot, name) for name in _LOAD_FIELDS})


def prefill_events(response: prefill_pb2.PrefillServiceSessionResponse) -> list[PrefillEvent]:
    return [_prefill_event(event) for event in response.events if event.WhichOneof("event")]


def decode_events(response: decode_pb2.DecodeServiceSessionResponse) -> list[DecodeEvent]:
    return [_decode_event(event) for event in response.events if event.WhichOneof("event")]


def prefill_request(command: SendPrefill, traceparent: str) -> prefill_pb2.PrefillServiceSessionRequest:
    message = prefill_pb2.PrefillCommand()
    _fill(message, command, traceparent)
    return prefill_pb2.PrefillServiceSessionRequest(prefill=message)


def decode_request(command: SendDecode, traceparent: str) -> decode_pb2.DecodeServiceSessionRequest:
    message = decode_pb2.DecodeCommand(age_ms=round(command.age_s * 1000))
    _fill(message, command, traceparent)
    if command.handoff is not None:
        message.handoff.lease_id = command.handoff.lease_id
        source = command.handoff.source
        assert isinstance(source, types_pb2.KVSource)
        message.handoff.source.CopyFrom(source)
    return decode_pb2.DecodeServiceSessionRequest(decode=message)


def _fill(message: Any, command: SendPrefill | SendDecode, traceparent: str) -> None:
    """The fields that both commands have."""
    request = _CANARY if command.spec.payload is None else command.spec.payload
    assert isinstance(request, inference_pb2.GenerateRequest)
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
        message.remaining_ms = round(command.remaining_s * 1000)


def _prefill_event(event: prefill_pb2.PrefillEvent) -> PrefillEvent:
    match event.WhichOneof("event"):
        case "started":
            started = event.started
            return PrefillStarted(started.leg, started.lease_id, started.source, started.cached_tokens)
        case "tokens":
            return _tokens(event.tokens)
        case "failed":
            return LegFailed(event.failed.leg, from_status(event.failed.status))
        case _:
            ended = event.lease_ended
            return LeaseEnded(ended.leg, ended.lease_id, _LEASE_ENDS.get(ended.reason, LeaseEnd.ABORTED))


def _decode_event(event: decode_pb2.DecodeEvent) -> DecodeEvent:
    match event.WhichOneof("event"):
        case "tokens":
            return _tokens(event.tokens)
        case "admitted":
            return DecodeAdmitted(event.admitted.leg, event.admitted.cached_tokens)
        case "refused":
            return DecodeRefused(event.refused.leg, event.refused.needed_blocks, event.refused.missing_blocks)
        case "ready":
            return ImportReady(event.ready.leg)
        case "import_failed":
            failed = event.import_failed
            return ImportFailed(failed.leg, failed.lease_alive, from_status(failed.status))
        case _:
            return LegFailed(event.failed.leg, from_status(event.failed.status))


def _tokens(message: types_pb2.SequenceTokens) -> Tokens:
    finish = None
    if message.HasField("finish"):
        ending = message.finish
        finish = Finish(
            _FINISHES.get(ending.reason, FinishReason.STOP),
            ending.stop_token_id if ending.HasField("stop_token_id") else None,
            ending.timings if ending.HasField("timings") else None,
        )
    return Tokens(
        message.leg,
        message.position,
        tuple(message.token_ids),
        tuple(message.logprobs),
        finish,
        message.timings if message.HasField("timings") else None,
    )
