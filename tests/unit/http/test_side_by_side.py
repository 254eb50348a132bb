"""Tests several prompts in one call, with answers and a client that do what the test says and when."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from services.core.errors import BatonError, ContextLengthExceeded, NoWorker, WorkerFailed
from services.router.answer import Answer, Room
from services.router.coordinator.events import EmitFinished, EmitStarted, FinishReason, Summary
from services.router.front.call import Call, Caller, Incoming
from services.router.front.http import completions
from services.router.front.http.answers import TokenTexts
from services.router.front.http.body import Body
from services.router.front.http.generation import answer_all
from services.router.front.http.reply import Reply, http_error
from tests.support.http_client import events
from tests.support.text_model import byte_tokenizer

TOKENIZER = byte_tokenizer()
PROMPTS = ["one", "two", "three"]
NAMES = {"call-0", "call-1", "call-2"}
A, B = (TOKENIZER.encode(letter, add_special_tokens=False).ids for letter in "ab")


class Door:
    """Stands for an intake that admits at once, but for requests that the test keeps waiting or refuses."""

    def __init__(self) -> None:
        self.inside: dict[str, Answer] = {}
        self.asked: list[tuple[str, float | None, bool]] = []
        self.waits_for: dict[str, asyncio.Future[None]] = {}

    @contextlib.asynccontextmanager
    async def answer(self, call: Call) -> AsyncIterator[Answer]:
        self.asked.append((call.caller.traceparent, call.timeout_s, call.stream))
        request = call.incoming.request
        if request.request_id in self.waits_for:
            await self.waits_for[request.request_id]
        answer = Answer(
            request, [1, 2], request_id=request.request_id, model_id="m", tokenizer=TOKENIZER, tokenize_ms=None
        )
        answer.started(EmitStarted(request.request_id, "p", 0))
        self.inside[request.request_id] = answer
        try:
            yield answer
        finally:
            del self.inside[request.request_id]

    def finish(self, request_id: str) -> None:
        summary = Summary(2, 0, "p", "d", 0, 0.0, None, 0.0, None, None, ())
        self.inside[request_id].finished(EmitFinished(request_id, FinishReason.LENGTH, None, summary))


class Client:
    """Has room for messages only while it reads, as a connection whose buffers are full does."""

    def __init__(self) -> None:
        self.room = Room()
        self.room.is_there = False
        self.messages: list[Any] = []

    async def send(self, message: Any) -> None:
        assert self.room.is_there, "nobody waits for a client"
        self.messages.append(message)

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def body(self) -> str:
        return b"".join(message["body"] for message in self.messages[1:]).decode()


class Called:
    """Keeps a call under way."""

    def __init__(self, **fields: Any) -> None:
        self.door, self.client = Door(), Client()
        call = completions.read_call(Body({"prompt": PROMPTS, **fields}), TokenTexts(TOKENIZER))
        self.reply = Reply(self.client.send, self.client.room)
        write = call.writer("call", "m", self.reply).write
        door: Any = self.door
        no_model: Any = None

        def call_of(incoming: Incoming) -> Call:
            return Call(Caller(traceparent="t"), no_model, incoming, timeout_s=3.0, stream=call.options.stream)

        self.task = asyncio.create_task(answer_all(door, call.prompts, "call", write, call_of))

    async def admitted(self) -> None:
        await turns(lambda: self.door.inside.keys() == NAMES)
        await settled()

    def tokens(self, token_ids: list[int]) -> None:
        """Sends tokens to each call, one after the other."""
        for token_id in token_ids:
            for answer in self.door.inside.values():
                answer.tokens([token_id], [])


async def turns(condition: Callable[[], bool]) -> None:
    """Nothing here takes more than a few of the event loop's."""
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it does not happen")


