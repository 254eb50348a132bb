"""Tests that what the beginning or the end of one worker's session raises, or one model's tick, harms no other worker
and model.

It is counted, and the worker can join again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from baton.v1 import control_pb2, types_pb2
from services.router.catalogue import UNUSED_S, Catalogue
from services.router.coordinator import handoff
from services.router.coordinator.events import FinishReason, WorkerInfo
from services.router.coordinator.workers import WorkerState
from services.router.policy import Role
from services.router.workers import wire
from tests.support.isolation_bench import ALL, Bench, Poison, as_any
from tests.support.link_owner import FakeChannel
from tests.support.patience import HANG_S


class PanicException(BaseException):
    """Stands for the one that a panic of a Rust library raises, which is told by its name."""


def raises_once(error: BaseException, real: Callable[..., Any]) -> Callable[..., Any]:
    left = [error]

    def poisoned(*args: Any, **named: Any) -> Any:
        if left:
            raise left.pop()
        return real(*args, **named)

    return poisoned


def _parts(bench: Bench) -> dict[str, tuple[Any, str]]:
    """Returns whatever the beginning and the end of a session call: what it is of, and its name there."""
    book, drains = bench.coordinator._book, bench.conductor._drains
    return {
        "session_opened": (bench.coordinator, "session_opened"),
        "open": (book.workers, "open"),
        "worker_alive": (handoff, "worker_alive"),
        "canaries": (bench.coordinator._canaries, "run"),
        "drains, opened": (drains, "link_opened"),
        "worker_lost": (bench.coordinator, "worker_lost"),
        "lose": (book.workers, "lose"),
        "canaries, gone": (bench.coordinator._canaries, "worker_gone"),
        "health": (book.workers, "failed"),
        "drains, lost": (drains, "link_lost"),
        "drains": (drains, "changed"),
        "the log": (bench.conductor, "_log_unreached"),
    }


OF_THE_BEGINNING = ["session_opened", "open", "worker_alive", "canaries", "drains, opened", "drains"]
OF_THE_END = ["worker_lost", "lose", "canaries, gone", "health", "drains, lost", "drains", "the log"]


@pytest.mark.parametrize("part", OF_THE_END)
async def test_the_end_of_a_session_is_seen_through(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """Requests at the worker are served by its next session, and so is everybody else."""
    bench = Bench()
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id)
    owner, name = _parts(bench)[part]
    monkeypatch.setattr(owner, name, raises_once(Poison(part), getattr(owner, name)))
    bench.conductor.link_lost(as_any(bench.links["p"]), "cut", crashed=True)
    assert bench.metrics.internal_errors.total() == 1
    assert "p" not in bench.conductor.links
    bench.clock.advance(0.1)
    bench.conductor.tick()
    assert bench.coordinator.worker("p").state is WorkerState.LOST
    assert bench.coordinator.worker("d").state is WorkerState.READY
    bench.links["p"] = bench.join("p", Role.PREFILL, watched=True)
    bench.coordinator.check()
    bench.clock.advance(1.5)
    bench.conductor.tick()
    bench.run()
    assert {answer.reason for answer in bench.answers.values()} == {FinishReason.LENGTH}
    bench.coordinator.check_idle()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while not condition():  # noqa: ASYNC110  # turns of the loop, and nothing that could be waited for
            await asyncio.sleep(0)


def _description(worker_id: str) -> control_pb2.WorkerDescription:
    return control_pb2.WorkerDescription(
        worker_id=worker_id,
        roles=[types_pb2.WORKER_ROLE_PREFILL],
        address=f"{worker_id}:1",
        incarnation=1,
        layout=types_pb2.KVLayout(model_id="m", block_size=16),
        fingerprint=types_pb2.Fingerprint(kv="5c" * 16),
        num_blocks=64,
        max_model_len=1024,
        max_num_seqs=8,
        host_id="h",
    )


def _info(worker_id: str) -> WorkerInfo:
    return wire.worker_info(_description(worker_id))


def _dial(address: str) -> Any:
    """Returns a channel to the worker whose name is the address's host."""
    return FakeChannel(worker=_description(address.partition(":")[0]))


