"""Tests that a worker tells each of its routers how many there are, also when one joins or leaves."""

from __future__ import annotations

from pathlib import Path

from tests.support.workers import DECODE, ScriptedRouter, running_worker, until, worker_config


async def test_routers_learn_how_many_they_are(model: Path) -> None:
    config = worker_config(model, heartbeat_s=0.1)
    async with (
        running_worker(config, DECODE) as host,
        ScriptedRouter(1).session(host) as first,
    ):
        await until(lambda: first.num_routers == 1, "it is alone")
        async with ScriptedRouter(2).session(host) as second:
            await until(lambda: (first.num_routers, second.num_routers) == (2, 2), "both know")
        await until(lambda: first.num_routers == 1, "it is alone")
