"""Tests which compiled constraints a worker keeps, and that equal ones are compiled once; with a scripted compiler."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from baton.v1 import types_pb2
from services.core.errors import BatonError, InvalidRequest, Overloaded, UnsupportedModel
from services.worker import constraints as module
from services.worker.constraints import Constraints, source_of
from tests.support.patience import HANG_S
from tests.support.scripted_constraint import OneOf
from tests.support.workers import until

SIZE = 100


@dataclass(frozen=True)
class Compiled:
    matcher: OneOf
    num_bytes: int


class ScriptedCompiler:
    """Compiles what is asked only while `may_go` is set."""

    def __init__(self, unsupported: str = "") -> None:
        self.compiled: list[tuple[str, str]] = []
        self.may_go = threading.Event()
        self.may_go.set()
        self.closed = False
        self._unsupported = unsupported

    def load(self) -> None:
        if self._unsupported:
            raise UnsupportedModel(self._unsupported)

    def compile(self, kind: str, text: str) -> Compiled:
        self.compiled.append((kind, text))
        self.may_go.wait()
        if text == "bad":
            raise InvalidRequest("constraint", "is bad")
        if text == "worse":
            raise KeyError("worse")
        return Compiled(OneOf([[7, 8, 9], list(range(100))]), SIZE)

    def interrupt(self) -> None:
        self.may_go.set()

    def close(self) -> None:
        self.closed = True


@contextlib.asynccontextmanager
async def running(compiler: ScriptedCompiler, **options: Any) -> AsyncIterator[Constraints]:
    constraints = Constraints(compiler, ThreadPoolExecutor(1), ThreadPoolExecutor(1), **options)
    constraints.load()
    try:
        yield constraints
    finally:
        await constraints.close()
        assert compiler.closed


def regex(text: str) -> types_pb2.Constraint:
    return types_pb2.Constraint(regex=text)


async def test_a_constraint_is_compiled_once_and_each_sequence_has_its_own() -> None:
    compiler = ScriptedCompiler()
    async with running(compiler) as constraints:
        first, second = await asyncio.gather(*(constraints.make(regex("a"), []) for _ in range(2)))
        third: Any = await constraints.make(regex("a"), [7, 8])
        assert compiler.compiled == [("regex", "a")]
        first.take([7])
        assert (first.taken, second.taken, third.taken) == ([7], [], [7, 8])  # type: ignore[attr-defined]
        long: Any = await constraints.make(regex("a"), list(range(80)))
        assert long.taken == list(range(80))
        with pytest.raises(InvalidRequest, match="does not take"):
            await constraints.make(regex("a"), [5])


async def test_what_another_tenant_uses_does_not_show_in_the_time() -> None:
    compiler = ScriptedCompiler()
    async with running(compiler) as constraints:
        for cache_salt in ("one", "two", "one"):
            await constraints.make(regex("a"), [], cache_salt)
    assert compiler.compiled == [("regex", "a")] * 2


async def test_the_least_recently_used_give_way() -> None:
    compiler = ScriptedCompiler()
    async with running(compiler, most_kept_bytes=2 * SIZE) as constraints:
        for text in ("a", "b", "a", "c", "a", "b"):
            await constraints.make(regex(text), [])
            assert constraints.kept_bytes == len(constraints) * SIZE <= 2 * SIZE
        assert [text for _, text in compiler.compiled] == ["a", "b", "c", "b"]


async def test_one_that_is_larger_than_all_room_is_used_and_not_kept() -> None:
    compiler = ScriptedCompiler()
    async with running(compiler, most_kept_bytes=SIZE - 1) as constraints:
        await constraints.make(regex("a"), [])
        assert (len(constraints), constraints.kept_bytes) == (0, 0)


async def test_failures_are_told_to_all_who_wait_and_are_not_kept() -> None:
    compiler = ScriptedCompiler()
    async with running(compiler) as constraints:
        outcomes = await asyncio.gather(*(constraints.make(regex("bad"), []) for _ in range(2)), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [InvalidRequest] * 2
        with pytest.raises(BatonError, match="KeyError"):
            await constraints.make(regex("worse"), [])
        assert len(constraints) == 0
        await constraints.make(regex("a"), [])


async def test_who_leaves_while_it_is_compiled_takes_it_from_nobody() -> None:
    compiler = ScriptedCompiler()
    compiler.may_go.clear()
    async with running(compiler) as constraints:
        leaving, staying = (asyncio.create_task(constraints.make(regex("a"), [])) for _ in range(2))
        await until(lambda: bool(compiler.compiled), "it is being compiled")
        leaving.cancel()
        compiler.may_go.set()
        assert await staying
        assert leaving.cancelled()
        assert len(constraints) == 1


async def test_the_line_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MOST_WAITING", 2)
    compiler = ScriptedCompiler()
    compiler.may_go.clear()
    async with running(compiler) as constraints:
        waiting = [asyncio.create_task(constraints.make(regex(text), [])) for text in ("a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await constraints.make(regex("c"), [])
        again = asyncio.create_task(constraints.make(regex("b"), []))
        compiler.may_go.set()
        await asyncio.gather(*waiting, again)


async def test_who_goes_on_by_one_that_is_kept_waits_for_no_compilation() -> None:
    compiler = ScriptedCompiler()
    async with running(compiler) as constraints:
        await constraints.make(regex("a"), [])
        compiler.may_go.clear()
        waiting = asyncio.create_task(constraints.make(regex("b"), []))
        await until(lambda: len(compiler.compiled) == 2, "it is being compiled")
        assert await asyncio.wait_for(constraints.make(regex("a"), list(range(80))), timeout=HANG_S)
        compiler.may_go.set()
        await waiting


async def test_the_wait_is_bounded() -> None:
    compiler = ScriptedCompiler()
    compiler.may_go.clear()
    async with running(compiler, most_wait_s=0.01) as constraints:
        with pytest.raises(Overloaded, match=r"for 0\.01 s"):
            await constraints.make(regex("a"), [])
        compiler.may_go.set()


async def test_what_nobody_waits_for_any_more_is_not_compiled() -> None:
    compiler = ScriptedCompiler()
    compiler.may_go.clear()
    async with running(compiler) as constraints:
        first = asyncio.create_task(constraints.make(regex("a"), []))
        await until(lambda: bool(compiler.compiled), "it is being compiled")
        leaving = [asyncio.create_task(constraints.make(regex("b"), [])) for _ in range(2)]
        staying = asyncio.create_task(constraints.make(regex("c"), []))
        await asyncio.sleep(0)
        for each in leaving:
            each.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        again = asyncio.create_task(constraints.make(regex("b"), []))
        await asyncio.sleep(0)
        compiler.may_go.set()
        await asyncio.gather(first, staying, again)
        assert [text for _, text in compiler.compiled] == ["a", "c", "b"]


async def test_closing_ends_who_waits() -> None:
    compiler = ScriptedCompiler()
    compiler.may_go.clear()
    async with running(compiler) as constraints:
        waiting = asyncio.create_task(constraints.make(regex("a"), []))
        await until(lambda: bool(compiler.compiled), "it is being compiled")
    with pytest.raises(Overloaded):
        await waiting


async def test_a_model_without_a_vocabulary_has_no_constraints() -> None:
    async with running(ScriptedCompiler("no tokenizer.json")) as constraints:
        for _ in range(2):
            with pytest.raises(UnsupportedModel, match=r"no tokenizer\.json"):
                await constraints.make(regex("a"), [])


def test_what_the_compiler_is_asked() -> None:
    choices = types_pb2.Constraint(choices=types_pb2.Choices(texts=["a.b", "c"]))
    assert source_of(choices) == ("regex", r"a\.b|c")
    assert source_of(types_pb2.Constraint(json_object=types_pb2.AnyJsonObject()))[0] == "json_schema"
    assert source_of(types_pb2.Constraint(grammar="root ::= x")) == ("grammar", "root ::= x")
