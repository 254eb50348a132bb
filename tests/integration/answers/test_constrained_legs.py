"""Tests legs with constraints on real workers: what they say, and that nothing is left of those that fail or leave
while their constraint is compiled."""

from __future__ import annotations

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from baton.v1 import types_pb2
from services.core.errors import ConstraintUnsatisfied
from services.engine.schedule.sequence import Failed
from services.rpc.status import from_status
from services.worker.host import WorkerHost
from tests.support.models import EOS_TOKEN_ID, tiny_model
from tests.support.workers import (
    DECODE,
    GREEDY,
    MIXED,
    PREFILL,
    PROMPT,
    ScriptedRouter,
    ScriptedSession,
    decode_command,
    idle,
    prefill_command,
    running_worker,
    until,
    worker_config,
)

FORM = "(yes|no|maybe), [a-f]{3,9} and [0-9]{2,4}!"
CONSTRAINT = types_pb2.Constraint(regex=FORM)
ENDS = types_pb2.StoppingParams(max_tokens=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("constrained"))


def text_of(model: Path, token_ids: list[int]) -> str:
    return str(Tokenizer.from_file(str(model / "tokenizer.json")).decode(token_ids))


class Ends:
    """Has a prefill and a decode worker, and a router's sessions with both."""

    def __init__(self, prefill: WorkerHost, decode: WorkerHost, sessions: list[ScriptedSession]) -> None:
        self.workers = prefill, decode
        self.prefill, self.decode = sessions
        self._router = ScriptedRouter()

    async def split(self, prompt: list[int] = PROMPT, base: int = 0, **more: Any) -> tuple[list[int], Any]:
        """Returns the tokens of a handoff, token 0 from both ends, and the finish."""
        fields = {"constraint": CONSTRAINT, "output_base": base, **more}
        first, second = self._router.new_leg(), self._router.new_leg()
        await self.prefill.send(prefill=with_fields(prefill_command(first, prompt), fields))
        started = await self.prefill.next("started", first)
        await self.decode.send(decode=with_fields(decode_command(second, started, prompt), fields))
        (token, *_), _ = await self.prefill.tokens(first, 1)
        found, finish = await self.decode.tokens(second)
        assert found[0] == token
        return found, finish

    async def unsplit(self, prompt: list[int] = PROMPT, base: int = 0, **more: Any) -> tuple[list[int], Any]:
        leg = self._router.new_leg()
        fields = {"constraint": CONSTRAINT, "output_base": base, **more}
        await self.decode.send(decode=with_fields(decode_command(leg, None, prompt), fields))
        return await self.decode.tokens(leg)

    async def failure(self, constraint: types_pb2.Constraint, **more: Any) -> Any:
        leg = self._router.new_leg()
        command = with_fields(prefill_command(leg), {"constraint": constraint, **more})
        await self.prefill.send(prefill=command)
        return (await self.prefill.next("failed", leg)).status


def with_fields(command: Any, fields: dict[str, Any]) -> Any:
    command.stopping.Clear()
    command.MergeFrom(type(command)(**{"stopping": ENDS, **fields}))
    return command


@pytest.fixture
async def ends(model: Path) -> AsyncIterator[Ends]:
    router = ScriptedRouter()
    async with (
        running_worker(worker_config(model), PREFILL) as prefill,
        running_worker(worker_config(model), DECODE) as decode,
        router.session(prefill) as first,
        router.session(decode) as second,
    ):
        yield Ends(prefill, decode, [first, second])


async def test_split_is_unsplit_is_replayed(model: Path, ends: Ends) -> None:
    found, finish = await ends.split()
    text = text_of(model, found[:-1])
    assert re.fullmatch(FORM, text), text
    assert (finish.stop_token_id, found[-1]) == (EOS_TOKEN_ID, EOS_TOKEN_ID)
    assert await _tokens(ends.unsplit()) == found
    for num_received in (1, 4, len(found) - 1):
        received = found[:num_received]
        assert received + await _tokens(ends.split(PROMPT + received, num_received)) == found
        assert received + await _tokens(ends.unsplit(PROMPT + received, num_received)) == found


