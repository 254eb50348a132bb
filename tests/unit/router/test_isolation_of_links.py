"""Whatever raises when a session ends, or in the tick of one model, keeps no other part from its work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from services.router.catalogue import Catalogue
from services.router.policy import Role
from tests.support.isolation_bench import ALL, Bench, Poison, as_any


def raises(*_: Any, **__: Any) -> Any:
    raise Poison("link")


@pytest.mark.parametrize(
    "part", ["worker_lost", "drains", "unreached"], ids=["the coordinator", "the drains", "what is logged of it"]
)
async def test_a_loss_that_cannot_be_told_ends_nothing_else(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link is forgotten, so that the worker can join again, and every other part hears of the loss."""
    bench = Bench()
    bench.watch()
    for request_id in ALL:
        bench.submit(request_id)
    gone = bench.conductor._drains._gone.setdefault(1, asyncio.get_running_loop().create_future())
    with monkeypatch.context() as patched:
        if part == "worker_lost":
            patched.setattr(bench.coordinator, "worker_lost", raises)
        elif part == "drains":
            patched.setattr(bench.conductor._drains, "link_lost", raises)
        else:
            patched.setattr(bench.conductor, "_log_unreached", raises)
        bench.conductor.link_lost(as_any(bench.links["d"]), "cut", crashed=True)
    bench.turn()
    assert bench.metrics.internal_errors == {"session": 1}
    assert "d" not in bench.conductor.links
    assert gone.done() is (part != "drains")
    if part != "worker_lost":
        assert not next(worker for worker in bench.coordinator.workers() if worker.info.worker_id == "d").has_session
    bench.links["d"] = bench.join("d", Role.DECODE)
    bench.watch()
    bench.run()
    for request_id in ALL:
        assert bench.answers[request_id].reason == "length"
    bench.coordinator.check_idle()


async def test_a_tick_that_raises_stops_no_other_models_tick() -> None:
    models = []
    ticks: dict[str, int] = {"a": 0, "b": 0}
    for name in ticks:
        bench = Bench()

        def tick(name: str = name) -> None:
            ticks[name] += 1
            if name == "a":
                raise Poison("tick")

        bench.conductor.tick = tick  # type: ignore[method-assign]
        models.append((bench, SimpleNamespace(model_id=name, conductor=bench.conductor)))
    no: Any = None
    (bad, own), (good, other) = models
    catalogue = Catalogue(as_any(own), text_of=no, serve=no, forget=no, max_models=2, clock=bad.clock)
    catalogue._models["b"] = as_any(other)
    task = asyncio.create_task(catalogue.tick_forever())
    while ticks["b"] < 3:
        assert not task.done(), "the tick is over"
        await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert bad.metrics.internal_errors["tick"] >= 2
    assert not good.metrics.internal_errors
