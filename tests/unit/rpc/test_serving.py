"""Tests real grpc.aio servers on port 0: errors of all four RPC kinds, bad bytes, sizes, health,
reflection, the port."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import weakref
from collections.abc import AsyncIterator

import grpc
import pytest
from google.rpc import status_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.core import errors
from services.rpc import authentication, options, serving, status
from services.rpc.channels import dial
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN

SERVICE = "baton.v1.InferenceService"
PING = "/test.Kinds/"
MALFORMED = b"\xff\xff\xff"


class Kinds:
    """Serves one handler per RPC kind over Status messages; what they do is set by the test."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self.ended = asyncio.Event()
        self.held: list[weakref.ref[Held]] = []

    def fail(self) -> None:
        held = Held()
        self.held.append(weakref.ref(held))
        if self.error is None:
            return
        error, self.error = self.error, None
        try:
            raise KeyError("what it came from")
        except KeyError as cause:
            raise error from cause

    async def unary_unary(self, request, context):
        self.fail()
        return request

    async def unary_stream(self, request, context):
        try:
            yield request
            self.fail()
            if request.message == "forever":
                await asyncio.Event().wait()
        finally:
            self.ended.set()

    async def stream_unary(self, requests, context):
        total = status_pb2.Status()
        async for request in requests:
            total.code += request.code
        self.fail()
        return total

    async def stream_stream(self, requests, context):
        async for request in requests:
            yield request
        self.fail()

    async def converts(self, request, context):
        try:
            yield request
            await asyncio.Event().wait()
        except (asyncio.CancelledError, GeneratorExit):  # the latter if it was cancelled while the response was sent
            self.ended.set()
            raise errors.Cancelled("the client went away") from None

    async def writes(self, request, context) -> None:
        await context.write(request)
        self.fail()

    def register(self, _servicer: object, server: grpc.aio.Server) -> None:
        make = {
            "unary_unary": grpc.unary_unary_rpc_method_handler,
            "unary_stream": grpc.unary_stream_rpc_method_handler,
            "stream_unary": grpc.stream_unary_rpc_method_handler,
            "stream_stream": grpc.stream_stream_rpc_method_handler,
            "writes": grpc.unary_stream_rpc_method_handler,
            "converts": grpc.unary_stream_rpc_method_handler,
        }
        handlers = {
            name: kind(getattr(self, name), status_pb2.Status.FromString, status_pb2.Status.SerializeToString)
            for name, kind in make.items()
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Kinds", handlers),))


class Held:
    """Stands for what a servicer's frames have: a request of many megabytes."""


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    async def ListModels(self, request, context):
        return inference_pb2.ListModelsResponse()

    async def Generate(self, request, context):
        return inference_pb2.GenerateResponse()


@pytest.fixture
async def kinds() -> AsyncIterator[tuple[Kinds, grpc.aio.Channel]]:
    servicer = Kinds()
    server = serving.GrpcServer(token=CLUSTER_TOKEN)
    server.add("test.Kinds", servicer.register, servicer)
    await server.start()
    async with dial(server.address, CLUSTER_TOKEN) as channel:
        yield servicer, channel
    await server.stop()


async def call(channel: grpc.aio.Channel, name: str, data: bytes = b"") -> list[bytes]:
    """Calls any kind with one request of raw bytes; all responses."""
    path = PING + name

    async def requests():
        yield data

    if name in ("unary_stream", "writes"):
        return [response async for response in channel.unary_stream(path)(data)]
    if name == "stream_stream":
        return [response async for response in channel.stream_stream(path)(requests())]
    if name == "stream_unary":
        return [await channel.stream_unary(path)(requests())]
    return [await channel.unary_unary(path)(data)]


ALL = ["unary_unary", "unary_stream", "stream_unary", "stream_stream", "writes"]


@pytest.mark.parametrize("name", ALL)
async def test_each_kind_works(kinds, name):
    _, channel = kinds
    data = status_pb2.Status(code=7).SerializeToString()
    assert await call(channel, name, data) == [data]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("grouped", [False, True])
async def test_a_raised_error_arrives_with_its_details(kinds, name, grouped):
    servicer, channel = kinds
    error = errors.InvalidRequest("sampling.temperature", "must not be NaN")
    servicer.error = ExceptionGroup("a TaskGroup", [error]) if grouped else error
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, name)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    received = status.from_call(caught.value)
    assert isinstance(received, errors.InvalidRequest)
    assert received.field == "sampling.temperature"


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", [errors.Overloaded, RuntimeError, "grouped"])
async def test_a_failed_call_leaves_nothing_to_the_cycle_collector(kinds, name, kind, monkeypatch):
    """The call's frames hold the request. Kept until a full collection, a few refused ones would fill the memory."""
    servicer, channel = kinds
    monkeypatch.setattr(status.logger, "disabled", True)  # pytest keeps records, and these have tracebacks
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            servicer.error = ExceptionGroup("tasks", [errors.Overloaded("no")]) if kind == "grouped" else kind("no")
            with pytest.raises(grpc.aio.AioRpcError):
                await call(channel, name)
        for _ in range(20):  # turns of the loop in which the server's task may end
            await asyncio.sleep(0)
        assert len(servicer.held) == 3
        assert [ref() for ref in servicer.held] == [None, None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ALL)
async def test_an_unforeseen_exception_is_opaque_and_logged(kinds, name, caplog):
    servicer, channel = kinds
    servicer.error = RuntimeError("secret")
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, name)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value)
    assert caught.value.details().removeprefix("internal error ") in caplog.text
    assert "RuntimeError: secret" in caplog.text


