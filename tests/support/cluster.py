"""Provides a cluster in this process: a router on port 0, workers real or scripted, and a client that keeps what it
received. The router goes by the clock that a test gives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, inference_pb2_grpc, types_pb2
from services.core.clock import Clock
from services.engine.loading import torch_engine
from services.router.coordinator import Coordinator
from services.router.coordinator.workers import WorkerState
from services.router.main import Router, RouterConfig
from services.rpc.telemetry import Tracer
from services.worker.host import WorkerHost
from tests.support.certificates import certificates, tls_flags
from tests.support.patience import HANG_S
from tests.support.recording import recording_tracer
from tests.support.scripted_worker import MODEL_ID, OUTPUT, ScriptedWorker
from tests.support.trusted import cluster_token_of, dial
from tests.support.workers import DECODE, MIXED, PREFILL, LoadEngine, Roles, idle, running_worker, until, worker_config

CONFIG = RouterConfig(
    served_model_name=MODEL_ID,
    port=0,
    control_port=0,
    heartbeat_s=0.05,
    silence_s=5.0,
    register_s=0.05,
    metrics_port=-1,
    canaries=False,  # a scripted worker counts every command
)
"""Of a router whose workers are scripted."""


@dataclass(slots=True)
class Answer:
    """Keeps what a client received of one stream, in order."""

    prompt_info: inference_pb2.PromptInfo | None = None
    text: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)
    """The name and the arguments of each call of a tool."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    completion: inference_pb2.Completion | None = None


