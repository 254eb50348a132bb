"""Tests that a fetch that waits for its prompt notices a silent source by what the source owes it, not by a reset that
never comes: whatever else its connection is used for. Keepalive waits for longer than a whole host may be paused."""

from __future__ import annotations

import asyncio

import pytest

from services.core.clock import ManualClock
from services.core.errors import TransferFailed
from services.kvtransfer import servicer
from tests.support.kv_harness import Destination, Source, opening, raw_stub, running, until
from tests.support.patience import HANG_S


@pytest.mark.parametrize("announces", ["nothing happens", "steps of a few tokens"])
async def test_a_source_says_that_it_is_there_while_it_has_nothing_to_announce(
    announces: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source beside many decodes is not silent: its steps are published often although they complete no block."""
    monkeypatch.setattr(servicer, "ALIVE_EVERY_S", 0.01)
    source = Source(shared=False)
    async with running(source), raw_stub(source) as stub:
        lease = source.lease(40)
        call = stub.Fetch()
        await call.write(opening(source, lease.lease_id))

        async def publish() -> None:
            while announces != "nothing happens":
                source.publish(lease, 1)
                await asyncio.sleep(0.001)

        publishing, num_said = asyncio.create_task(publish()), 0
        async with asyncio.timeout(HANG_S):
            while num_said < 3:
                num_said += (await call.read()).HasField("alive")
        publishing.cancel()
        source.table.abort(lease.lease_id, source.clock.now())


async def test_a_source_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servicer, "ALIVE_EVERY_S", HANG_S)
    source, destination = Source(), Destination(silence_s=0.05)
    destination.peers.awake = awake = ManualClock()
    async with running(source, destination):
        lease = source.lease(40)
        fetching = destination.start(destination.order(source, lease))
        source.publish(lease, 16)
        await until(lambda: lease.fetch is not None and lease.fetch.copied == 1)
        awake.advance(0.05)
        with pytest.raises(TransferFailed, match="silent"):
            await fetching
        source.table.abort(lease.lease_id, source.clock.now())