async def settled() -> None:
    """Everyone waits for something."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_what_a_slow_client_misses_comes_together() -> None:
    called = Called(stream=True)
    await called.admitted()
    called.client.room.made()
    called.tokens(A)
    num_sent = len(called.client.messages)
    called.client.room.is_there = False
    called.tokens(B * 50)
    for name in NAMES:
        called.door.finish(name)
    await settled()
    assert len(called.client.messages) == num_sent
    called.client.room.made()
    await called.task
    *chunks, done = events(called.client.body)
    assert done == "[DONE]"
    texts: list[list[str]] = [[], [], []]
    for chunk in chunks:
        texts[chunk["choices"][0]["index"]].append(chunk["choices"][0]["text"])
    assert texts == [["a", "b" * 50, ""]] * 3
    assert called.door.inside == {}
    assert called.door.asked == [("t", 3.0, True)] * 3


@pytest.mark.parametrize("began", [False, True], ids=["nothing was sent", "in a stream"])
@pytest.mark.parametrize("failing", sorted(NAMES))
async def test_a_failure_while_the_client_does_not_read(began: bool, failing: str) -> None:
    """All calls are ended at once. What was about to be sent is whole or not there, and the failure is told."""
    called = Called(stream=True)
    await called.admitted()
    if began:
        called.client.room.made()
        called.tokens(A)
        assert len(called.client.messages) == 4, "each event is sent in the turn in which it comes"
        called.client.room.is_there = False
    called.tokens(B)
    await settled()
    assert len(called.client.messages) == (4 if began else 0)
    called.door.inside[failing].failed(WorkerFailed("no use"))
    with pytest.raises(WorkerFailed) as caught:
        await called.task
    assert called.door.inside == {}
    called.client.room.made()
    await called.reply.failed(http_error(caught.value))
    if began:
        *chunks, last = events(called.client.body)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a"] * 3
    else:
        last = json.loads(called.client.body)
    assert (called.client.status, last["error"]["code"]) == (200 if began else 503, "worker_failed")


@pytest.mark.parametrize(
    "error", [NoWorker("none"), ContextLengthExceeded.of("prompt", 9, "too much")], ids=lambda error: error.reason
)
async def test_nothing_is_written_before_all_are_admitted(error: BatonError) -> None:
    called = Called(stream=True)
    called.client.room.made()
    called.door.waits_for["call-2"] = asyncio.get_running_loop().create_future()
    await turns(lambda: len(called.door.inside) == 2)
    called.tokens(A)
    called.door.finish("call-0")
    await settled()
    assert called.client.messages == []
    called.door.waits_for["call-2"].set_exception(error)
    with pytest.raises(type(error)) as caught:
        await called.task
    assert getattr(caught.value, "field", "prompt[2]") == "prompt[2]"
    assert called.door.inside == {}
    assert called.client.messages == []


@pytest.mark.parametrize("stream", [False, True])
async def test_choices_are_in_the_order_of_the_prompts_whoever_ends_first(stream: bool) -> None:
    called = Called(stream=stream)
    called.client.room.made()
    await called.admitted()
    called.tokens(A)
    for name in sorted(NAMES, reverse=True):
        called.door.finish(name)
        await turns(lambda name=name: name not in called.door.inside)  # type: ignore[misc]
    await called.task
    if stream:
        ends = [chunk["choices"][0] for chunk in events(called.client.body)[:-1]]
        assert [choice["index"] for choice in ends if choice["finish_reason"]] == [2, 1, 0]
    else:
        choices = json.loads(called.client.body)["choices"]
        assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (1, "a"), (2, "a")]


async def test_a_defect_is_told_first() -> None:
    called = Called()
    await called.admitted()
    called.door.inside["call-0"].failed(WorkerFailed("what follows from it"))
    defect: Any = ZeroDivisionError("a defect")
    called.door.inside["call-1"].failed(defect)
    with pytest.raises(ZeroDivisionError):
        await called.task


async def test_a_client_that_is_gone_ends_all() -> None:
    called = Called(stream=True)
    await called.admitted()
    called.tokens(A)
    await settled()
    assert called.client.messages == []
    called.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await called.task
    assert called.door.inside == {}
