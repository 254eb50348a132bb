"""Tests that a defect anywhere in an event's handling ends that request, and nothing is left of it.

The handlers are many, and each may raise before or after it has changed something. So the test finds out which
functions an event calls on behalf of a request, and lets each of them raise in turn, first in place of its work and
then after it.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from baton.v1 import worker_pb2
from services.core.errors import WorkerFailed
from services.router.coordinator import handoff
from services.router.coordinator.book import Book
from services.router.coordinator.request import Request
from services.rpc.status import to_status
from tests.support.isolation_bench import INNOCENT, POISONED, STAGES, Bench, Poison, lease_ended, tokens

Say = Callable[[int], worker_pb2.LegEvent]


def failed(leg: int) -> worker_pb2.LegEvent:
    return worker_pb2.LegEvent(failed=worker_pb2.LegFailed(leg=leg, status=to_status(WorkerFailed("broken"))))


def import_failed(leg: int) -> worker_pb2.LegEvent:
    error = to_status(WorkerFailed("broken"))
    return worker_pb2.LegEvent(import_failed=worker_pb2.ImportFailed(leg=leg, status=error, lease_alive=False))


def refused(leg: int) -> worker_pb2.LegEvent:
    return worker_pb2.LegEvent(refused=worker_pb2.DecodeRefused(leg=leg))


def expired(leg: int) -> worker_pb2.LegEvent:
    return lease_ended(leg, worker_pb2.LEASE_END_REASON_EXPIRED)


def out_of_place(leg: int) -> worker_pb2.LegEvent:
    return tokens(leg, 900, [1])


CASES: list[tuple[str, Say | None]] = [
    *((stage, None) for stage in STAGES[:-1]),
    *(("prefill begins", say) for say in (failed, expired, out_of_place)),
    *(("prefill ends", say) for say in (failed, expired, out_of_place)),
    *(("decode is admitted", say) for say in (failed, refused, import_failed, out_of_place)),
    *(("import ends", say) for say in (failed, refused, import_failed)),
    *(("decode goes on", say) for say in (failed, refused, out_of_place)),
]


@contextmanager
def wrapped(wrap: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replaces each function that handles a request, in `handoff` and `Book`, by `wrap(name, function)`."""
    with pytest.MonkeyPatch.context() as patch:
        for owner in (handoff, Book):
            for name, function in inspect.getmembers(owner, inspect.isfunction):
                if function.__module__ in (handoff.__name__, Book.__module__) and _takes_a_request(function):
                    patch.setattr(owner, name, wrap(f"{owner.__name__}.{name}", function))
        yield


def _takes_a_request(function: Any) -> bool:
    # What ends a request after a defect must itself be sound; `test_isolation.py` breaks the record instead.
    ends_it = function.__name__ in ("isolated", "spoil", "fail_surely", "_remove_everywhere")
    return "request" in inspect.signature(function).parameters and not ends_it


def _of_the_poisoned(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Request) and each.request_id == POISONED for each in arguments)


def play(stage: str, say: Say | None, wrap: Callable[[str, Any], Any]) -> Bench:
    """Takes three requests up to a stage, says this stage's events under `wrap`, and ends the innocent ones.

    The poisoned request gets the event `say` in this stage, or the stage's own.
    """
    bench = Bench()
    bench.watch()
    for request_id in (INNOCENT[0], POISONED, INNOCENT[1]):
        bench.submit(request_id)
    before, after = STAGES[: STAGES.index(stage)], STAGES[STAGES.index(stage) + 1 :]
    bench.run(stages=before)
    worker_id, events = bench.batch(stage, (INNOCENT[0],))
    bad_events = bench.batch(stage, (POISONED,))[1]
    if say is not None:
        leg = bench.leg("prefill" if worker_id == "p" else "decode", POISONED)
        assert leg is not None
        bad_events = [say(leg)]
    with wrapped(wrap):
        bench.say(worker_id, [*events, *bad_events, *bench.batch(stage, (INNOCENT[1],))[1]])
    bench.coordinator.check()
    bench.run(INNOCENT, after)
    return bench


def _called_for_the_poisoned(stage: str, say: Say | None) -> list[str]:
    called: dict[str, None] = {}

    def noting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def note(*arguments: Any, **more: Any) -> Any:
            if _of_the_poisoned(arguments):
                called[name] = None
            return function(*arguments, **more)

        return note

    play(stage, say, noting)
    return list(called)


def _raising(culprit: str, *, first: bool) -> Callable[[str, Any], Any]:
    def wrap(name: str, function: Any) -> Any:
        if name != culprit:
            return function
        raised: list[str] = []

        @functools.wraps(function)
        def poisoned(*arguments: Any, **more: Any) -> Any:
            if raised or not _of_the_poisoned(arguments):
                return function(*arguments, **more)
            raised.append(name)
            if not first:
                function(*arguments, **more)
            raise Poison(name)

        return poisoned

    return wrap


@pytest.mark.parametrize("first", [True, False], ids=["in place of it", "after it"])
@pytest.mark.parametrize(("stage", "say"), CASES, ids=lambda each: getattr(each, "__name__", each) or "as usual")
def test_a_handler_that_raises_anywhere_ends_its_request(stage: str, say: Say | None, first: bool) -> None:
    async def breaks_each() -> int:
        culprits = _called_for_the_poisoned(stage, say)
        for culprit in culprits:
            bench = play(stage, say, _raising(culprit, first=first))
            assert bench.answers[POISONED].over, f"{culprit}: the request hangs"
            assert not bench.conductor._live, culprit
            bench.assert_only_the_poisoned_suffers(may_finish=True)
        return len(culprits)

    with asyncio.Runner() as runner:
        assert runner.run(breaks_each()) >= 1, "the event calls nothing"
