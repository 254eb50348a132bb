"""Tests workers and a router over an engine that was written against `WorkerEngine` alone: nothing
reaches behind it."""

from __future__ import annotations

import ast
import dataclasses
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from opentelemetry.sdk.trace import TracerProvider

from baton.v1 import types_pb2, worker_pb2
from services.core.errors import LayoutMismatch
from services.engine.config import StepReport
from services.engine.worker_engine import OnStep, WorkerEngine
from services.rpc.serving import GrpcServer
from services.rpc.telemetry import Tracer
from services.worker.host import WorkerHost
from services.worker.machine import Machine
from services.worker.main import engine_config
from tests.support import ROOT
from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.scripted_engine import ScriptedEngine
from tests.support.scripted_memory import script
from tests.support.text_model import byte_tokenizer, write_model
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import (
    DECODE,
    MIXED,
    PREFILL,
    Roles,
    ScriptedRouter,
    idle,
    prefill_command,
    running_worker,
    until,
    worker_config,
)

VOCAB_SIZE = byte_tokenizer().get_vocab_size()
PROMPT = [5 + i * i % 250 for i in range(100)]
NUM_TOKENS = 40
FILES = ("scripted_engine", "scripted_memory")
NAMED_BY_THE_PROTOCOL = {"worker_engine", "config", "schedule.sequence", "step_tally"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Makes a model without weights, since nobody computes it."""
    return write_model(tmp_path_factory.mktemp("scripted"))


def scripted(host: WorkerHost) -> ScriptedEngine:
    assert isinstance(host.engine, ScriptedEngine)
    return host.engine


def served_modules(name: str) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / f"tests/support/{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_it_imports_only_what_the_protocol_names() -> None:
    modules = {module for name in FILES for module in served_modules(name) if module.startswith("services.")}
    engine = {module.removeprefix("services.engine.") for module in modules if module.startswith("services.engine.")}
    assert engine == NAMED_BY_THE_PROTOCOL
    assert {module.split(".")[1] for module in modules} == {"core", "engine", "kv"}


@pytest.mark.process
def test_it_needs_no_torch() -> None:
    program = "import sys, tests.support.scripted_engine; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_it_is_a_worker_engine() -> None:
    engine: type[WorkerEngine] = ScriptedEngine  # for mypy, which says what is missing
    assert engine.adopt is not WorkerEngine.adopt


@pytest.mark.parametrize(
    ("roles", "transport"),
    [
        ([PREFILL, DECODE], types_pb2.TRANSPORT_SHM),
        ([PREFILL, DECODE], types_pb2.TRANSPORT_GRPC),
        ([MIXED], types_pb2.TRANSPORT_LOCAL),
        ([DECODE], types_pb2.TRANSPORT_UNSPECIFIED),
    ],
    ids=["split-shm", "split-grpc", "adopted", "whole"],
)
async def test_every_way_gives_the_script(model: Path, roles: list[Roles], transport: types_pb2.Transport) -> None:
    pulls_by = {types_pb2.TRANSPORT_GRPC: "grpc", types_pb2.TRANSPORT_SHM: "shm"}.get(transport, "auto")
    async with running_cluster(model, roles, load=ScriptedEngine, transport=pulls_by) as cluster:
        for length in (1, 16, 17, 100):  # the pool's blocks are of 16
            prompt = PROMPT[:length]
            answer = await cluster.greedy(prompt, NUM_TOKENS)
            assert answer.token_ids == script(prompt, NUM_TOKENS, VOCAB_SIZE)
            assert answer.completion is not None
            assert answer.completion.timings.transport == transport
            assert answer.completion.timings.transfer_blocks == (-(-length // 16) if transport else 0)


async def test_what_the_memory_holds_is_what_is_said(model: Path) -> None:
    """The tests above would not notice a missing block otherwise, and checksums would before them."""
    async with running_cluster(model, [PREFILL, DECODE], load=ScriptedEngine, checksums="never") as cluster:
        cache, written = scripted(cluster.workers[1]).cache, []

        def write_nothing(block_ids: Sequence[int], data: Any) -> None:
            written.extend(block_ids)

        cache.write_blocks = write_nothing  # type: ignore[method-assign]
        answer = await cluster.greedy(PROMPT, NUM_TOKENS)
        right = script(PROMPT, NUM_TOKENS, VOCAB_SIZE)
        assert written
        assert answer.token_ids[0] == right[0], "the prefill worker's"
        assert answer.token_ids[1] != right[1]


async def test_a_pool_that_contradicts_the_layout_fails_the_start(model: Path) -> None:
    """Peers take a block's size from the layout: with another they would read parts of other blocks."""
    config = worker_config(model, worker_id="decode-7")
    engine = ScriptedEngine(engine_config(config, DECODE))
    engine.info = dataclasses.replace(engine.info, head_dim=2)
    tracer = Tracer(TracerProvider(shutdown_on_exit=False))
    with pytest.raises(LayoutMismatch, match="block 0 has 128 bytes, and by the layout 256"):
        WorkerHost(config, DECODE, engine, GrpcServer(), tracer, Machine(CLUSTER_TOKEN))
    engine.close()


PHASES: dict[str, Callable[[Cluster], bool]] = {
    "in the first step of the prompt": lambda cluster: len(cluster.workers[0].leases) > 0,
    "in a step of the decode": lambda cluster: bool(scripted(cluster.workers[1]).in_step),
}


@pytest.mark.parametrize("phase", PHASES)
async def test_cancellation_frees_everything(model: Path, phase: str) -> None:
    async with running_cluster(model, [PREFILL, DECODE], load=ScriptedEngine) as cluster:
        held = scripted(cluster.workers[list(PHASES).index(phase)])
        held.may_finish.clear()
        call = cluster.inference.GenerateStream(greedy_request(PROMPT, NUM_TOKENS))
        await until(lambda: PHASES[phase](cluster), phase)
        call.cancel()
        assert await call.code() is grpc.StatusCode.CANCELLED
        await until(lambda: not any(worker.num_legs for worker in cluster.workers), "no leg is left")
        ledger = held.stats().ledger
        assert ledger.active, "the step in flight may still write its sequence's blocks"
        assert not ledger.leased
        held.may_finish.set()
        await cluster.idle()
        assert (await cluster.greedy(PROMPT, 5)).token_ids == script(PROMPT, 5, VOCAB_SIZE)


class LateEngine(ScriptedEngine):
    """Reports its steps when the test says so."""

    def start(self, on_step: OnStep) -> None:
        self.may_report = threading.Event()

        def report_late(report: StepReport) -> None:
            assert self.may_report.wait(20.0)
            on_step(report)

        super().start(report_late)


async def test_a_prompt_cancelled_before_its_admission_is_reported_leaves_no_lease(model: Path) -> None:
    """The engine has taken the lease's references when the command is cancelled, but the worker does not know yet."""
    router = ScriptedRouter()
    async with running_worker(worker_config(model), PREFILL, load=LateEngine) as host, router.session(host) as session:
        leg, engine = router.new_leg(), host.engine
        assert isinstance(engine, LateEngine)
        await session.send(prefill=prefill_command(leg, PROMPT))
        await until(lambda: engine.stats().ledger.leased > 0, "it is admitted")
        await session.send(cancel=worker_pb2.CancelLeg(leg=leg))
        await until(lambda: bool(engine._aborted), "it is cancelled")
        assert host.num_legs == 1, "it waits to learn of the references"
        engine.may_report.set()
        await idle(host)


async def test_a_lease_that_expires_is_reported(model: Path) -> None:
    router = ScriptedRouter()
    config = worker_config(model, lease_ttl_s=0.2)
    async with running_worker(config, PREFILL, load=ScriptedEngine) as host, router.session(host) as session:
        leg = router.new_leg()
        await session.send(prefill=prefill_command(leg, PROMPT))
        ids, finish = await session.tokens(leg, count=1)
        assert (ids, finish) == (script(PROMPT, 1, VOCAB_SIZE), None)
        ended = await session.next("lease_ended", leg)
        assert ended.reason == worker_pb2.LEASE_END_REASON_EXPIRED
        await idle(host)


async def test_it_refuses_a_constraint_by_name(model: Path) -> None:
    """Nothing is compiled for it: that would start a process, which no test of `make test` may."""
    async with running_cluster(model, [PREFILL, DECODE], load=ScriptedEngine) as cluster:
        request = greedy_request(PROMPT, NUM_TOKENS, constraint=types_pb2.Constraint(regex="a*"))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await cluster.stream(request)
        assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "no masks" in str(caught.value.details())