@pytest.mark.parametrize(
    ("part", "error"),
    [*((part, Poison("session")) for part in OF_THE_BEGINNING), ("session_opened", PanicException("a library's"))],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
async def test_the_beginning_of_a_session_ends_that_session_at_most(
    monkeypatch: pytest.MonkeyPatch, part: str, error: BaseException
) -> None:
    """The worker is ready once it has registered again, if not at once. No other link notices."""
    bench = Bench(dial=_dial)
    owner, name = _parts(bench)[part]
    bench.conductor.register(_info("other"))
    await _until(lambda: bench.coordinator.worker("other").state is WorkerState.READY)
    monkeypatch.setattr(owner, name, raises_once(error, getattr(owner, name)))
    bench.conductor.register(_info("unlucky"))
    await _until(lambda: bench.metrics.internal_errors.total() >= 1)

    def ready() -> bool:
        bench.conductor.register(_info("unlucky"))
        bench.conductor.tick()
        return bench.coordinator.worker("unlucky").state is WorkerState.READY

    await _until(ready)
    assert bench.metrics.internal_errors.total() == 1
    assert bench.conductor.links["other"].is_open
    assert bench.conductor.links["unlucky"].is_open
    assert all(bench.coordinator.worker(worker_id).state is WorkerState.READY for worker_id in ("p", "d", "other"))
    await bench.conductor.close()


async def test_a_worker_that_cannot_be_dialled_can_join_later() -> None:
    bench = Bench(dial=raises_once(Poison("dial"), _dial))
    bench.conductor.register(_info("unlucky"))
    await _until(lambda: not bench.conductor.links.keys() - {"p", "d"})
    assert bench.metrics.internal_errors == {"session": 1}
    bench.conductor.register(_info("unlucky"))
    await _until(lambda: bench.coordinator.worker("unlucky").state is WorkerState.READY)
    await bench.conductor.close()


def _catalogue(benches: list[Bench], forget: Callable[[str], None] = lambda name: None) -> Catalogue:
    """Returns a catalogue of one model for each bench."""
    closable = SimpleNamespace(close=lambda: None)
    models: list[Any] = [
        SimpleNamespace(model_id=f"m{number}", conductor=bench.conductor, line=closable, text=closable)
        for number, bench in enumerate(benches)
    ]
    no: Any = None
    clock = benches[0].clock
    catalogue = Catalogue(models[0], text_of=no, serve=no, forget=forget, max_models=9, clock=clock)
    catalogue._models |= {model.model_id: model for model in models}
    return catalogue


@pytest.mark.parametrize("part", ["tick", "act", "_awake", "coordinator"])
async def test_the_tick_of_one_model_keeps_no_other_from_its_own(monkeypatch: pytest.MonkeyPatch, part: str) -> None:
    """The model in the middle is broken at every tick."""

    class Broken:
        def __getattribute__(self, name: str) -> Any:
            raise Poison(name)

        def __call__(self) -> None:
            raise Poison("called")

    benches = [Bench() for _ in range(3)]
    catalogue = _catalogue(benches)
    for bench in benches:
        bench.submit("a", deadline_s=bench.clock.now() + 5.0)
        bench.clock.advance(6.0)
    monkeypatch.setattr(benches[1].conductor, part, Broken())
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
    catalogue = _catalogue([own, gone], forget)
    for worker_id in ("p", "d"):
        gone.conductor.link_lost(as_any(gone.links[worker_id]), "", crashed=False)
    gone.coordinator._book.workers.forget(gone.clock.now() + 1.0)
    assert not gone.conductor.in_use
    for _ in range(3):
        catalogue.tick()
        own.clock.advance(UNUSED_S)
    assert [model.model_id for model in catalogue.all()] == ["m0"]
    assert gone.metrics.internal_errors == {"tick": 1}
    assert not own.metrics.internal_errors
    await catalogue.close()
