"""Tests both clients against a server of grpc.aio's that does as it is told, and against a real router."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc
from baton_client import (
    AsyncClient,
    CallCancelled,
    CallFailed,
    CallTimedOut,
    Client,
    InvalidArgument,
    ResponseStream,
    RetryPolicy,
    Unavailable,
)
from services.core.errors import BatonError, InvalidRequest, NoWorker, Overloaded, WorkerFailed
from services.router.front.grpc.servicer import FULL_NAME
from services.rpc.serving import GrpcServer
from tests.support.cluster import Cluster, request
from tests.support.patience import HANG_S
from tests.support.scripted_worker import TEXT

SOON = RetryPolicy(max_attempts=4, first_pause_s=0.01, max_pause_s=1.0)
HANG = object()
GONE = NoWorker("none is ready", retry_after_s=0.05)


def chunk(text: str) -> inference_pb2.GenerateStreamResponse:
    return inference_pb2.GenerateStreamResponse(chunk=inference_pb2.Chunk(text=text))


class Told(inference_pb2_grpc.InferenceServiceServicer):
    """Each call follows the next script: texts are said, errors raised, HANG hangs."""

    def __init__(self, server: GrpcServer) -> None:
        self.server = server
        self.scripts: list[list[Any]] = []
        self.calls: list[float | None] = []
        """The time each call was given, seconds."""
        self.metadata: dict[str, Any] = {}
        self.ended = asyncio.Event()
        """A call that was to hang is over."""

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async with contextlib.aclosing(self._follow(context)) as texts:
            async for text in texts:
                yield chunk(text)

    async def Generate(self, request: Any, context: Any) -> inference_pb2.GenerateResponse:
        text = "".join([text async for text in self._follow(context)])
        return inference_pb2.GenerateResponse(output=inference_pb2.Chunk(text=text))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        names = [name async for name in self._follow(context)]
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id=name) for name in names])

    async def _follow(self, context: Any) -> AsyncIterator[str]:
        self.calls.append(context.time_remaining())
        self.metadata = dict(context.invocation_metadata())
        script = self.scripts.pop(0)
        try:
            for part in script:
                if part is HANG:
                    await asyncio.Event().wait()
                if isinstance(part, BatonError):
                    raise part
                yield part
        finally:  # it may be cancelled before it hangs, while what came before is sent
            if HANG in script:
                self.ended.set()


@pytest.fixture
async def told() -> AsyncIterator[Told]:
    told = Told(GrpcServer())
    told.server.add(FULL_NAME, inference_pb2_grpc.add_InferenceServiceServicer_to_server, told)
    await told.server.start()
    yield told
    assert told.scripts == []
    await told.server.stop()


class Asking:
    """Asks one of the two clients, in one way."""

    def __init__(self, target: str, kind: type[Client] | type[AsyncClient], **settings: Any) -> None:
        self.client = kind(target, **{"retry": SOON, **settings})

    async def generate(self, **options: Any) -> str:
        if isinstance(self.client, AsyncClient):
            return (await self.client.generate(request(), **options)).output.text
        return (await asyncio.to_thread(self.client.generate, request(), **options)).output.text

    async def stream(self, texts: list[str], **options: Any) -> None:
        """Appends to `texts` as they come."""
        if isinstance(self.client, AsyncClient):
            async for event in self.client.generate_stream(request(), **options):
                texts.append(event.chunk.text)  # noqa: PERF401  # also what came before a failure
        else:
            await asyncio.to_thread(self._stream, texts, options)

    def _stream(self, texts: list[str], options: dict[str, Any]) -> None:
        assert isinstance(self.client, Client)
        for event in self.client.generate_stream(request(), **options):
            texts.append(event.chunk.text)  # noqa: PERF401

    async def models(self, **options: Any) -> list[str]:
        if isinstance(self.client, AsyncClient):
            return [model.id for model in await self.client.list_models(**options)]
        return [model.id for model in await asyncio.to_thread(self.client.list_models, **options)]

    async def close(self) -> None:
        if isinstance(self.client, AsyncClient):
            await self.client.close()
        else:
            self.client.close()


@pytest.fixture(params=[Client, AsyncClient], ids=["sync", "asyncio"])
async def asking(request: pytest.FixtureRequest, told: Told) -> AsyncIterator[Asking]:
    asking = Asking(told.server.address, request.param, metadata=[("x-team", "blue")])
    yield asking
    await asking.close()


async def test_every_call(told: Told, asking: Asking) -> None:
    told.scripts = [["a ", "b"], ["c ", "d"], ["one", "two"]]
    assert await asking.generate() == "a b"
    texts: list[str] = []
    await asking.stream(texts, metadata=[("traceparent", "00-1-2-01")])
    assert texts == ["c ", "d"]
    assert (told.metadata["x-team"], told.metadata["traceparent"]) == ("blue", "00-1-2-01")
    assert await asking.models() == ["one", "two"]
    assert told.metadata["x-team"] == "blue"
    assert told.calls == [None, None, None]


async def test_what_was_refused_is_tried_again(told: Told, asking: Asking) -> None:
    full = Overloaded("full", retry_after_s=0.05)
    told.scripts = [[GONE], [full], ["a"], [full], [GONE], ["b"], [GONE], ["m"]]
    began_s = asyncio.get_running_loop().time()
    assert await asking.generate() == "a"
    assert asyncio.get_running_loop().time() - began_s >= 0.1  # twice what the server asked for
    texts: list[str] = []
    await asking.stream(texts)
    assert texts == ["b"]
    assert await asking.models() == ["m"]


async def test_in_the_end_the_refusal_is_raised(told: Told, asking: Asking) -> None:
    told.scripts = [[GONE]] * 4
    with pytest.raises(Unavailable) as refused:
        await asking.stream([])
    assert (refused.value.reason, refused.value.retry_after_s) == ("NO_WORKER", 0.05)
    assert len(told.calls) == 4


async def test_nothing_is_said_twice(told: Told, asking: Asking) -> None:
    told.scripts = [["a ", GONE]]
    texts: list[str] = []
    with pytest.raises(Unavailable):
        await asking.stream(texts)
    assert texts == ["a "]
    assert len(told.calls) == 1


@pytest.mark.parametrize("error", [WorkerFailed("died"), InvalidRequest("text", "must not be empty")])
async def test_what_is_no_refusal_is_raised_at_once(told: Told, asking: Asking, error: BatonError) -> None:
    told.scripts = [[error], [error]]
    with pytest.raises(CallFailed) as raised:
        await asking.generate()
    assert raised.value.reason == error.reason
    with pytest.raises(CallFailed):
        await asking.stream([])
    assert len(told.calls) == 2


async def test_a_wrong_field_is_named(told: Told, asking: Asking) -> None:
    told.scripts = [[InvalidRequest("sampling.temperature", "must not be negative")]]
    with pytest.raises(InvalidArgument, match=r"INVALID_ARGUMENT: sampling\.temperature") as refused:
        await asking.generate()
    (violation,) = refused.value.violations
    assert (violation.field, violation.description) == ("sampling.temperature", "must not be negative")


async def test_a_deadline_ends_it_everywhere(told: Told, asking: Asking) -> None:
    told.scripts = [["a", HANG]]
    with pytest.raises(CallTimedOut):
        await asking.stream([], timeout_s=0.2)
    await told.ended.wait()


async def test_attempts_share_one_deadline(told: Told, asking: Asking) -> None:
    told.scripts = [[NoWorker("none", retry_after_s=0.8)], ["a"]]
    assert await asking.generate(timeout_s=10.0) == "a"
    first_s, second_s = told.calls
    assert first_s is not None
    assert second_s is not None
    # gRPC rounds what it sends up to tenths of a second, and a timeout shorter than the last by up to 3 % to the last.
    assert second_s <= 10.0 - 0.8 + 0.1 < 0.97 * 10.0


async def test_nobody_there(told: Told) -> None:
    for kind in (Client, AsyncClient):
        asking = Asking("127.0.0.1:1", kind, retry=RetryPolicy(max_attempts=2, first_pause_s=0.01))
        with pytest.raises(Unavailable) as refused:
            await asking.models()
        assert refused.value.reason == ""
        await asking.close()


async def test_a_stream_that_is_left_is_cancelled(told: Told) -> None:
    told.scripts = [["a", HANG]] * 2
    with Client(told.server.address) as client, client.generate_stream(request()) as stream:
        assert (await asyncio.to_thread(next, stream)).chunk.text == "a"
    await told.ended.wait()
    told.ended.clear()
    async with AsyncClient(told.server.address) as other, other.generate_stream(request()) as texts:
        assert (await anext(texts)).chunk.text == "a"
    await told.ended.wait()


async def test_cancelling_from_elsewhere(told: Told) -> None:
    told.scripts = [["a", HANG]] * 2
    with Client(told.server.address) as client:
        stream = client.generate_stream(request())
        await asyncio.to_thread(next, stream)
        reading = asyncio.create_task(asyncio.to_thread(next, stream))
        stream.cancel()
        with pytest.raises(CallCancelled):
            await reading
    await told.ended.wait()
    async with AsyncClient(told.server.address) as other:
        texts = other.generate_stream(request())
        await anext(texts)
        waiting = asyncio.create_task(anext(texts))
        await asyncio.sleep(0)
        texts.cancel()
        with pytest.raises(CallCancelled):
            await waiting


async def test_cancelling_in_a_pause(told: Told) -> None:
    patient = RetryPolicy(first_pause_s=60.0, max_pause_s=60.0)
    told.scripts = [[GONE]] * 2
    with Client(told.server.address, retry=patient) as client:
        reading, stream = _reading(client)
        await _refused(told, 1)
        stream.cancel()
        with pytest.raises(CallCancelled):
            await reading
    async with AsyncClient(told.server.address, retry=patient) as other:
        texts = other.generate_stream(request())
        waiting = asyncio.create_task(anext(texts))
        await _refused(told, 2)
        texts.cancel()
        with pytest.raises(CallCancelled):
            await waiting
    assert len(told.calls) == 2


async def test_a_task_that_is_cancelled_takes_its_call_along(told: Told) -> None:
    told.scripts = [["a", HANG]]
    async with AsyncClient(told.server.address) as client:
        stream = client.generate_stream(request())
        await anext(stream)
        waiting = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await told.ended.wait()


def _reading(client: Client) -> tuple[asyncio.Task[Any], ResponseStream]:
    stream = client.generate_stream(request())
    return asyncio.create_task(asyncio.to_thread(next, stream)), stream


async def _refused(told: Told, num_calls: int) -> None:
    async with asyncio.timeout(HANG_S):
        while len(told.calls) < num_calls:  # noqa: ASYNC110  # another thread's, or task's, call
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)  # the refusal is on its way


async def test_a_real_router(cluster: Cluster, pair: Any) -> None:
    async with AsyncClient(cluster.router.address) as client:
        events = [event async for event in client.generate_stream(request("hello"), timeout_s=30.0)]
        assert [event.WhichOneof("event") for event in (events[0], events[-1])] == ["prompt_info", "completion"]
        assert "".join(event.chunk.text for event in events) == TEXT
        (model,) = await client.list_models()
        assert model.ready
        with pytest.raises(InvalidArgument) as refused:
            await client.generate(request("hello", priority=1000))
        assert [violation.field for violation in refused.value.violations] == ["priority"]
    with Client(cluster.router.address) as sync:
        answer = await asyncio.to_thread(sync.generate, request("hello"), timeout_s=30.0)
        assert answer.output.text == TEXT


async def test_a_real_router_without_a_worker(cluster: Cluster) -> None:
    async with AsyncClient(cluster.router.address, retry=SOON) as client:
        with pytest.raises(CallTimedOut):
            await client.generate(request("hello"), timeout_s=0.3)


async def test_over_tls_the_credentials_are_used(told: Told) -> None:
    """A server that speaks no TLS is not taken for one that does: it is refused."""
    async with AsyncClient(
        told.server.address, credentials=grpc.ssl_channel_credentials(), retry=RetryPolicy(max_attempts=1)
    ) as client:
        with pytest.raises(Unavailable):
            await client.list_models(timeout_s=10.0)
    assert told.calls == []
