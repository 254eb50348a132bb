"""Tests a cluster with workers of two engines under one model, whose digests are equal: only the engine's name differs.

Both compute the same script, so that a stream which goes on with the other engine can be checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from services.engine.config import EngineConfig
from services.rpc.telemetry import Tracer
from services.worker.host import WorkerHost
from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_memory import script
from tests.support.text_model import byte_tokenizer, write_model
from tests.support.workers import DECODE, PREFILL, running_worker, until, worker_config

PROMPT = [5 + i * i % 250 for i in range(100)]
NUM_TOKENS = 40
EXPECTED = script(PROMPT, NUM_TOKENS, byte_tokenizer().get_vocab_size())
ENGINES = ("torch", "vllm")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("scripted"))


class Fleet:
    """Runs a prefill and a decode worker of each engine, which can be taken away."""

    def __init__(self, cluster: Cluster, model: Path) -> None:
        self.cluster = cluster
        self._model = model
        self._running: dict[str, contextlib.AbstractAsyncContextManager[WorkerHost]] = {}
        self.engines: dict[str, ScriptedEngine] = {}

    async def add(self, engine: str) -> None:
        def load(config: EngineConfig) -> ScriptedEngine:
            loaded = ScriptedEngine(config)
            loaded.info = dataclasses.replace(loaded.info, engine=engine)
            return loaded

        for letter, roles in (("p", PREFILL), ("d", DECODE)):
            worker_id = f"{engine}-{letter}"
            router = (self.cluster.router.control_address,)
            config = worker_config(self._model, router=router, worker_id=worker_id)
            tracer = Tracer(TracerProvider(shutdown_on_exit=False))
            worker = self._running[worker_id] = running_worker(config, roles, tracer, load)
            host = await worker.__aenter__()
            assert isinstance(host.engine, ScriptedEngine)
            self.engines[worker_id] = host.engine
        await until(lambda: self.cluster.num_ready == len(self._running), f"{engine} is ready", 20.0)

    async def kill(self, engine: str) -> None:
        """Ends the engine's workers, which finish nothing."""
        for worker_id in [name for name in self._running if name.startswith(engine)]:
            with contextlib.suppress(RuntimeError):
                await self._running.pop(worker_id).__aexit__(RuntimeError, RuntimeError("killed"), None)

    async def close(self) -> None:
        for engine in ENGINES:
            await self.kill(engine)


@contextlib.asynccontextmanager
async def fleet(model: Path, *engines: str, replay_across_engines: bool = False) -> AsyncIterator[Fleet]:
    flags = {"no_worker_timeout_s": 1.0, "replay_across_engines": replay_across_engines}
    async with running_cluster(model, [], router=flags) as cluster:
        workers = Fleet(cluster, model)
        try:
            for engine in engines:
                await workers.add(engine)
            yield workers
        finally:
            await workers.close()


async def test_both_serve_and_nothing_crosses(model: Path) -> None:
    async with fleet(model, *ENGINES) as workers:
        for engine in ENGINES:
            workers.engines[f"{engine}-p"].may_finish.clear()  # so that the requests spread
        streams = [asyncio.ensure_future(workers.cluster.greedy([*PROMPT, n], NUM_TOKENS)) for n in range(8)]
        await until(lambda: all(workers.engines[f"{engine}-p"].in_step for engine in ENGINES), "both compute")
        for engine in ENGINES:
            workers.engines[f"{engine}-p"].may_finish.set()
        ran = [answer.completion.workers for answer in await asyncio.gather(*streams) if answer.completion is not None]
        status = await workers.cluster.status()
    assert {(each.prefill, each.decode) for each in ran} == {("torch-p", "torch-d"), ("vllm-p", "vllm-d")}
    assert {(pair.prefill, pair.decode) for pair in status.pairs} == {("torch-p", "torch-d"), ("vllm-p", "vllm-d")}
    assert {(group.engine, *group.worker_ids) for group in status.models[0].kv_groups} == {
        ("torch", "torch-d", "torch-p"),
        ("vllm", "vllm-d", "vllm-p"),
    }
    assert {each.worker.layout.engine for each in status.workers if each.worker.worker_id == "vllm-d"} == {"vllm"}


@pytest.mark.parametrize(("first", "second"), [ENGINES, ENGINES[::-1]])
async def test_before_the_first_token_the_other_engine_takes_it(model: Path, first: str, second: str) -> None:
    async with fleet(model, first) as workers:
        workers.engines[f"{first}-p"].may_finish.clear()
        stream = asyncio.ensure_future(workers.cluster.greedy(PROMPT, NUM_TOKENS))
        await until(lambda: bool(workers.engines[f"{first}-p"].in_step), "it computes")
        await workers.add(second)
        await workers.kill(first)
        answer = await stream
    assert answer.token_ids == EXPECTED
    assert answer.completion is not None
    assert (answer.completion.workers.prefill, answer.completion.workers.decode) == (f"{second}-p", f"{second}-d")


@pytest.mark.parametrize(("first", "second"), [ENGINES, ENGINES[::-1]])
@pytest.mark.parametrize("across", [False, True])
async def test_after_it_the_other_engine_goes_on_only_with_the_flag(
    model: Path, first: str, second: str, across: bool
) -> None:
    async with fleet(model, first, replay_across_engines=across) as workers:
        workers.engines[f"{first}-d"].may_finish.clear()
        received: list[int] = []

        async def read() -> None:
            async for message in workers.cluster.inference.GenerateStream(greedy_request(PROMPT, NUM_TOKENS)):
                received.extend(message.chunk.token_ids)

        reading = asyncio.ensure_future(read())
        await until(lambda: bool(received), "the prefill worker's token")
        await workers.add(second)
        await workers.kill(first)
        if across:
            await reading
            assert received == EXPECTED
            return
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await reading
        assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        assert f"({first}; scripted)" in (ended.value.details() or "")
        assert "--replay-across-engines" in (ended.value.details() or "")
        assert received == EXPECTED[: len(received)]
        assert (await workers.cluster.greedy(PROMPT, NUM_TOKENS)).token_ids == EXPECTED, "the stream is bound, not all"
