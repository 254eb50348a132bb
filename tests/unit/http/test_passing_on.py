"""Tests an answer that is passed on to a client who has room for one event at a time."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from baton.v1 import inference_pb2
from services.core.errors import WorkerFailed
from services.router.answer import MAX_CHUNK_TOKENS, Answer, AnswerEvent, Room
from services.router.coordinator.events import EmitFinished, EmitStarted, FinishReason, Summary
from tests.support.text_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
TEXT = "abcdef"
TOKEN_IDS = TOKENIZER.encode(TEXT, add_special_tokens=False).ids
SUMMARY = Summary(2, 0, "p", "d", 0, 0.0, None, 0.0, None, None, ())


class Narrow:
    """Is a client whose room each event takes."""

    def __init__(self, num_answers: int) -> None:
        self.room = Room()
        self.events: list[AnswerEvent] = []
        self.answer = Answer(
            inference_pb2.GenerateRequest(n=num_answers),
            [1, 2],
            request_id="r",
            model_id="m",
            tokenizer=TOKENIZER,
            tokenize_ms=None,
        )

    def take(self, event: AnswerEvent) -> None:
        assert self.room.is_there, "it was not asked whether there is room"
        self.room.is_there = False
        self.events.append(event)

    async def pass_on(self) -> None:
        await self.answer.pass_on(self.take, self.room)

    async def read_all(self, passing: asyncio.Task[None]) -> None:
        for _ in range(100):
            self.room.made()
            await asyncio.sleep(0)
        assert passing.done()
        assert not self.room.awaited

    def text(self, index: int) -> str:
        chunks = [each for each in self.events if isinstance(each, inference_pb2.Chunk) and each.index == index]
        assert [token_id for each in chunks for token_id in each.token_ids] == TOKEN_IDS
        return "".join(each.text for each in chunks)


@pytest.mark.parametrize("num_answers", [1, 3])
@pytest.mark.parametrize("error", [None, WorkerFailed("it died while nothing was read")])
async def test_nothing_is_lost_and_the_end_comes_last(num_answers: int, error: WorkerFailed | None) -> None:
    client, indices = Narrow(num_answers), range(num_answers)
    answer, passing = client.answer, asyncio.create_task(client.pass_on())
    await asyncio.sleep(0)
    answer.started(EmitStarted("r", "p", 0))
    assert isinstance(client.events[0], inference_pb2.PromptInfo), "in the turn in which it comes"
    for token_id in TOKEN_IDS:
        client.room.made()
        for index in indices:
            answer.tokens([token_id], [], index)
    if error is not None:
        answer.failed(error)
    else:
        for index in indices:
            is_last = index == num_answers - 1
            answer.finished(EmitFinished("r", FinishReason.LENGTH, None, SUMMARY, index=index, is_last=is_last))
    assert not passing.done()
    await client.read_all(passing)
    assert passing.exception() is error
    assert [client.text(index) for index in indices] == [TEXT] * num_answers
    ends = [each for each in client.events if isinstance(each, inference_pb2.Completion)]
    assert sorted((each.index, each.usage.output_tokens) for each in ends) == (
        [] if error is not None else [(index, len(TOKEN_IDS)) for index in indices]
    )


async def test_what_taking_raises_ends_it() -> None:
    client = Narrow(1)
    client.room.is_there = False

    def spoil(event: Any) -> None:
        raise ZeroDivisionError(event)

    passing = asyncio.create_task(client.answer.pass_on(spoil, client.room))
    await asyncio.sleep(0)
    client.answer.started(EmitStarted("r", "p", 0))
    client.answer.tokens(TOKEN_IDS, [])
    await client.read_all(passing)
    assert isinstance(passing.exception(), ZeroDivisionError)
    client.answer.tokens(TOKEN_IDS, [])


async def test_a_client_that_is_gone_is_told_nothing_more() -> None:
    client = Narrow(1)
    passing = asyncio.create_task(client.pass_on())
    await asyncio.sleep(0)
    client.answer.started(EmitStarted("r", "p", 0))
    client.answer.tokens(TOKEN_IDS, [])
    passing.cancel()
    client.room.made()
    await asyncio.wait([passing])
    num_events = len(client.events)
    client.answer.tokens(TOKEN_IDS, [])
    client.answer.failed(WorkerFailed("later"))
    assert len(client.events) == num_events
    assert not client.room.awaited


def _long_output(answer: Answer, index: int = 0, *, is_last: bool = True) -> None:
    """Gives the answer an output of two chunks and an end."""
    answer.tokens(TOKEN_IDS[:1] * (2 * MAX_CHUNK_TOKENS), [], index)
    answer.finished(EmitFinished("r", FinishReason.LENGTH, None, SUMMARY, index=index, is_last=is_last))


async def test_answers_to_a_prompt_take_turns() -> None:
    """None of them waits until a slow client has all of another."""
    client = Narrow(2)
    client.room.is_there = False
    passing = asyncio.create_task(client.pass_on())
    await asyncio.sleep(0)
    for index in range(2):
        _long_output(client.answer, index, is_last=index == 1)
    await client.read_all(passing)
    assert [each.index for each in client.events] == [0, 1] * 3  # type: ignore[union-attr]


async def test_prompts_take_turns() -> None:
    clients = [Narrow(1), Narrow(1)]
    room, order = clients[0].room, list[int]()
    room.is_there = False

    def take(number: int, event: AnswerEvent) -> None:
        clients[0].take(event)
        order.append(number)

    passing = [
        asyncio.create_task(client.answer.pass_on(functools.partial(take, number), room))
        for number, client in enumerate(clients)
    ]
    await asyncio.sleep(0)
    for client in clients:
        _long_output(client.answer)
    for task in passing:
        await clients[0].read_all(task) if not task.done() else None
    assert sorted(order[:2]) == [0, 1]
    assert order == order[:2] * 3
