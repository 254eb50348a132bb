"""Turns commands from the wire into the engine's records, and sampled tokens into messages."""

from __future__ import annotations

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import InvalidRequest
from services.engine.schedule.sequence import Finish, Mode, SamplingParams, Sequence, StoppingParams, Token
from services.rpc.parameters import MAX_LOGPROBS, check_sampling, check_stopping, within

Command = worker_pb2.PrefillCommand | worker_pb2.DecodeCommand

_REASONS = {Finish.STOP: types_pb2.FINISH_REASON_STOP, Finish.LENGTH: types_pb2.FINISH_REASON_LENGTH}


def sequence_of(
    command: Command,
    *,
    seq_id: int,
    mode: Mode,
    now: float,
    max_model_len: int,
    vocab_size: int,
    eos_token_ids: frozenset[int],
) -> Sequence:
    """Returns the engine's sequence for a command.

    Raises InvalidRequest if the command is invalid, which a router should have refused before.
    """
    token_ids = list(command.token_ids)
    if not token_ids:
        raise InvalidRequest("token_ids", "is empty")
    if min(token_ids) < 0 or max(token_ids) >= vocab_size:
        raise InvalidRequest("token_ids", f"holds ids outside [0, {vocab_size})")
    if len(token_ids) >= max_model_len:
        raise InvalidRequest("token_ids", f"{len(token_ids)} tokens leave no room in a context of {max_model_len}")
    if not 0 <= command.output_base < len(token_ids):
        raise InvalidRequest("output_base", "is outside the tokens given")
    check_sampling(command.sampling, vocab_size)
    check_stopping(command.stopping, vocab_size)
    within("logprobs", command.logprobs, 0, MAX_LOGPROBS)
    stopping = stopping_of(command.stopping, eos_token_ids, max_model_len)
    if stopping.max_tokens <= command.output_base:
        raise InvalidRequest("stopping.max_tokens", "is already reached")
    return Sequence(
        seq_id=seq_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=sampling_of(command.sampling, command.logprobs if command.HasField("logprobs") else None),
        stopping=stopping,
        arrival_s=now,
        output_base=command.output_base,
        mode=mode,
        priority=command.priority,
        cache_salt=command.cache_salt,
    )


def sampling_of(params: types_pb2.SamplingParams, num_logprobs: int | None) -> SamplingParams:
    given = {field.name: value for field, value in params.ListFields() if field.name != "logit_bias"}
    bias = {entry.token_id: entry.bias for entry in params.logit_bias}
    return SamplingParams(**given, logit_bias=bias, num_logprobs=num_logprobs)


def stopping_of(params: types_pb2.StoppingParams, eos_token_ids: frozenset[int], max_model_len: int) -> StoppingParams:
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    max_tokens = params.max_tokens if params.HasField("max_tokens") else max_model_len
    return StoppingParams(max_tokens=max_tokens, min_tokens=params.min_tokens, stop_token_ids=stops)


def tokens_of(leg: int, event: Token) -> types_pb2.SequenceTokens:
    """Returns the message that carries one sampled token to the router."""
    message = types_pb2.SequenceTokens(leg=leg, position=event.position, token_ids=[event.token.token_id])
    if event.token.logprob is not None:
        top = [types_pb2.TopLogprob(token_id=t, logprob=p) for t, p in event.token.top]
        message.logprobs.append(types_pb2.TokenLogprobs(logprob=event.token.logprob, top=top))
    if event.finish is not None:
        message.finish.reason = _REASONS[event.finish]
        if event.stop_token_id is not None:
            message.finish.stop_token_id = event.stop_token_id
    return message
