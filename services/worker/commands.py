"""Turns commands from the wire into the engine's records."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import InvalidRequest
from services.core.seeds import answer_seed
from services.engine.schedule.sequence import (
    Mode,
    SamplingParams,
    Sequence,
    StoppingParams,
)
from services.rpc.constraints import check_constraint
from services.rpc.parameters import (
    MAX_ANSWERS,
    MAX_LOGPROBS,
    check_sampling,
    check_some_token_is_left,
    check_stopping,
    within,
)

Command = worker_pb2.PrefillCommand | worker_pb2.DecodeCommand
"""A command to compute."""
AnyCommand = Command | worker_pb2.ParkCommand


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
    """Returns the engine's sequence for a command, without its constraint.

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
    if command.HasField("constraint"):
        check_constraint(command.constraint)
    within("logprobs", command.logprobs, 0, MAX_LOGPROBS)
    within("prompt_logprobs", command.prompt_logprobs, 0, MAX_LOGPROBS)
    if (
        command.HasField("prompt_logprobs")
        and isinstance(command, worker_pb2.DecodeCommand)
        and command.HasField("handoff")
    ):
        raise InvalidRequest("prompt_logprobs", "are only of a leg that computes its prompt")
    within("n", num_answers_of(command), 1, MAX_ANSWERS)
    stopping = stopping_of(command.stopping, eos_token_ids, max_model_len)
    if stopping.max_tokens <= command.output_base:
        raise InvalidRequest("stopping.max_tokens", "is already reached")
    if command.output_base < stopping.min_tokens:
        check_some_token_is_left(command.sampling, stopping.stop_token_ids)
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
        num_prompt_logprobs=command.prompt_logprobs if command.HasField("prompt_logprobs") else None,
    )


def output_of(command: Command) -> list[int]:
    """Returns the output that was received before a replay: the last of the command's tokens."""
    return list(command.token_ids[len(command.token_ids) - command.output_base :])


def num_answers_of(command: AnyCommand) -> int:
    return command.n if command.HasField("n") else 1


def further_of(first: Sequence, num_answers: int, new_seq_id: Callable[[], int]) -> list[Sequence]:
    """Returns a sequence for each answer after the first: of the same tokens, with noise of its own."""
    return [
        replace(
            first,
            seq_id=new_seq_id(),
            token_ids=list(first.token_ids),
            sampling=replace(first.sampling, seed=answer_seed(first.sampling.seed, index)),
            num_prompt_logprobs=None,  # the first scores the prompt for all
            further=[],
            block_ids=[],
            reserved_ids=[],
            hashes=[],
        )
        for index in range(1, num_answers)
    ]


def sampling_of(params: types_pb2.SamplingParams, num_logprobs: int | None) -> SamplingParams:
    given = {field.name: value for field, value in params.ListFields() if not field.is_repeated}
    return SamplingParams(
        **given,
        logit_bias={entry.token_id: entry.bias for entry in params.logit_bias},
        allowed_token_ids=tuple(params.allowed_token_ids),
        bad_token_ids=tuple(tuple(sequence.token_ids) for sequence in params.bad_token_ids),
        num_logprobs=num_logprobs,
    )


def stopping_of(params: types_pb2.StoppingParams, eos_token_ids: frozenset[int], max_model_len: int) -> StoppingParams:
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos_token_ids)
    max_tokens = params.max_tokens if params.HasField("max_tokens") else max_model_len
    return StoppingParams(max_tokens=max_tokens, min_tokens=params.min_tokens, stop_token_ids=stops)
