"""Tests that a defect anywhere in what the router does for a request ends that request, and nothing is left of it.

The handlers are many, and each may raise before or after it has changed something. So the test finds out which
functions an input calls on behalf of a request, and lets each of them raise in turn: once in place of its work, once
after it, and every time. What is poisoned among what a request brings along: `test_isolation.py`.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from baton.v1 import worker_pb2
from services.core.errors import WorkerFailed
from services.router.coordinator import admission, handoff, placement, silent_legs
from services.router.coordinator.book import Book
from services.router.coordinator.request import Request
from services.router.policy import Role
from services.rpc.status import to_status
from tests.support.isolation_bench import ALL, INNOCENT, POISONED, STAGES, Bench, Poison, as_any, lease_ended, tokens

OWNERS = (handoff, placement, admission, silent_legs, Book)
TIMEOUT_S = 5.0
Say = Callable[[int], worker_pb2.LegEvent]
When = Literal["in place of it", "after it", "always"]
WHEN: tuple[When, ...] = ("in place of it", "after it", "always")
END_IT = ("isolated", "spoil", "fail_surely", "_remove_everywhere")
"""What ends a request after a defect, which must itself be sound."""
LAST_RESORT = ("Book._forget", "Book._let_go")
"""What that calls: it copes if they have raised, but not if they always do."""


def nothing(bench: Bench) -> None:
    pass


def placed(bench: Bench, stages: Sequence[str] = ()) -> None:
    """Takes all three through stages, or only to their prefills."""
    bench.turn()
    bench.run(stages=stages)


@dataclass(frozen=True)
class Scene:
    """Describes an input that concerns three requests, one of which is poisoned."""

    name: str
    before: Callable[[Bench], None]
    """Takes all three from the queue to where the input meets them."""
    strike: Callable[[Bench], None]
    after: Callable[[Bench], None] = nothing
    """Ends the innocent."""
    end: str = ""
    """How the innocent end, if they do not finish."""


# Events


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


def event(stage: str, say: Say | None = None) -> Scene:
    """The events of one stage of all three come in one message; the poisoned request's is `say`, or the stage's own."""
    before, after = STAGES[: STAGES.index(stage)], STAGES[STAGES.index(stage) + 1 :]

    def strike(bench: Bench) -> None:
        worker_id, events = bench.batch(stage, (INNOCENT[0],))
        bad_events = bench.batch(stage, (POISONED,))[1]
        if say is not None:
            leg = bench.leg("prefill" if worker_id == "p" else "decode", POISONED)
            assert leg is not None
            bad_events = [say(leg)]
        bench.say(worker_id, [*events, *bad_events, *bench.batch(stage, (INNOCENT[1],))[1]])

    return Scene(
        f"{stage}: {'as usual' if say is None else say.__name__}",
        lambda bench: placed(bench, before),
        strike,
        lambda bench: bench.run(INNOCENT, after),
    )


# Other inputs


def finish(bench: Bench) -> None:
    bench.run(INNOCENT)


def cancel(bench: Bench) -> None:
    bench.conductor.cancel(POISONED, as_any(bench.answers[POISONED]))


def let_time_pass(bench: Bench) -> None:
    bench.clock.advance(TIMEOUT_S + 1.0)
    bench.conductor.tick()


def forget_one(bench: Bench) -> None:
    """The prefill worker lists all legs but the poisoned request's."""
    legs = [bench.leg("prefill", request_id) for request_id in ALL]
    listed = worker_pb2.LiveLegs(newest_leg=max(filter(None, legs)), legs=filter(None, (legs[0], legs[2])))
    bench.hear("p", worker_pb2.SessionResponse(live_legs=listed))


def lost(worker_id: str, role: Role, *stages: str) -> Scene:
    """A worker is lost when all three have gone through these stages, and joins again."""

    def strike(bench: Bench) -> None:
        bench.lose(worker_id)

    def after(bench: Bench) -> None:
        bench.rejoin(worker_id, role)
        bench.run(INNOCENT, STAGES if role is Role.PREFILL else STAGES[len(stages) :])

    return Scene(f"{worker_id} is lost", lambda bench: placed(bench, stages), strike, after)