@pytest.mark.parametrize("name", ALL)
async def test_malformed_bytes_are_the_clients_fault(kinds, name):
    _, channel = kinds
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, name, MALFORMED)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert isinstance(status.from_call(caught.value), errors.MalformedMessage)
    assert await call(channel, name) == [b""]  # the server is unharmed


@pytest.mark.parametrize("name", ["unary_stream", "converts"])
async def test_a_cancelled_stream_runs_its_finally_in_time_and_logs_nothing(kinds, caplog, name):
    servicer, channel = kinds
    stream = channel.unary_stream(PING + name)(status_pb2.Status(message="forever").SerializeToString())
    async for _ in stream:
        break
    stream.cancel()
    await asyncio.wait_for(servicer.ended.wait(), HANG_S)
    assert await call(channel, "unary_unary") == [b""]  # whatever the end of the other sets off has happened
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_a_servicers_own_abort_is_left_alone(kinds):
    _, channel = kinds
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_an_unknown_method_is_unimplemented(kinds):
    _, channel = kinds
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(PING + "nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.fixture
async def inference() -> AsyncIterator[serving.GrpcServer]:
    server = serving.GrpcServer(reflects=True)
    server.add(SERVICE, inference_pb2_grpc.add_InferenceServiceServicer_to_server, Inference())
    await server.start()
    yield server
    await server.stop()


async def test_an_oversize_message_is_refused_by_the_runtime(inference):
    request = inference_pb2.GenerateRequest(text="x" * (options.MAX_REQUEST_BYTES + 1))
    unlimited = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(inference.address, options=unlimited) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await stub.ListModels(inference_pb2.ListModelsRequest())
    async with dial(inference.address) as channel:  # our own client does not even send it
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).Generate(request)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_health_tells_alive_from_ready(inference):
    async with dial(inference.address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def check(service: str) -> int:
            return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status

        assert await check("") == health_pb2.HealthCheckResponse.SERVING
        assert await check(SERVICE) == health_pb2.HealthCheckResponse.NOT_SERVING
        await inference.set_ready(True)
        assert await check(SERVICE) == health_pb2.HealthCheckResponse.SERVING
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=SERVICE))
        seen = []
        async for response in watch:
            seen.append(response.status)
            if len(seen) == 1:
                await inference.set_ready(False, SERVICE)
            else:
                break
        watch.cancel()
        assert seen == [health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING]


async def test_reflection_lists_the_services(inference):
    async def requests():
        yield reflection_pb2.ServerReflectionRequest(list_services="")
        yield reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)

    async with dial(inference.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        listed, described = [response async for response in stub.ServerReflectionInfo(requests())]
    assert {"grpc.health.v1.Health", SERVICE} < {service.name for service in listed.list_services_response.service}
    assert described.file_descriptor_response.file_descriptor_proto


async def test_a_second_server_on_the_port_fails(inference):
    second = serving.GrpcServer(port=inference.port)
    with pytest.raises(errors.ConfigError, match=f":{inference.port}"):
        second.bind()


async def test_stop_gives_the_port_back():
    first = serving.GrpcServer()
    await first.start()
    port = first.port
    await first.stop()
    second = serving.GrpcServer(port=port)
    assert second.bind() == port
    await second.start()
    await second.stop()


async def test_a_dead_address_is_unavailable_and_maps_to_no_worker():
    server = serving.GrpcServer()
    server.bind()
    await server.start()
    await server.stop()
    async with dial(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceServiceStub(channel).ListModels(inference_pb2.ListModelsRequest())
    assert isinstance(status.from_call(caught.value), errors.NoWorker)


@pytest.mark.parametrize("address", ["", "localhost", "localhost:", ":50051", "host:port", "host:0", "host:70000"])
def test_an_address_without_host_and_port_is_refused(address):
    with pytest.raises(errors.ConfigError, match="HOST:PORT"):
        dial(address)


def test_keepalive_of_both_ends_agrees():
    server, channel = dict(options.server_options()), dict(options.channel_options())
    assert server["grpc.so_reuseport"] == 0
    assert server["grpc.http2.min_ping_interval_without_data_ms"] < channel["grpc.keepalive_time_ms"]
    assert channel["grpc.keepalive_permit_without_calls"] == server["grpc.keepalive_permit_without_calls"] == 1
    assert server["grpc.max_receive_message_length"] == channel["grpc.max_send_message_length"]
    assert channel["grpc.max_receive_message_length"] == server["grpc.max_send_message_length"]


async def test_refusals_are_told_once_a_second_with_the_peer_and_without_the_guess(kinds, caplog):
    _, channel = kinds
    guess = {"metadata": authentication.credentials("a-guess-that-is-not-it")}
    for _ in range(20):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(PING + "unary_unary")(b"", **guess)  # beside the token that the channel adds
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    told = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
    assert 1 <= len(told) < 20
    assert re.fullmatch(r"refused /test.Kinds/unary_unary of ipv4:127\.0\.0\.1:\d+: another token.*", told[0])
    assert "a-guess" not in caplog.text


async def test_a_server_without_a_token_serves_only_what_is_for_anyone():
    servicer, server = Kinds(), serving.GrpcServer()
    server.add("test.Kinds", servicer.register, servicer)
    await server.start()
    async with dial(server.address, CLUSTER_TOKEN) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call(channel, "unary_unary")
        assert isinstance(status.from_call(refused.value), errors.Unauthenticated)
        assert (await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())).status
    await server.stop()
