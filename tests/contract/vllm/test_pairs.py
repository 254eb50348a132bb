"""Tests that workers whose vLLM keeps or computes KV in another way never exchange it: a router does not pair them, and
a worker that is told to refuses by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.core.errors import LayoutMismatch
from services.engine.config import EngineConfig
from services.rpc.status import from_status
from services.vllm.engine import VllmEngine
from tests.support.cluster import running_cluster
from tests.support.scripted_memory import script
from tests.support.scripted_vllm_engine import VOCAB_SIZE, ScriptedVllm
from tests.support.workers import (
    DECODE,
    PREFILL,
    ScriptedRouter,
    decode_command,
    prefill_command,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.process

PROMPT = [5 + i * i % 250 for i in range(100)]
NUM_TOKENS = 8
OTHERS = {
    "sharding": {"tensor_parallel_size": "2"},
    "overrides": {"hf_overrides": '{"rope_theta": 5000}'},
}


@pytest.fixture(params=OTHERS)
def loads(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[EngineConfig], VllmEngine]:
    """Returns what makes a worker's engine: the second one's is of the other kind."""
    made: list[ScriptedVllm] = []

    def load(config: EngineConfig) -> VllmEngine:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(ScriptedVllm(folder, **(OTHERS[request.param] if len(made) == 1 else {})))
        return made[-1].load(config)

    return load


async def test_a_router_does_not_pair_them(model: Path, loads: Callable[[EngineConfig], VllmEngine]) -> None:
    """The other decode worker answers alone what the equal one has no place for."""
    async with running_cluster(model, [PREFILL, DECODE], load=loads) as cluster:
        for length in (1, 16, 100):
            answer = await cluster.greedy(PROMPT[:length], NUM_TOKENS)
            assert answer.token_ids == script(PROMPT[:length], NUM_TOKENS, VOCAB_SIZE)
            assert answer.completion is not None
            assert answer.completion.workers.decode == "w1"
            assert answer.completion.workers.prefill in ("", "w1")
            assert answer.completion.timings.transfer_blocks == 0


async def test_a_router_pairs_the_equal_ones(model: Path, loads: Callable[[EngineConfig], VllmEngine]) -> None:
    async with running_cluster(model, [PREFILL, DECODE, DECODE], load=loads) as cluster:
        for number in range(4):
            answer = await cluster.greedy([number + 5, *PROMPT], NUM_TOKENS)
            assert answer.completion is not None
            assert (answer.completion.workers.prefill, answer.completion.workers.decode) == ("w0", "w2")


async def test_one_that_is_told_to_refuses(model: Path, loads: Callable[[EngineConfig], VllmEngine]) -> None:
    router = ScriptedRouter()
    async with (
        running_worker(worker_config(model, worker_id="w0"), PREFILL, load=loads) as source,
        running_worker(worker_config(model, worker_id="w1"), DECODE, load=loads) as target,
        router.session(source) as prefill,
        router.session(target) as decode,
    ):
        leg, taken = router.new_leg(), router.new_leg()
        await prefill.send(prefill=prefill_command(leg, PROMPT, NUM_TOKENS))
        started = await prefill.next("started", leg)
        await prefill.tokens(leg, count=1)
        await decode.send(decode=decode_command(taken, started, PROMPT, NUM_TOKENS))
        failed = await decode.next("import_failed", taken)
        error = from_status(failed.status)
        assert isinstance(error, LayoutMismatch)
        assert "config_digest: " in str(error)
        assert target.engine.stats().ledger.idle
        assert not target.engine.stats().num_steps
