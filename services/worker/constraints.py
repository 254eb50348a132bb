"""Gives sequences the constraints that commands carry: compiled off the event loop and off the step thread, and kept.

Owns: which compiled constraints are kept, within a bound of bytes, and that equal ones are compiled once. Never: how
one is compiled (`grammar_process`), or what the engine makes of it (`services/engine/sampling/masks.py`).
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Protocol

from baton.v1 import types_pb2
from services.core.errors import BatonError, InvalidRequest, Overloaded, UnsupportedModel, unforeseen
from services.engine.schedule.constraint import TokenConstraint
from services.worker.tasks import OwnedTasks

log = logging.getLogger(__name__)

MOST_KEPT_BYTES = 64 << 20
MOST_WAIT_S = 60.0
"""The longest that a constraint waits to be compiled, behind others: less than a router waits for a leg that is
silent, since that counts against the worker."""
_MOST_WAITING = 128
"""The most different constraints that wait to be compiled; each has up to 64 KiB."""
_INLINE_TOKENS = 32
"""The most tokens that a matcher takes on the event loop: handing these to a thread and back would take longer."""
ANY_OBJECT = '{"type": "object"}'


class Template(TokenConstraint, Protocol):
    def copy(self) -> Template:
        """Returns a constraint that has taken the same output."""
        ...


class CompiledConstraint(Protocol):
    @property
    def matcher(self) -> Template: ...

    @property
    def num_bytes(self) -> int: ...


class ConstraintCompiler(Protocol):
    """Compiles constraints, on the thread that `Constraints` has for it."""

    def load(self) -> None:
        """Gets ready. Raises UnsupportedModel, which says why, if the model's output cannot be constrained."""
        ...

    def compile(self, kind: str, text: str) -> CompiledConstraint:
        """Returns the compiled constraint. Raises InvalidRequest if it is invalid or costs too much."""
        ...

    def interrupt(self) -> None:
        """Ends what `compile` does now, on another thread, and lets it do nothing more."""
        ...

    def close(self) -> None:
        """Frees what is left, when `compile` runs no more."""
        ...


@dataclass(slots=True)
class _Compilation:
    """Is one for all who want the same constraint."""

    work: Future[CompiledConstraint]
    outcome: asyncio.Future[CompiledConstraint | BatonError]
    num_waiting: int = 0
    """How many wait for it. When all have left before it has begun, it is left out."""


