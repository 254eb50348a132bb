"""Tests that what the beginning or the end of one worker's session raises, or one model's tick, harms no other worker
and model.

It is counted, and the worker can join again. Which functions a session's beginning and end call, the test finds out.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2
from services.router.catalogue import UNUSED_S, Catalogue
from services.router.coordinator import Coordinator
from services.router.coordinator.canaries import Canaries
from services.router.coordinator.events import FinishReason, WorkerInfo
from services.router.coordinator.workers import WorkerState, WorkerTable
from services.router.policy import Role
from services.router.workers import wire
from services.router.workers.drains import Drains
from tests.support.isolation_bench import ALL, Bench, Poison
from tests.support.link_owner import FakeChannel
from tests.support.patience import HANG_S

OWNERS = (Coordinator, WorkerTable, Canaries, Drains)
NOT_OF_SESSIONS = ("take_actions", "drop_leg")
"""The one hands out what was decided, the other is done for one request."""


class PanicException(BaseException):
    """Stands for the one that a panic of a Rust library raises, which is told by its name."""


@contextmanager
def noting(called: dict[tuple[type, str], None]) -> Iterator[None]:
    """Notes which public methods of the owners are called inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        for owner in OWNERS:
            for name, function in inspect.getmembers(owner, inspect.isfunction):
                if not name.startswith("_") and name not in NOT_OF_SESSIONS:
                    patch.setattr(owner, name, _noting(called, owner, name, function))
        yield


def _noting(called: dict[tuple[type, str], None], owner: type, name: str, function: Any) -> Any:
    @functools.wraps(function)
    def note(*arguments: Any, **more: Any) -> Any:
        called[owner, name] = None
        return function(*arguments, **more)

    return note


@contextmanager
def raising_once(owner: type, name: str, error: BaseException) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, raises_once(error, getattr(owner, name)))
        yield


