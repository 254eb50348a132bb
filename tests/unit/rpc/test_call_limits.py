"""Calls that keep a real server waiting, more of them than it serves: others are answered, and health always is."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.rpc import options
from services.rpc.channels import dial
from services.rpc.serving import GrpcServer
from tests.support.bad_peers import HTTP2_PREFACE, HTTP2_SETTINGS, grpc_request
from tests.support.patience import HANG_S

MOST = 8
MIB = 1 << 20
READY = grpc.ChannelConnectivity.READY
LIST_MODELS = "/baton.v1.InferenceService/ListModels"
NO_WINDOW = b"\x00\x00\x06\x04\x00\x00\x00\x00\x00" + b"\x00\x04" + bytes(4)
"""SETTINGS: the client has no room for a byte of any answer."""


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    def __init__(self) -> None:
        self.gate, self.working = asyncio.Event(), asyncio.Semaphore(0)

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="here")])

    async def Generate(self, request: Any, context: Any) -> inference_pb2.GenerateResponse:
        self.working.release()
        await self.gate.wait()
        return inference_pb2.GenerateResponse()

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        while True:
            yield inference_pb2.GenerateStreamResponse(chunk=inference_pb2.Chunk(text="x" * 10_000))


Running = tuple[GrpcServer, grpc.aio.Channel, Inference]


@contextlib.asynccontextmanager
async def running(**flags: Any) -> AsyncIterator[Running]:
    server, servicer = GrpcServer(**flags), Inference()
    server.add("baton.v1.InferenceService", inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer)
    await server.start()
    async with dial(server.address) as channel:
        yield server, channel, servicer
    await server.stop()


async def list_models(channel: grpc.aio.Channel) -> list[str]:
    answer = await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(inference_pb2.ListModelsRequest())
    return [model.id for model in answer.models]


async def is_served(channel: grpc.aio.Channel) -> bool:
    """Returns False if it is refused for want of room."""
    try:
        assert await list_models(channel) == ["here"]
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            raise
        return False
    return True


async def is_healthy(channel: grpc.aio.Channel) -> bool:
    answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def answered(channel: grpc.aio.Channel) -> None:
    """Asserts that the channel is served in the end: who is refused may try again."""
    assert await is_healthy(channel)
    async with asyncio.timeout(HANG_S):
        while True:
            if await is_served(channel):
                return
            assert await is_healthy(channel)


def silent(channel: grpc.aio.Channel) -> Any:
    return channel.stream_unary(LIST_MODELS)()


def not_reading(channel: grpc.aio.Channel) -> Any:
    return inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(inference_pb2.GenerateRequest())


@pytest.mark.parametrize("knock", [silent, not_reading])
async def test_calls_that_keep_the_server_waiting_make_room(knock: Callable[[grpc.aio.Channel], Any]) -> None:
    async with running(max_concurrent_rpcs=MOST) as (_, channel, _):
        calls = [knock(channel) for _ in range(3 * MOST)]
        await answered(channel)
        for call in calls:
            call.cancel()


async def test_who_only_watches_makes_room() -> None:
    async with running(max_concurrent_rpcs=MOST) as (_, channel, _):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = []
        for _ in range(MOST):  # one after the other: of calls that are opened at once any may arrive first
            watches.append(stub.Watch(health_pb2.HealthCheckRequest()))
            assert (await watches[-1].read()).status == health_pb2.HealthCheckResponse.SERVING
        await answered(channel)
        async with asyncio.timeout(HANG_S):
            code = await watches[0].code()
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED, "the one that has watched for longest"
        for watch in watches:
            watch.cancel()


def lonely(address: str) -> grpc.aio.Channel:
    """Returns a channel with a connection of its own, that comes back soon when it is thrown out."""
    soon = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")]
    return grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1), *soon])


async def watch(channel: grpc.aio.Channel) -> None:
    """Watches for ever, as clients do who want to know."""
    while True:
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), wait_for_ready=True)
        with contextlib.suppress(grpc.aio.AioRpcError):
            async for _ in call:
                pass


async def open_a_call(channel: grpc.aio.Channel) -> None:
    with contextlib.suppress(grpc.aio.AioRpcError):
        await channel.stream_unary(LIST_MODELS)(wait_for_ready=True).code()


async def only_connect(channel: grpc.aio.Channel) -> None:
    await channel.channel_ready()


async def call_often(channel: grpc.aio.Channel) -> None:
    """No connection of this one is ever idle, nor kept by one call."""
    while True:
        with contextlib.suppress(grpc.aio.AioRpcError):
            await is_healthy(channel)
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("occupy", [watch, open_a_call, only_connect, call_often])
async def test_connections_are_not_kept_for_ever(
    occupy: Callable[[grpc.aio.Channel], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(options, "MAX_CONNECTIONS", 2 * MOST)
    monkeypatch.setattr(options, "MAX_CONNECTION_IDLE_MS", 500)
    monkeypatch.setattr(options, "MAX_CONNECTION_AGE_MS", 1000)
    async with running() as (server, channel, servicer):
        working = asyncio.ensure_future(
            inference_pb2_grpc.InferenceServiceStub(channel).Generate(inference_pb2.GenerateRequest())
        )
        await servicer.working.acquire()
        async with contextlib.AsyncExitStack() as stack, asyncio.timeout(60):
            occupants = [await stack.enter_async_context(lonely(server.address)) for _ in range(2 * MOST)]
            tasks = [asyncio.create_task(occupy(each)) for each in occupants]
            try:
                while sum(each.get_state() is READY for each in occupants) < 2 * MOST - 1:  # noqa: ASYNC110  # no event
                    await asyncio.sleep(0.01)
                for _ in range(3):
                    async with lonely(server.address) as newcomer:
                        stub = health_pb2_grpc.HealthStub(newcomer)
                        answer = await stub.Check(health_pb2.HealthCheckRequest(), wait_for_ready=True)
                        assert answer.status == health_pb2.HealthCheckResponse.SERVING
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        servicer.gate.set()
        await working  # older than any connection may be, and not cut


async def test_what_the_server_works_on_is_never_ended_for_others() -> None:
    async with running(max_concurrent_rpcs=MOST) as (_, channel, servicer):
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        working = [asyncio.ensure_future(stub.Generate(inference_pb2.GenerateRequest())) for _ in range(MOST)]
        async with asyncio.timeout(HANG_S):
            for _ in range(MOST):  # a call made meanwhile could take the place of one of these
                await servicer.working.acquire()
        assert not await is_served(channel)
        assert await is_healthy(channel)
        servicer.gate.set()
        await asyncio.gather(*working)
        assert await list_models(channel) == ["here"]


async def test_messages_that_are_arriving_are_few() -> None:
    """The runtime keeps what has come of each."""
    async with running(max_request_bytes=64 * MIB) as (_, channel, _):
        ends = [asyncio.ensure_future(call) for call in [silent(channel) for _ in range(12)]]
        left = set(ends)
        async with asyncio.timeout(HANG_S):
            while len(left) > 4:
                done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
                for end in done:
                    error = end.exception()
                    assert isinstance(error, grpc.aio.AioRpcError)
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, error
        assert len(left) == 4
        assert await list_models(channel) == ["here"]
        for end in left:
            end.cancel()


async def test_answers_that_are_never_taken_leave_the_door_open() -> None:
    raw = grpc_request(LIST_MODELS, b"", {}).removeprefix(HTTP2_PREFACE + HTTP2_SETTINGS)
    async with running(max_concurrent_rpcs=MOST) as (server, channel, _):
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(2 * MOST):
                reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
                stack.callback(writer.close)
                writer.write(HTTP2_PREFACE + NO_WINDOW + raw)
                head = await reader.readexactly(9)  # settings: the connection is up
                assert head[3] == 4
                while True:  # until its answer's headers have come; the message never will
                    await reader.readexactly(int.from_bytes(head[:3], "big"))
                    head = await reader.readexactly(9)
                    if head[3] == 1:
                        break
            assert await is_healthy(channel)
            assert await list_models(channel) == ["here"]
