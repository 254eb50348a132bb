"""Says what is fuzzed, with what, and how an answer is read."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import hypothesis.strategies as st
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, settings

from baton.v1 import types_pb2, worker_pb2
from services.rpc.authentication import credentials
from services.rpc.options import channel_options
from services.worker.host import WorkerHost
from tests.support.cluster import Answer, Cluster
from tests.support.examples import num_examples
from tests.support.models import VOCAB_SIZE
from tests.support.protofuzz import Overrides, harmless
from tests.support.trusted import CLUSTER_TOKEN, dial
from tests.support.workers import ScriptedRouter, ScriptedSession

HUNG_S = 20.0
AT_ONCE = 8
PROMPT = list(range(10, 40))
CONTEXT_TOKENS = 80
Code = grpc.StatusCode
session_numbers = itertools.count(1)
TYPED = {
    Code.OK,
    Code.INVALID_ARGUMENT,
    Code.NOT_FOUND,
    Code.ALREADY_EXISTS,
    Code.RESOURCE_EXHAUSTED,
    Code.FAILED_PRECONDITION,
    Code.ABORTED,
    Code.UNAVAILABLE,
    Code.DEADLINE_EXCEEDED,
}
TYPED_NUMBERS = {code.value[0] for code in TYPED - {Code.OK}}

TOKEN_IDS = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=50)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-45, 1e-30, 0.7, 100.0]),
        "top_p": st.sampled_from([1e-45, 0.5, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, VOCAB_SIZE, (1 << 31) - 1]),
        "min_p": st.sampled_from([0.0, 1e-45, 1.0]),
        "repetition_penalty": st.sampled_from([1e-45, 0.5, 100.0]),
        "presence_penalty": st.sampled_from([-2.0, 2.0]),
        "frequency_penalty": st.sampled_from([-2.0, 2.0]),
        "seed": st.sampled_from([0, 1, (1 << 63) - 1, (1 << 64) - 1]),
    },
)
STOPPING = st.fixed_dictionaries(
    {},
    optional={
        "max_tokens": st.integers(1, 8),
        "min_tokens": st.integers(0, 8),
        "stop": st.lists(st.text(min_size=1, max_size=3), max_size=2),
        "stop_token_ids": st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=4),
        "ignore_eos": st.booleans(),
    },
)
COMMAND = {"leg": st.integers(1, 3), "token_ids": TOKEN_IDS, "sampling": SAMPLING, "stopping": STOPPING}
EXTRAS = {
    "logprobs": st.integers(0, 20),
    "priority": st.integers(-(1 << 31), (1 << 31) - 1),
    "cache_salt": st.text(max_size=4),
    "remaining_ms": st.sampled_from([-1, 0, 5_000, (1 << 63) - 1]),
    "traceparent": st.text(max_size=4),
}
PLAUSIBLE: Overrides = {
    "baton.v1.SamplingParams": SAMPLING,
    "baton.v1.StoppingParams": STOPPING,
    "baton.v1.TokenIds": st.fixed_dictionaries({"ids": TOKEN_IDS}),
    "baton.v1.PrefillCommand": st.fixed_dictionaries(COMMAND, optional=EXTRAS),
}


def examples(count: int) -> Any:
    quiet = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
    return settings(max_examples=num_examples(count), derandomize=True, database=None, suppress_health_check=quiet)


@dataclass
class Target:
    """Names what is fuzzed, and what it answers to a good request."""

    cluster: Cluster
    known: Answer
    addresses: list[str]
    """All that a message may hold: nobody there, this router, the workers, and one that accepts and says nothing."""

    @property
    def router(self) -> str:
        return f"127.0.0.1:{self.cluster.router.port}"

    def door(self, method: str) -> str:
        """Returns the name of the port that serves the method."""
        if method.startswith("KVTransfer"):
            return self.prefill.address
        return self.router if method.startswith("Inference") else self.cluster.router.control_address

    @property
    def prefill(self) -> WorkerHost:
        return self.cluster.workers[0]

    @property
    def decode(self) -> WorkerHost:
        return self.cluster.workers[1]

    def tame(self, data: bytes, kind: type[Message]) -> bytes:
        return harmless(data, kind, self.addresses, ["", "@none", "no/such.sock", "a\0b", "x" * 200])


class Complaints(logging.Handler):
    """Errors in the log: what no client saw."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


async def code_of_unary(address: str, method: str, data: bytes) -> grpc.StatusCode:
    async with dial(address) as channel:
        return await channel.unary_unary(method)(data, timeout=HUNG_S).code()


async def code_of_stream(channel: grpc.aio.Channel, method: str, data: bytes) -> grpc.StatusCode:
    call = channel.unary_stream(method)(data, timeout=HUNG_S)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()


def batches(cases: Sequence[Any]) -> list[Sequence[Any]]:
    return [cases[start : start + AT_ONCE] for start in range(0, len(cases), AT_ONCE)]


def staying(data: bytes, kind: type[Message]) -> bytes:
    """Returns the same bytes unless they tell the worker to leave, or of processes that computed wrong.

    It would leave, and with it the rest of the test. And a verdict is believed: whoever has the cluster's token is
    trusted for intent, and what may have come from that process is ended, everybody's.
    """
    message: Any = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    if message.WhichOneof("message") == "leave":
        message.ClearField("leave")
    elif message.WhichOneof("message") == "heartbeat" and message.heartbeat.verdicts:
        del message.heartbeat.verdicts[:]
    else:
        return data
    return bytes(message.SerializePartialToString())


def fields_of(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


def check_events(response: Any) -> None:
    """Asserts that what a worker reports of a leg that failed is typed too."""
    for event in response.events:
        match event.WhichOneof("event"):
            case "failed":
                assert event.failed.status.code in TYPED_NUMBERS, event
            case "import_failed":
                assert event.import_failed.status.code in TYPED_NUMBERS, event


def outcome(
    address: str, method: str, data: Sequence[bytes], check: Callable[[bytes], None], *, linger: int
) -> grpc.StatusCode:
    """Sends all, and after `linger` answers sends no more. (Not with grpc.aio: when a write meets the end of a call,
    its client reports an INTERNAL of its own instead of the server's status.)"""
    enough = threading.Event()

    def requests() -> Iterator[bytes]:
        yield from data
        enough.wait(HUNG_S)

    if not linger:
        enough.set()
    with grpc.insecure_channel(address, options=channel_options()) as channel:
        call = channel.stream_stream(method)(requests(), timeout=HUNG_S, metadata=credentials(CLUSTER_TOKEN))
        try:
            for count, answer in enumerate(call, 1):
                check(answer)
                if count >= linger:
                    enough.set()
        except grpc.RpcError:
            pass  # the status tells
        finally:
            enough.set()
    return call.code()


class leased:
    """Holds a sealed lease of three blocks for a block of code, by a session of its own, and gives its id."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._session = ScriptedRouter(incarnation=5).session(host, number=next(session_numbers))

    async def __aenter__(self) -> bytes:
        session: ScriptedSession = await self._session.__aenter__()
        command = worker_pb2.PrefillCommand(
            leg=1, token_ids=PROMPT + PROMPT[:10], sampling=types_pb2.SamplingParams(temperature=0.0)
        )
        await session.send(prefill=command)
        started = await session.next("started", 1)
        await session.tokens(1, count=1)
        return bytes(started.lease_id)

    async def __aexit__(self, *error: object) -> None:
        await self._session.__aexit__(None, None, None)