def raises_once(error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    left = [error]

    @functools.wraps(real)
    def poisoned(*arguments: Any, **more: Any) -> Any:
        if left:
            raise left.pop()
        return real(*arguments, **more)

    return poisoned


def _with_requests() -> Bench:
    bench = Bench()
    for request_id in ALL:
        bench.submit(request_id)
    bench.turn()
    return bench


async def test_the_end_of_a_session_is_seen_through() -> None:
    """Requests at the worker are served by its next session, and so is everybody else."""
    called: dict[tuple[type, str], None] = {}
    bench = _with_requests()
    with noting(called):
        bench.lose("p")
    assert (Coordinator, "worker_lost") in called
    for owner, name in called:
        bench = _with_requests()
        with raising_once(owner, name, Poison(name)):
            bench.lose("p")
        assert bench.metrics.internal_errors.total() == 1, name
        assert "p" not in bench.conductor.links, name
        bench.clock.advance(0.1)
        bench.conductor.tick()
        assert bench.coordinator.workers.get("p").state is WorkerState.LOST, name
        assert bench.coordinator.workers.get("d").state is WorkerState.READY, name
        bench.rejoin("p", Role.PREFILL)
        bench.coordinator.check()
        bench.run()
        assert {answer.reason for answer in bench.answers.values()} == {FinishReason.LENGTH}, name
        bench.assert_idle()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  # turns of the loop, and nothing that could be waited for
            await asyncio.sleep(0)


def _description(worker_id: str, model_id: str = "m") -> control_pb2.WorkerDescription:
    return control_pb2.WorkerDescription(
        worker_id=worker_id,
        roles=[types_pb2.WORKER_ROLE_PREFILL],
        address=f"{worker_id}:1",
        incarnation=1,
        layout=types_pb2.KVLayout(model_id=model_id, block_size=16),
        fingerprint=types_pb2.Fingerprint(kv="5c" * 16),
        num_blocks=64,
        max_model_len=1024,
        max_num_seqs=8,
        host_id="h",
    )


def _info(worker_id: str, model_id: str = "m") -> WorkerInfo:
    return wire.worker_info(_description(worker_id, model_id))


def _dial(address: str) -> Any:
    """Returns a channel to the worker whose name is the address's host."""
    return FakeChannel(worker=_description(address.partition(":")[0]))


def _is_ready(bench: Bench, worker_id: str) -> bool:
    return bench.coordinator.workers.get(worker_id).state is WorkerState.READY


async def _begin(bench: Bench, worker_id: str) -> None:
    bench.conductor.register(_info(worker_id))
    await _until(lambda: _is_ready(bench, worker_id))


async def test_the_beginning_of_a_session_ends_that_session_at_most() -> None:
    """The worker is ready once it has registered again, if not at once. No other link notices."""
    called: dict[tuple[type, str], None] = {}
    bench = Bench(dial=_dial)
    bench.conductor.register(_info("unlucky"))
    with noting(called):
        await _until(lambda: _is_open(bench, "unlucky"))
    await bench.conductor.close()
    assert (Coordinator, "session_opened") in called
    for owner, name in called:
        await _begins_badly(owner, name, Poison(name))
    await _begins_badly(Coordinator, "session_opened", PanicException("a library's"))


def _is_open(bench: Bench, worker_id: str) -> bool:
    return bench.conductor.links[worker_id].is_open


async def _begins_badly(owner: type, name: str, error: BaseException) -> None:
    bench = Bench(dial=_dial)
    await _begin(bench, "other")
    bench.conductor.register(_info("unlucky"))
    with raising_once(owner, name, error):
        await _until(lambda: bench.metrics.internal_errors.total() >= 1)

    def ready() -> bool:
        bench.conductor.register(_info("unlucky"))
        bench.conductor.tick()
        return _is_ready(bench, "unlucky")

    await _until(ready)
    assert bench.metrics.internal_errors.total() == 1, name
    assert bench.conductor.links["other"].is_open, name
    assert bench.conductor.links["unlucky"].is_open, name
    assert all(_is_ready(bench, worker_id) for worker_id in ("p", "d", "other")), name
    await bench.conductor.close()


async def test_a_worker_that_cannot_be_dialled_can_join_later() -> None:
    bench = Bench(dial=raises_once(Poison("dial"), _dial))
    bench.conductor.register(_info("unlucky"))
    await _until(lambda: not bench.conductor.links.keys() - {"p", "d"})
    assert bench.metrics.internal_errors == {"session": 1}
    await _begin(bench, "unlucky")
    await bench.conductor.close()


async def _catalogue(benches: list[Bench], forget: Callable[[str], None] = lambda name: None) -> Catalogue:
    """Returns a catalogue of one model for each bench; all but the first were brought by workers, which have left."""
    closable = SimpleNamespace(close=lambda: None)
    models: dict[str, Any] = {
        name: SimpleNamespace(model_id=name, conductor=bench.conductor, line=closable, text=closable)
        for name, bench in zip("lmn", benches, strict=False)
    }
    own, *others = models

    async def text_of(info: WorkerInfo) -> Any:
        return None

    catalogue = Catalogue(
        models[own],
        text_of=text_of,
        serve=lambda name, text: models[name],
        forget=forget,
        max_models=9,
        clock=benches[0].clock,
    )
    for name in others:
        await catalogue.register(_info("bringer", name))
        models[name].conductor.withdraw("bringer")
    return catalogue


@pytest.mark.parametrize("part", ["tick", "act"])
async def test_the_tick_of_one_model_keeps_no_other_from_its_own(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The model in the middle is broken at every tick."""

    def broken() -> None:
        raise Poison(part)

    benches = [Bench() for _ in range(3)]
    catalogue = await _catalogue(benches)
    for bench in benches:
        bench.submit("a", deadline_s=bench.clock.now() + 5.0)
        bench.clock.advance(6.0)
    monkeypatch.setattr(benches[1].conductor, part, broken)
    for _ in range(3):
        catalogue.tick()
    for bench in (benches[0], benches[2]):
        error = bench.answers["a"].error
        assert error is not None
        assert error.reason == "DEADLINE_EXCEEDED"
        assert not bench.metrics.internal_errors
    assert benches[1].metrics.internal_errors["tick"] >= 3


async def test_a_model_that_is_dropped_is_closed_whatever_fails() -> None:
    def forget(name: str) -> None:
        raise Poison(name)

    own, gone = Bench(), Bench()
    catalogue = await _catalogue([own, gone], forget)
    gone.leave()
    for _ in range(3):
        catalogue.tick()
        own.clock.advance(UNUSED_S)
    assert [model.model_id for model in catalogue.all()] == ["l"]
    assert gone.metrics.internal_errors == {"tick": 1}
    assert not own.metrics.internal_errors
    await catalogue.close()
