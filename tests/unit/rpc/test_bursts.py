"""Tests that of thousands of calls begun at once each is served, or refused with a reason and a time to come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2

from baton.v1 import inference_pb2, inference_pb2_grpc
from services.rpc.channels import dial
from services.rpc.serving import GrpcServer
from services.rpc.status import status_of_call
from tests.support.patience import HANG_S

NUM_CALLS = 1900  # the runtime begins to cancel some of those that wait above 1,000
SERVED, REFUSED = "served", "refused"


class Inference(inference_pb2_grpc.InferenceServiceServicer):
    """Answers nobody before each call is open here or has ended."""

    def __init__(self) -> None:
        self._num_left = NUM_CALLS
        self._gate = asyncio.Event()

    def arrived(self) -> None:
        self._num_left -= 1
        if self._num_left == 0:
            self._gate.set()

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[inference_pb2.GenerateStreamResponse]:
        self.arrived()
        await self._gate.wait()
        yield inference_pb2.GenerateStreamResponse()


async def outcomes(max_concurrent_rpcs: int, num_channels: int) -> Counter[str]:
    server, servicer = GrpcServer(max_concurrent_rpcs=max_concurrent_rpcs), Inference()
    server.add("baton.v1.InferenceService", inference_pb2_grpc.add_InferenceServiceServicer_to_server, servicer)
    await server.start()
    async with contextlib.AsyncExitStack() as stack:
        channels = [await stack.enter_async_context(dial(server.address)) for _ in range(num_channels)]
        stubs = [inference_pb2_grpc.InferenceServiceStub(channel) for channel in channels]
        async with asyncio.timeout(HANG_S):
            calls = (outcome(stubs[number % num_channels], servicer) for number in range(NUM_CALLS))
            found = await asyncio.gather(*calls)
    await server.stop()
    return Counter(found)


async def outcome(stub: Any, servicer: Inference) -> str:
    try:
        async for _ in stub.GenerateStream(inference_pb2.GenerateRequest()):
            pass
    except grpc.aio.AioRpcError as error:
        servicer.arrived()
        details = [each.TypeName() for each in getattr(status_of_call(error), "details", ())]
        has_delay = error_details_pb2.RetryInfo.DESCRIPTOR.full_name in details
        return REFUSED if has_delay else f"{error.code().name}: {error.details()}"
    return SERVED


@pytest.mark.parametrize("num_channels", [1, 8])
async def test_a_burst_below_the_limit_is_served(num_channels: int) -> None:
    assert await outcomes(4096, num_channels) == {SERVED: NUM_CALLS}


@pytest.mark.parametrize("most", [1, 64, 1000])
async def test_what_is_above_the_limit_is_refused_with_a_reason(most: int) -> None:
    found = await outcomes(most, 8)
    assert found.keys() == {SERVED, REFUSED}