SCENES = [
    *(event(stage) for stage in STAGES[:-1]),
    *(event("prefill begins", say) for say in (failed, expired, out_of_place)),
    *(event("prefill ends", say) for say in (failed, expired, out_of_place)),
    *(event("decode is admitted", say) for say in (failed, refused, import_failed, out_of_place)),
    *(event("import ends", say) for say in (failed, refused, import_failed)),
    *(event("decode goes on", say) for say in (failed, refused, out_of_place)),
    Scene("they are placed", nothing, Bench.turn, finish),
    Scene("the client leaves", placed, cancel, finish),
    Scene("they wait too long", nothing, let_time_pass, end="DEADLINE_EXCEEDED"),
    Scene("the worker forgets one", placed, forget_one, finish),
    lost("p", Role.PREFILL),
    lost("p", Role.PREFILL, "prefill begins"),
    lost("d", Role.DECODE, "prefill begins", "prefill ends"),
]


@contextmanager
def wrapped(wrap: Callable[[str, Any], Any]) -> Iterator[None]:
    """Replaces each function that handles a request by `wrap(name, function)`."""
    with pytest.MonkeyPatch.context() as patch:
        for owner in OWNERS:
            home = owner.__module__ if inspect.isclass(owner) else owner.__name__
            for name, function in inspect.getmembers(owner, inspect.isfunction):
                if function.__module__ == home and _takes_a_request(function):
                    patch.setattr(owner, name, wrap(f"{owner.__name__}.{name}", function))
        yield


def _takes_a_request(function: Any) -> bool:
    return "request" in inspect.signature(function).parameters and function.__name__ not in END_IT


def _of_the_poisoned(arguments: tuple[Any, ...]) -> bool:
    return any(isinstance(each, Request) and each.request_id == POISONED for each in arguments)


def play(scene: Scene, wrap: Callable[[str, Any], Any]) -> Bench:
    """Takes three requests through the scene, of which the input itself happens under `wrap`."""
    bench = Bench()
    deadline_s = bench.clock.now() + TIMEOUT_S if scene.end else None
    for request_id in ALL:
        bench.submit(request_id, deadline_s=deadline_s)
    scene.before(bench)
    with wrapped(wrap):
        scene.strike(bench)
    bench.coordinator.check()
    scene.after(bench)
    return bench


def _called_for_the_poisoned(scene: Scene) -> list[str]:
    called: dict[str, None] = {}

    def noting(name: str, function: Any) -> Any:
        @functools.wraps(function)
        def note(*arguments: Any, **more: Any) -> Any:
            if _of_the_poisoned(arguments):
                called[name] = None
            return function(*arguments, **more)

        return note

    play(scene, noting)
    return list(called)


def _raising(culprit: str, when: When) -> Callable[[str, Any], Any]:
    def wrap(name: str, function: Any) -> Any:
        if name != culprit:
            return function
        raised: list[str] = []

        @functools.wraps(function)
        def poisoned(*arguments: Any, **more: Any) -> Any:
            if (raised and when != "always") or not _of_the_poisoned(arguments):
                return function(*arguments, **more)
            raised.append(name)
            if when == "after it":
                function(*arguments, **more)
            raise Poison(name)

        return poisoned

    return wrap


@pytest.mark.parametrize("when", WHEN)
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.name)
def test_a_handler_that_raises_anywhere_ends_its_request(scene: Scene, when: When) -> None:
    async def breaks_each() -> int:
        culprits = _called_for_the_poisoned(scene)
        for culprit in culprits:
            if when == "always" and culprit in LAST_RESORT:
                continue
            bench = play(scene, _raising(culprit, when))
            assert bench.answers[POISONED].over, f"{culprit}: the request hangs"
            try:
                bench.assert_only_the_poisoned_suffers(may_finish=True, end=scene.end)
            except AssertionError as error:
                error.add_note(culprit)
                raise
        return len(culprits)

    with asyncio.Runner() as runner:
        assert runner.run(breaks_each()) >= 1, "it calls nothing"
