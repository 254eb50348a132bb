"""Provides a small cluster that is fuzzed, and checks what must hold of it after every test."""

from __future__ import annotations

import logging
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from tests.support.cluster import greedy_request, running_cluster
from tests.support.fuzz import CONTEXT_TOKENS, PROMPT, Complaints, Target
from tests.support.models import tiny_model
from tests.support.workers import DECODE, PREFILL


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    model = tiny_model("llama", tmp_path_factory.mktemp("fuzz"))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = {"kv_blocks": 40, "max_model_len": CONTEXT_TOKENS, "heartbeat_s": 0.02, "stall_s": 0.1}
        async with running_cluster(model, [PREFILL, DECODE], router={"silence_s": 5.0}, **config) as cluster:
            known = await cluster.greedy(PROMPT, 8)
            addresses = [
                "",
                "127.0.0.1:1",
                f"127.0.0.1:{mute.getsockname()[1]}",
                f"127.0.0.1:{cluster.router.port}",
                cluster.router.control_address,
                *(worker.address for worker in cluster.workers),
            ]
            yield Target(cluster, known, addresses)


@pytest.fixture(autouse=True)
def complaints() -> Iterator[list[str]]:
    handler = Complaints()
    logging.getLogger().addHandler(handler)
    yield handler.messages
    logging.getLogger().removeHandler(handler)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(target: Target, complaints: list[str]) -> AsyncIterator[None]:
    """Good requests are answered as before, nothing is held, and nothing went wrong unseen."""
    yield
    assert (await target.cluster.greedy(PROMPT, 8)).token_ids == target.known.token_ids
    unbounded = greedy_request(PROMPT, 8)
    unbounded.stopping.ClearField("max_tokens")
    assert len((await target.cluster.stream(unbounded)).token_ids) == CONTEXT_TOKENS - len(PROMPT)
    await target.cluster.idle()
    assert not complaints, complaints[0]