async def _tokens(answer: Any) -> list[int]:
    found, _ = await answer
    return found  # type: ignore[no-any-return]


async def test_adopted_in_place(model: Path) -> None:
    router = ScriptedRouter()
    async with running_worker(worker_config(model), MIXED) as worker, router.session(worker) as session:
        ends = Ends(worker, worker, [session, session])
        first, second = 11, 12
        await session.send(prefill=with_fields(prefill_command(first), {"constraint": CONSTRAINT}))
        started = await session.next("started", first)
        await session.send(decode=with_fields(decode_command(second, started), {"constraint": CONSTRAINT}))
        found, _ = await session.tokens(second)
        assert re.fullmatch(FORM, text_of(model, found[:-1]))
        assert await _tokens(ends.unsplit()) == found


async def test_length_cuts_a_document_off(ends: Ends) -> None:
    found, finish = await ends.split(stopping=types_pb2.StoppingParams(max_tokens=3))
    assert (len(found), finish.reason) == (3, types_pb2.FINISH_REASON_LENGTH)


async def test_a_constraint_that_is_none_fails_the_prefill_before_there_is_a_lease(ends: Ends) -> None:
    status = await ends.failure(types_pb2.Constraint(regex="a("))
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    error: Any = from_status(status)
    assert error.field == "constraint.regex"
    await idle(ends.workers[0])
    assert not ends.workers[0].tally.internal_errors


@pytest.mark.parametrize(
    ("stopping", "words"),
    [
        (types_pb2.StoppingParams(max_tokens=9, ignore_eos=True), "ignore_eos"),
        (types_pb2.StoppingParams(max_tokens=9, min_tokens=5), "min_tokens"),
    ],
)
async def test_where_nothing_is_left_the_request_ends_by_name(
    ends: Ends, stopping: types_pb2.StoppingParams, words: str
) -> None:
    leg = 77
    only = types_pb2.Constraint(choices=types_pb2.Choices(texts=["a"]))
    command = with_fields(decode_command(leg, None), {"constraint": only, "stopping": stopping})
    bystander = asyncio.create_task(ends.unsplit())
    await ends.decode.send(decode=command)
    status = (await ends.decode.next("failed", leg)).status
    assert status.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
    error = from_status(status)
    assert error.reason == "CONSTRAINT_UNSATISFIED"
    assert words in str(error)
    assert (await bystander)[1].stop_token_id == EOS_TOKEN_ID
    assert ends.workers[1].engine.consecutive_step_failures == 0


@pytest.mark.parametrize("how", ["cancel", "deadline"])
async def test_who_leaves_while_its_constraint_is_compiled_leaves_nothing(ends: Ends, how: str) -> None:
    fresh = types_pb2.Constraint(regex="(a|b)*c" + how)
    more = {"constraint": fresh, **({"remaining_ms": 1} if how == "deadline" else {})}
    await ends.prefill.send(prefill=with_fields(prefill_command(5), dict(more)))
    await ends.decode.send(decode=with_fields(decode_command(6, None), dict(more)))
    if how == "cancel":
        for session, leg in ((ends.prefill, 5), (ends.decode, 6)):
            await session.send(cancel={"leg": leg})
    else:
        for session, leg in ((ends.prefill, 5), (ends.decode, 6)):
            assert from_status((await session.next("failed", leg)).status).reason == "DEADLINE_EXCEEDED"
    for worker in ends.workers:
        await idle(worker)
    assert not ends.prefill.events, "nobody computed anything"
    assert (await ends.split(constraint=fresh, stopping=types_pb2.StoppingParams(max_tokens=2)))[0]