class Constraints:
    """Makes the constraints of one worker's sequences. Use it on the event loop only."""

    def __init__(
        self,
        compiler: ConstraintCompiler,
        compiling: Executor,
        taking: Executor,
        *,
        most_kept_bytes: int = MOST_KEPT_BYTES,
        most_wait_s: float = MOST_WAIT_S,
    ) -> None:
        """`compiling` and `taking` have one thread each, which this object shuts down. Output is taken on one of its
        own: whoever goes on by a constraint that is kept waits for nobody's compilation."""
        self._compiler = compiler
        self._compiles = compiling
        self._takes = taking
        self._most_wait_s = most_wait_s
        self._most_kept_bytes = most_kept_bytes
        self._tasks = OwnedTasks()
        self._unsupported: UnsupportedModel | None = UnsupportedModel("this worker has not loaded its vocabulary yet")
        self._kept: OrderedDict[bytes, CompiledConstraint] = OrderedDict()
        """By the constraint's own bytes, the least recently used first."""
        self._kept_bytes = 0
        self._compiling: dict[bytes, _Compilation] = {}

    def __len__(self) -> int:
        """Returns how many compiled constraints are kept."""
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        return self._kept_bytes

    def load(self) -> None:
        """Loads what compiling needs; without it every constraint is refused. Call it before the worker serves: it
        takes up to a second, and on a thread it would hold up the event loop as well, since the library keeps the
        interpreter's lock."""
        try:
            self._compiler.load()
        except UnsupportedModel as error:
            self._unsupported = error
            log.info("constraints are refused: %s", error)
        else:
            self._unsupported = None

    async def make(self, message: types_pb2.Constraint, output: Sequence[int], cache_salt: str = "") -> TokenConstraint:
        """Returns the constraint for a sequence that has this output already.

        Raises UnsupportedModel if this model's output cannot be constrained, InvalidRequest if the constraint is
        invalid or costs too much, and Overloaded if too many others wait to be compiled, or were for too long.
        """
        if self._unsupported is not None:
            raise UnsupportedModel(str(self._unsupported))
        constraint = (await self._compiled(message, cache_salt)).matcher.copy()
        if len(output) <= _INLINE_TOKENS:
            constraint.take(output)
        else:
            await asyncio.wrap_future(self._takes.submit(constraint.take, output))
        return constraint

    async def close(self) -> None:
        """Ends what is being compiled, and what that needs."""
        self._compiler.interrupt()
        await self._tasks.close()
        self._compiles.shutdown()
        self._takes.shutdown()
        self._compiler.close()
        self._kept.clear()

    async def _compiled(self, message: types_pb2.Constraint, cache_salt: str) -> CompiledConstraint:
        # Whether another tenant has used it must not show in the time it takes.
        key = cache_salt.encode() + b"\0" + message.SerializeToString(deterministic=True)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        compilation = self._compiling.get(key)
        if compilation is None:
            if len(self._compiling) >= _MOST_WAITING:
                raise Overloaded(f"{_MOST_WAITING} constraints wait to be compiled", retry_after_s=1.0)
            work = self._compiles.submit(self._compiler.compile, *source_of(message))
            compilation = self._compiling[key] = _Compilation(work, asyncio.get_running_loop().create_future())
            self._tasks.spawn(self._compile(key, message, compilation), "compile constraint")
        # Whoever leaves does not take it from the others who wait, nor from those to come.
        compilation.num_waiting += 1
        try:
            async with asyncio.timeout(self._most_wait_s):
                outcome = await asyncio.shield(compilation.outcome)
        except TimeoutError:
            waited = f"other constraints were compiled for {self._most_wait_s:g} s"
            raise Overloaded(waited, retry_after_s=1.0) from None
        finally:
            compilation.num_waiting -= 1
            if not compilation.num_waiting and compilation.work.cancel():  # it has not begun, and others wait behind it
                del self._compiling[key]
        if isinstance(outcome, BatonError):
            raise outcome
        return outcome

    async def _compile(self, key: bytes, message: types_pb2.Constraint, compilation: _Compilation) -> None:
        outcome: CompiledConstraint | BatonError = Overloaded("the worker stops", retry_after_s=1.0)
        try:
            outcome = await asyncio.wrap_future(compilation.work)
            self._keep(key, outcome)
        except InvalidRequest as error:
            outcome = InvalidRequest(f"constraint.{message.WhichOneof('kind')}", error.description)
        except BatonError as error:
            outcome = error
        except Exception as error:
            log.exception("a constraint could not be compiled")
            outcome = unforeseen(error)
        finally:
            if self._compiling.get(key) is compilation:
                del self._compiling[key]
            if not compilation.outcome.done():
                compilation.outcome.set_result(outcome)

    def _keep(self, key: bytes, compiled: CompiledConstraint) -> None:
        if compiled.num_bytes > self._most_kept_bytes:
            return
        self._kept[key] = compiled
        self._kept_bytes += compiled.num_bytes
        while self._kept_bytes > self._most_kept_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._kept_bytes -= oldest.num_bytes


def source_of(message: types_pb2.Constraint) -> tuple[str, str]:
    """Returns the kind and the text by which a `ConstraintCompiler` knows the constraint."""
    match message.WhichOneof("kind"):
        case "json_object":
            return "json_schema", ANY_OBJECT
        case "choices":
            return "regex", any_of(message.choices.texts)
        case kind:
            return str(kind), str(getattr(message, str(kind)))


_META = frozenset(r"\.+*?()|[]{}^$#&-~")


def any_of(texts: Sequence[str]) -> str:
    """Returns the regular expression of some texts."""
    return "|".join("".join(f"\\{each}" if each in _META else each for each in text) for text in texts)