class Cluster:
    """Keeps one router, the workers behind it (real or scripted), and what clients and operators dial.

    Scripted workers are this object's to stop, real ones `running_cluster`'s.
    """

    def __init__(
        self, config: RouterConfig, clock: Clock | None = None, *, tracer: Tracer | None = None, tls: Path | None = None
    ) -> None:
        """`tls`: the folder with the certificate that this end shows; None in the clear."""
        self.spans = InMemorySpanExporter()
        """What the router has traced, if no other tracer is given."""
        self.router = Router(config, tracer or recording_tracer(self.spans), cluster_token_of(config), clock)
        self.workers: list[WorkerHost] = []
        self.scripted: list[ScriptedWorker] = []
        self.leases: dict[bytes, asyncio.Event] = {}
        """What scripted workers share: the leases that the sources have, and that their ends came."""
        self._certificates = None if tls is None else certificates(tls, "operator")

    async def start(self) -> None:
        await self.router.start()
        self.channel = dial(self.router.address, certificates=self._certificates)
        self.control_channel = dial(self.router.control_address, certificates=self._certificates)
        self.inference = inference_pb2_grpc.InferenceServiceStub(self.channel)
        self.control = control_pb2_grpc.ControlServiceStub(self.control_channel)

    async def stop(self) -> None:
        await self.channel.close()
        await self.control_channel.close()
        await self.router.stop()
        for worker in self.scripted:
            await worker.stop()

    async def add(self, role: str, **facts: Any) -> ScriptedWorker:
        """Returns a scripted worker that has joined."""
        worker = ScriptedWorker(role, OUTPUT, self.leases, **facts)
        self.scripted.append(worker)
        await worker.start()
        await self.join(worker)
        return worker

    async def join(self, worker: ScriptedWorker) -> None:
        """Registers, again and again as workers do, until the router holds a session."""

        async def joined() -> bool:
            try:
                await worker.register(self.control_channel)
            except grpc.aio.AioRpcError as error:
                if error.code() is not grpc.StatusCode.UNAVAILABLE:  # as while a model's text is fetched
                    raise
                return False
            ready = control_pb2.WORKER_STATE_READY
            workers = (await self.status()).workers
            return any(w.worker.worker_id == worker.worker_id and w.state == ready for w in workers)

        await self.until(joined)

    async def until(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(HANG_S):
            while not await condition():  # noqa: ASYNC110  # the condition is an RPC: only asking tells
                await asyncio.sleep(0.01)

    @property
    def num_ready(self) -> int:
        """Returns the number of ready workers, of all models together."""
        workers = (worker for each in self.coordinators for worker in each.workers.all())
        return sum(worker.state is WorkerState.READY for worker in workers)

    @property
    def coordinators(self) -> list[Coordinator]:
        """Returns the coordinators, one for each model."""
        return [model.conductor.coordinator for model in self.router.catalogue.all()]

    async def status(self) -> control_pb2.GetStatusResponse:
        return await self.control.GetStatus(control_pb2.GetStatusRequest())

    def metrics(self) -> CollectorRegistry:
        """Returns what the router's metrics port shows."""
        return self.router._metrics.registry

    async def stream(self, request: inference_pb2.GenerateRequest, timeout_s: float = 120.0) -> Answer:
        return await receive(self.inference.GenerateStream(request, timeout=timeout_s))

    async def greedy(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Answer:
        return await self.stream(greedy_request(prompt, max_tokens, **fields))

    async def idle(self) -> None:
        """Waits until router and workers hold nothing."""
        for coordinator in self.coordinators:
            await until(lambda each=coordinator: each.num_live == 0, "the router has no request")
            coordinator.check_idle()
        for worker in self.workers:
            await idle(worker)
        for scripted in self.scripted:
            await until(lambda each=scripted: not each.num_legs, f"{scripted.worker_id} has no leg")

    async def steps_at_rest(self) -> list[int]:
        """Returns how many steps each worker has done, once nothing is under way to it any more.

        A worker may be idle because a command, and the cancellation behind it, have not arrived yet. Sessions keep the
        order, so both have when a request sent after them is done by all workers.
        """
        assert len((await self.greedy([7, 8, 9], 2, cache_salt="last")).token_ids) == 2
        await self.idle()
        return [worker.engine.stats().num_steps for worker in self.workers]


async def receive(stream: AsyncIterator[inference_pb2.GenerateStreamResponse]) -> Answer:
    """Returns what the stream brings, and asserts the order that the contract demands. Raises what the call does."""
    answer = Answer()
    async for message in stream:
        match message.WhichOneof("event"):
            case "prompt_info":
                assert answer.prompt_info is None, "prompt_info comes once, and first"
                answer.prompt_info = message.prompt_info
            case "chunk":
                assert answer.prompt_info is not None
                assert answer.completion is None
                answer.text += message.chunk.text
                answer.reasoning += message.chunk.reasoning
                for part in message.chunk.tool_calls:
                    if part.id:
                        answer.calls.append((part.name, ""))
                    name, arguments = answer.calls[part.index]
                    answer.calls[part.index] = (name, arguments + part.arguments)
                answer.token_ids += message.chunk.token_ids
                answer.logprobs += message.chunk.logprobs
            case "completion":
                answer.completion = message.completion
    assert answer.completion is not None, "an OK stream ends with its completion"
    return answer


async def receive_several(
    stream: AsyncIterator[inference_pb2.GenerateStreamResponse], num_answers: int
) -> list[Answer]:
    """Returns what the stream brings of each of several answers, and asserts that each has one end."""
    answers = [Answer() for _ in range(num_answers)]
    async for message in stream:
        match message.WhichOneof("event"):
            case "prompt_info":
                assert answers[0].prompt_info is None, "prompt_info comes once, and first"
                answers[0].prompt_info = message.prompt_info
            case "chunk":
                answer = answers[message.chunk.index]
                assert answers[0].prompt_info is not None
                assert answer.completion is None, "nothing comes after its completion"
                answer.text += message.chunk.text
                answer.token_ids += message.chunk.token_ids
                answer.logprobs += message.chunk.logprobs
            case "completion":
                assert answers[message.completion.index].completion is None, "it ends once"
                answers[message.completion.index].completion = message.completion
    assert all(answer.completion is not None for answer in answers), "an OK stream ends with its last completion"
    return answers


def code_of(error: grpc.aio.AioRpcError) -> grpc.StatusCode:
    return error.code()


async def read(call: Any) -> tuple[list[inference_pb2.GenerateStreamResponse], str]:
    """Returns a stream's events as they came, and its text."""
    events = [event async for event in call]
    return events, "".join(event.chunk.text for event in events)


async def begun(call: Any) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
    """Returns a stream's events behind its first chunk, once that has come."""
    events = aiter(call)
    async with asyncio.timeout(HANG_S):
        while (await anext(events)).WhichOneof("event") != "chunk":
            pass
    return events


def request(text: str = "hello", **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(text=text, **fields)


def greedy_request(prompt: Sequence[int], max_tokens: int, **fields: Any) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        token_ids=inference_pb2.TokenIds(ids=prompt),
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=max_tokens, ignore_eos=True),
        **fields,
    )


@contextlib.asynccontextmanager
async def running_cluster(
    model: Path,
    roles: Sequence[Roles],
    *,
    router: dict[str, Any] | None = None,
    each: Sequence[dict[str, Any]] | None = None,
    tracer: Tracer | None = None,
    worker_tracer: Tracer | None = None,
    load: LoadEngine = torch_engine,
    clock: Clock | None = None,
    tls: Path | None = None,
    **worker: Any,
) -> AsyncIterator[Cluster]:
    """`worker` configures all workers, `each` one by one; `load` makes their engines; `clock` is the router's. With
    `tls`, a folder of `baton certs dev`, all speak TLS, and show each other no token.

    Asserts at the end that everything is idle.
    """
    tracer = tracer or Tracer(TracerProvider(shutdown_on_exit=False))
    worker_tracer = worker_tracer or tracer
    async with contextlib.AsyncExitStack() as stack:
        # Canaries would show in ledgers, step counts and prefix caches. All ends are in this one process: what holds it
        # up for seconds is the machine, and no peer's silence. What tests look at is the handoff, whatever it costs.
        flags = {"canaries": False, "split": "always", "silence_s": HANG_S, **tls_flags(tls, "router")}
        flags |= router or {}
        config = RouterConfig(model=str(model), host="127.0.0.1", port=0, control_port=0, **flags)
        cluster = Cluster(config, clock, tracer=tracer, tls=tls)
        await cluster.start()
        stack.push_async_callback(cluster.stop)
        for index, role in enumerate(roles):
            changes = {"silence_s": HANG_S, **tls_flags(tls, "worker"), **worker, **(each[index] if each else {})}
            config = worker_config(model, router=(cluster.router.control_address,), worker_id=f"w{index}", **changes)
            cluster.workers.append(await stack.enter_async_context(running_worker(config, role, worker_tracer, load)))
        await until(lambda: cluster.num_ready == len(roles), "every worker is ready", HANG_S)
        yield cluster
        await cluster.idle()


async def split_and_whole(
    model: Path,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    *,
    split: dict[str, Any] | None = None,
    **worker: Any,
) -> list[tuple[Answer, Answer]]:
    """Returns two greedy answers to each prompt: of a prefill and a decode worker, all at once, and of a mixed worker,
    one by one. `worker` configures all workers, `split` those of the first cluster.

    Asserts that the first answers were split.
    """
    async with running_cluster(model, [PREFILL, DECODE], **worker, **(split or {})) as cluster:
        divided = await asyncio.gather(*(cluster.greedy(prompt, max_tokens) for prompt in prompts))
    async with running_cluster(model, [MIXED], **worker) as cluster:
        whole = [await cluster.greedy(prompt, max_tokens) for prompt in prompts]
    for answer in divided:
        assert answer.completion is not None
        assert (answer.completion.workers.prefill, answer.completion.workers.decode) == ("w0", "w1")
    return list(zip(divided, whole, strict=True))
