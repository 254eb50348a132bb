"""Tests the front, which runs above vLLM's asynchronous engine: whenever a request is given up, refused or fails, the
worker is told of its end and nothing is kept of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from services.vllm import messages
from services.vllm.messages import JsonMessage
from tests.support.fake_vllm_package import inside
from tests.support.patience import HANG_S


class Worker:
    """Is in the place of a `Link`: it sends what it was made with, and keeps what it is told."""

    def __init__(self, *sent: JsonMessage) -> None:
        self._data = [b"".join(map(messages.encode, sent)), b""]
        self.told: list[JsonMessage] = []
        self.socket = SimpleNamespace(recv=lambda most: self._data.pop(0))

    def send(self, kind: str, **fields: Any) -> None:
        self.told.append({"kind": kind, **fields})


class Llm:
    """Is vLLM's engine: it has a request once `may_add`, and a request ends with `outputs`, or when it is aborted."""

    def __init__(self, *outputs: Any, error: Exception | None = None) -> None:
        self.may_add = asyncio.Event()
        self.aborted: list[str] = []
        self._outputs, self._error = outputs, error
        self._queues: dict[str, asyncio.Queue[Any]] = {}

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        await self.may_add.wait()
        if self._error is not None:
            raise self._error
        queue = self._queues[f"{request_id}-abc"] = asyncio.Queue()
        for output in self._outputs:
            queue.put_nowait(output)
        return SimpleNamespace(request_id=f"{request_id}-abc", get_nowait=lambda: None, get=queue.get)

    async def abort(self, request_id: str, internal: bool) -> None:
        self.aborted.append(request_id)
        self._queues[request_id].put_nowait(output([], "abort"))


def output(token_ids: list[int], reason: str | None = None) -> Any:
    completion = SimpleNamespace(token_ids=token_ids, finish_reason=reason)
    return SimpleNamespace(finished=reason is not None, outputs=[completion])


def added(seq_id: int) -> JsonMessage:
    kv = {"num_imported": 0, "num_exported": 0, "slots": []}
    fields = {"tokens": [3], "salt": "", "max_tokens": 9, "kv": kv, "sampling": {"stop": []}}
    return {"kind": messages.ADD, "id": seq_id, **fields}


@pytest.fixture
def module() -> Iterator[Any]:
    with inside("main") as module:
        yield module


async def told(module: Any, llm: Llm, *sent: JsonMessage) -> list[JsonMessage]:
    """Returns what the worker is told when it has sent this before vLLM has any request."""
    worker = Worker(*sent)
    front = module.Front(worker)
    front._llm = llm
    await front._serve()
    llm.may_add.set()
    async with asyncio.timeout(HANG_S):
        await asyncio.gather(*front._tasks.values())
    await asyncio.sleep(0)  # the last outputs of a turn are told after it
    assert not front._given_up
    assert not front._request_ids
    return worker.told


async def test_what_is_given_up_before_vllm_has_it_is_aborted_as_soon_as_it_has(module: Any) -> None:
    llm = Llm()
    found = await told(module, llm, added(7), {"kind": messages.ABORT, "id": 7}, {"kind": messages.ABORT, "id": 8})
    assert llm.aborted == ["7-abc"]
    assert found == [{"kind": messages.OUTPUT, "outputs": [[7, [], "abort"]]}]


async def test_what_all_say_in_a_step_is_told_together(module: Any) -> None:
    found = await told(module, Llm(output([5], "length")), added(7), added(8))
    assert found == [{"kind": messages.OUTPUT, "outputs": [[7, [5], "length"], [8, [5], "length"]]}]


async def test_what_vllm_refuses_is_told_and_given_up_with_no_effect(module: Any) -> None:
    llm = Llm(error=ValueError("too long"))
    found = await told(module, llm, added(7), {"kind": messages.ABORT, "id": 7})
    assert found == [{"kind": messages.REFUSED, "id": 7, "error": "ValueError: too long"}]
    assert not llm.aborted


async def test_any_other_error_is_a_defect(module: Any) -> None:
    """Nobody knows what vLLM does with the request's blocks then."""
    found = await told(module, Llm(error=RuntimeError("it is dead")), added(7))
    assert found == [{"kind": messages.BROKEN, "error": "request 7: RuntimeError: it is dead"}]