async def test_log_probabilities_are_of_what_is_allowed(ends: Ends) -> None:
    leg = 9
    only = types_pb2.Constraint(choices=types_pb2.Choices(texts=["a", "b"]))
    command = with_fields(decode_command(leg, None), {"constraint": only, "logprobs": 2})
    await ends.decode.send(decode=command)
    tokens = await ends.decode.next("tokens", leg)
    probabilities = [2.718281828**top.logprob for top in tokens.logprobs[0].top]
    assert len(probabilities) == 2
    assert sum(probabilities) == pytest.approx(1.0)
    assert GREEDY.temperature == 0
    if not tokens.HasField("finish"):
        await ends.decode.tokens(leg)


async def test_a_model_without_a_tokenizer_has_no_constraints(tmp_path: Path) -> None:
    bare = tiny_model("llama", tmp_path)
    (bare / "tokenizer.json").unlink()
    router = ScriptedRouter()
    async with running_worker(worker_config(bare), DECODE) as worker, router.session(worker) as session:
        await session.send(decode=with_fields(decode_command(1, None), {"constraint": CONSTRAINT}))
        status = (await session.next("failed", 1)).status
        assert status.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
        assert "tokenizer.json" in status.message
        await session.send(decode=decode_command(2, None))
        assert len((await session.tokens(2))[0]) == 8


async def test_a_worker_whose_leg_waits_for_a_compilation_is_not_at_rest(ends: Ends) -> None:
    """A router gives up legs with which a worker that has nothing to do does not go on."""
    fresh = types_pb2.Constraint(regex="(ab)*cd")
    await ends.prefill.send(prefill=with_fields(prefill_command(5), {"constraint": fresh}))
    await until(lambda: ends.workers[0].load_snapshot().num_running == 1, "it is compiled", pause_s=0)
    await ends.prefill.send(cancel={"leg": 5})
    await until(lambda: ends.workers[0].load_snapshot().num_running == 0, "nothing is left of it")


async def test_an_answer_that_was_given_up_fails_no_other(ends: Ends) -> None:
    """Its failure may be on its way from the step thread when the cancel comes."""
    leg = 8
    await ends.decode.send(decode=with_fields(decode_command(leg, None), {"constraint": CONSTRAINT, "n": 2}))
    await ends.decode.next("tokens", leg)
    (session,) = ends.workers[1].sessions
    running: Any = session.legs[leg]
    running.cancel_answer(1)
    running.on_event(Failed(running._sequences[1].seq_id, ConstraintUnsatisfied("nothing is left")), None)
    while not (tokens := await ends.decode.next("tokens", leg)).HasField("finish"):
        assert not [event for event in ends.decode.events if event.WhichOneof("event") == "failed"]
    assert tokens.index == 0
    await idle(ends.workers[1])


@pytest.mark.parametrize("in_place", [False, True])
async def test_a_handoff_is_complete_before_its_constraint_is_compiled(model: Path, ends: Ends, in_place: bool) -> None:
    """Its router gives up a leg that is silent for 2 s after the lease's end, and would compute all of it again."""
    async with contextlib.AsyncExitStack() as stack:
        if in_place:
            worker = await stack.enter_async_context(running_worker(worker_config(model), MIXED))
            source = destination = await stack.enter_async_context(ScriptedRouter().session(worker))
        else:
            worker, source, destination = ends.workers[1], ends.prefill, ends.decode
        may_go = threading.Event()
        stack.callback(may_go.set)
        fields = {"constraint": types_pb2.Constraint(regex="(?s:.*)")}  # it allows what a prefill without it samples
        await source.send(prefill=with_fields(prefill_command(1), {}))
        started = await source.next("started", 1)
        worker._constraints._compiles.submit(may_go.wait)
        await destination.send(decode=with_fields(decode_command(2, started), fields))
        await destination.next("ready", 2)
        assert not [event for event in destination.events if event.tokens.leg == 2], "it has no constraint yet"
        may_go.set()
        assert (await destination.tokens(2))[0]
        await idle(worker)
