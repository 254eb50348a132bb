"""Nothing of a leg is left in a worker when it is over, and no connection to a source that is not used any more.

Objects are counted with the garbage collector off: what only a collection would free, stays for as long as none runs.
"""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path

import pytest

from services.decode.leg import DecodeLeg
from services.engine.schedule.sequence import Sequence
from services.kv.imports import Import
from services.kv.lease import FetchTicket, Lease
from services.prefill.leg import PrefillLeg
from tests.support.workers import (
    DECODE,
    PREFILL,
    ScriptedRouter,
    ScriptedSession,
    decode_command,
    idle,
    prefill_command,
    running_worker,
    until,
    worker_config,
)

KINDS = (PrefillLeg, DecodeLeg, Lease, FetchTicket, Import, Sequence)


def alive() -> Counter[str]:
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in KINDS)


async def handoff(router: ScriptedRouter, prefill: ScriptedSession, decode: ScriptedSession, fate: str) -> None:
    leg, decode_leg = router.new_leg(), router.new_leg()
    prompt = [5 + (leg * 31 + position) % 300 for position in range(60)]
    await prefill.send(prefill=prefill_command(leg, prompt, max_tokens=1 if fate == "one token" else 4))
    started = await prefill.next("started", leg)
    if fate == "cancelled":
        await prefill.send(cancel={"leg": leg})
        return
    if fate == "lease ended":
        await prefill.send(cancel={"leg": leg})
    await decode.send(decode=decode_command(decode_leg, started, prompt, max_tokens=1 if fate == "one token" else 4))
    if fate == "import cancelled":
        await decode.send(cancel={"leg": decode_leg})
        await prefill.send(cancel={"leg": leg})
        return
    if fate == "lease ended":
        await decode.next("import_failed", decode_leg)
        return
    await decode.tokens(decode_leg)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_nothing_of_a_leg_is_left(model: Path, transport: str) -> None:
    router = ScriptedRouter()
    config = worker_config(model, transport=transport)
    async with (
        running_worker(config, PREFILL) as source,
        running_worker(config, DECODE) as target,
        router.session(source) as prefill,
        router.session(target) as decode,
    ):
        await handoff(router, prefill, decode, "whole")
        gc.collect()
        gc.disable()
        try:
            before = alive()
            for fate in ("whole", "one token", "cancelled", "import cancelled", "lease ended") * 5:
                await handoff(router, prefill, decode, fate)
            await idle(source)
            await idle(target)
            await until(lambda: alive() <= before, f"{before}, and no more than that: {alive()}")
        finally:
            gc.enable()
