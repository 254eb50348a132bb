"""Translates between the session protos and the coordinator's plain data. Decides nothing.

Numbers from a worker are bounded here, where they enter. Its load and its timings are advice: an impossible figure is
read as one that was not measured, since a NaN among costs or a negative count of blocks would spread through every
forecast, score and histogram. What it reports of a request's output is not advice, and fails the leg.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Mapping
from typing import Any

from baton.v1 import control_pb2, inference_pb2, types_pb2, worker_pb2
from services.core.config import DAY_S
from services.core.errors import ProtocolViolation
from services.core.hashing import salt_in
from services.core.seeds import answer_seed
from services.core.step_average import StepAverage
from services.kv.layout import TORCH
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
    LoadingWorker,
    Parked,
    PrefillStarted,
    PrefixBrought,
    PromptComputed,
    PromptTokens,
    SendLeg,
    SequenceEnd,
    Tokens,
    WorkerInfo,
)
from services.router.coordinator.known_answers import NUM_LIKELIEST
from services.router.policy import Fingerprint, Load, Role
from services.rpc.parameters import are_logprobs
from services.rpc.status import from_status

ROLES = {
    types_pb2.WORKER_ROLE_PREFILL: Role.PREFILL,
    types_pb2.WORKER_ROLE_DECODE: Role.DECODE,
    types_pb2.WORKER_ROLE_STORE: Role.STORE,
}
# Any other reason, of a newer worker, still ends the sequence.
_FINISHES = {types_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH}
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
_ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
_STEPS = ("prefill_step", "decode_step")
_LOAD_FIELDS = tuple(name for name in Load.__dataclass_fields__ if name not in _STEPS)
_MOST_MS = DAY_S * 1000
_MOST_BYTES = 1 << 50
_MOST_OF_STEP = 1e15
"""Milliseconds, tokens or attended tokens of a step."""


def loading_worker(worker: control_pb2.LoadingWorker) -> LoadingWorker:
    """Returns what the coordinator needs of a message that `description.py` has checked."""
    roles = _roles(worker.roles)
    return LoadingWorker(worker.worker_id, roles, worker.ready_within_ms / 1000, worker.progress)


def worker_info(worker: control_pb2.WorkerDescription) -> WorkerInfo:
    """Returns what the coordinator needs of a description that `description.py` has checked."""
    return WorkerInfo(
        worker_id=worker.worker_id,
        roles=_roles(worker.roles),
        incarnation=worker.incarnation,
        fingerprint=Fingerprint(worker.fingerprint.kv, worker.fingerprint.numerics, worker.layout.engine or TORCH),
        block_size=worker.layout.block_size,
        num_blocks=worker.num_blocks,
        num_tier_blocks=worker.num_tier_blocks,
        max_model_len=worker.max_model_len,
        max_num_seqs=worker.max_num_seqs,
        model_id=worker.layout.model_id,
        host_id=worker.host_id,
        capacity=worker.capacity if worker.HasField("capacity") else 1.0,
        token_bytes=_token_bytes(worker.layout),
        hardware=f"{worker.device.partition(':')[0]} {worker.kernels}".strip(),
        description=worker,
    )


def _roles(roles: Iterable[types_pb2.WorkerRole]) -> Role:
    return functools.reduce(operator.or_, (ROLES[role] for role in roles))


def _token_bytes(layout: types_pb2.KVLayout) -> int:
    row_bytes = layout.head_dim * _ELEMENT_BYTES.get(layout.dtype, 0)
    if layout.dtype == "int8":
        row_bytes += 4  # the scale
    return 2 * layout.num_layers * layout.num_kv_heads * row_bytes


def milliseconds(seconds: float) -> int:
    """Returns a duration as it travels: whole milliseconds, never negative, and at most a day.

    The fields hold 64 bits, and a deadline further away than a day is as good as none.
    """
    return max(0, round(seconds * 1000)) if seconds < DAY_S else round(DAY_S * 1000)


def load(snapshot: types_pb2.LoadSnapshot) -> Load:
    figures = {name: _figure(getattr(snapshot, name)) for name in _LOAD_FIELDS}
    figures["prefix_tokens_hit"] = min(figures["prefix_tokens_hit"], figures["prefix_tokens_queried"])
    for name in _STEPS:
        if snapshot.HasField(name):
            figures[name] = _step_average(getattr(snapshot, name))
    return Load(**figures)


def _step_average(message: types_pb2.StepAverage) -> StepAverage:
    """Returns the averages, or those of a worker that has none if one of them is impossible: each step takes time,
    computes a token, and attends to one."""
    values = (message.ms, message.tokens, message.attended_tokens)
    are_possible = all(0 < value <= _MOST_OF_STEP for value in values)
    return StepAverage(*values, message.num_steps) if are_possible else StepAverage()


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
    if command.phase is Role.STORE:
        return worker_pb2.SessionRequest(park=_park_command(command, traceparent))
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


def _park_command(command: SendLeg, traceparent: str) -> worker_pb2.ParkCommand:
    assert command.handoff is not None, "a store computes nothing"
    return worker_pb2.ParkCommand(
        leg=command.leg,
        request_id=command.spec.label,
        handoff=worker_pb2.Handoff(lease_id=command.handoff.lease_id, source=command.handoff.source),
        num_tokens=len(command.token_ids),
        n=command.num_answers if command.num_answers > 1 else None,
        output_base=command.output_base,
        age_ms=milliseconds(command.age_s),
        remaining_ms=None if command.remaining_s is None else milliseconds(command.remaining_s),
        traceparent=traceparent,
    )


def _fill(message: Any, command: SendLeg, traceparent: str) -> None:
    """Fills in the fields that both commands have."""
    request = _CANARY if command.spec.payload is None else command.spec.payload
    message.leg = command.leg
    message.request_id = command.spec.label
    message.token_ids.extend(command.token_ids)
    message.output_base = command.output_base
    message.sampling.CopyFrom(request.sampling)
    message.stopping.CopyFrom(request.stopping)
    message.stopping.ClearField("stop")  # text exists only in the router
    message.sampling.ClearField("bad_words")
    message.stopping.max_tokens = command.max_tokens
    if command.num_answers > 1:
        message.n = command.num_answers
    if command.index:  # an answer of several that is computed again, by itself
        message.sampling.seed = answer_seed(message.sampling.seed, command.index)
    if request.HasField("constraint"):
        message.constraint.CopyFrom(request.constraint)
    if request.response.HasField("logprobs"):
        message.logprobs = request.response.logprobs
    if command.scores_prompt:
        message.prompt_logprobs = request.response.prompt_logprobs
    message.priority = command.priority
    message.cache_salt = salt_in(command.spec.epoch, command.spec.cache_salt)
    message.traceparent = traceparent
    if command.remaining_s is not None:
        message.remaining_ms = milliseconds(command.remaining_s)
    for named, info in ((message.prefix_source, command.prefix_source), (message.keep_at, command.keep_at)):
        if info is not None and (described := info.description) is not None:
            # What it offers comes with its answers: the router knows of none.
            named.address, named.incarnation = described.address, described.incarnation
            named.layout.CopyFrom(described.layout)


def verdicts(num_of: Mapping[int, int]) -> list[worker_pb2.Verdict]:
    """Returns the numbers of verdicts by incarnation as they travel."""
    return [worker_pb2.Verdict(incarnation=incarnation, number=number) for incarnation, number in num_of.items()]


def leg_event(event: worker_pb2.LegEvent) -> LegEvent | None:
    """Returns the event; None for one of a newer worker's protocol."""
    match event.WhichOneof("event"):
        case "tokens":
            return _tokens(event.tokens)
        case None:
            return None
        case "prompt_tokens":
            return _prompt_tokens(event.prompt_tokens)
        case "prefix_brought":
            brought = event.prefix_brought
            return PrefixBrought(brought.leg, max(0, brought.num_tokens), _figure(brought.ms))
        case "prompt_computed":
            return PromptComputed(event.prompt_computed.leg, max(0, event.prompt_computed.num_tokens))
        case "started":
            started = event.started
            return PrefillStarted(started.leg, started.lease_id, started.source, max(0, started.cached_tokens))
        case "parked":
            return Parked(event.parked.leg, event.parked.lease_id, event.parked.source)
        case "lease_ended":
            ended = event.lease_ended
            return LeaseEnded(ended.leg, _LEASE_ENDS.get(ended.reason, LeaseEnd.ABORTED))
        case "admitted":
            return DecodeAdmitted(event.admitted.leg, max(0, event.admitted.cached_tokens))
        case "refused":
            return DecodeRefused(event.refused.leg, event.refused.needed_blocks, event.refused.missing_blocks)
        case "ready":
            return ImportReady(event.ready.leg, event.ready.num_bytes, event.ready.copy_ms)
        case "import_failed":
            failed = event.import_failed
            return ImportFailed(failed.leg, failed.lease_alive, from_status(failed.status))
        case _:
            return LegFailed(event.failed.leg, from_status(event.failed.status))


def _prompt_tokens(message: worker_pb2.PromptTokens) -> PromptTokens | LegFailed:
    if not are_logprobs(message.logprobs):
        return LegFailed(message.leg, ProtocolViolation("log-probabilities that are none"))
    return PromptTokens(message.leg, message.position, tuple(message.logprobs))


def _tokens(message: types_pb2.SequenceTokens) -> Tokens | LegFailed:
    logprobs = tuple(message.logprobs)
    if logprobs and not are_logprobs(logprobs):
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
        logprobs,
        finish,
        timings(message.timings) if message.HasField("timings") else None,
        message.index,
    )
