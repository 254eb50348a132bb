"""Every RPC of router and workers under random input: no crash, no hang, a typed status, and the server unharmed.

Inputs are drawn the same way in every run; `BATON_FUZZ_EXAMPLES=2000 pytest tests/integration/test_fuzz.py` draws more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
import pytest_asyncio
from google.protobuf.message import DecodeError, Message
from hypothesis import HealthCheck, given, settings

from baton.v1 import control_pb2, decode_pb2, inference_pb2, kvtransfer_pb2, prefill_pb2, types_pb2
from services.kvtransfer.wire import layout_to_proto
from services.rpc.channels import dial
from services.rpc.options import channel_options
from services.worker.host import WorkerHost
from tests.cluster import Answer, Cluster, greedy_request, running_cluster
from tests.models import VOCAB_SIZE, tiny_model
from tests.protofuzz import Overrides, harmless, messages, payloads
from tests.workers import DECODE, PREFILL, ScriptedRouter, ScriptedSession

pytestmark = pytest.mark.asyncio(loop_scope="module")

EXAMPLES = int(os.environ.get("BATON_FUZZ_EXAMPLES", "0"))
HUNG_S = 20.0
PROMPT = list(range(10, 40))
CONTEXT_TOKENS = 80
Code = grpc.StatusCode
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
    return settings(
        max_examples=EXAMPLES or count, deadline=None, derandomize=True, database=None, suppress_health_check=quiet
    )


@dataclass
class Target:
    """What is fuzzed, and what it answers to a good request."""

    cluster: Cluster
    known: Answer
    addresses: list[str]
    """All that a message may hold: nobody there, this router, the workers, and one that accepts and says nothing."""

    @property
    def router(self) -> str:
        return f"127.0.0.1:{self.cluster.router.port}"

    @property
    def prefill(self) -> WorkerHost:
        return self.cluster.workers[0]

    @property
    def decode(self) -> WorkerHost:
        return self.cluster.workers[1]

    def tame(self, data: bytes, kind: type[Message]) -> bytes:
        return harmless(data, kind, self.addresses, ["", "@none", "no/such.sock", "a\0b", "x" * 200])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Target]:
    model = tiny_model("llama", tmp_path_factory.mktemp("fuzz"))
    with socket.create_server(("127.0.0.1", 0)) as mute:
        config = {"kv_blocks": 40, "max_model_len": CONTEXT_TOKENS, "heartbeat_s": 0.02, "stall_s": 0.1}
        async with running_cluster(model, [PREFILL, DECODE], router={"silence_s": 1.0}, **config) as cluster:
            known = await cluster.greedy(PROMPT, 8)
            addresses = [
                "",
                "127.0.0.1:1",
                f"127.0.0.1:{mute.getsockname()[1]}",
                f"127.0.0.1:{cluster.router.port}",
                *(worker.address for worker in cluster.workers),
            ]
            yield Target(cluster, known, addresses)


class _Complaints(logging.Handler):
    """Errors in the log: what no client saw."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))


@pytest.fixture(autouse=True)
def complaints() -> Iterator[list[str]]:
    handler = _Complaints()
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


# -- one request, one answer or a stream of them


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


@given(data=payloads(inference_pb2.GenerateRequest, PLAUSIBLE))
@examples(300)
async def test_generate(target: Target, data: bytes) -> None:
    code = await code_of_unary(target.router, "/baton.v1.InferenceService/Generate", data)
    assert code in TYPED - {Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE}


@given(data=payloads(inference_pb2.GenerateRequest, PLAUSIBLE))
@examples(300)
async def test_generate_stream(target: Target, data: bytes) -> None:
    async with dial(target.router) as channel:
        code = await code_of_stream(channel, "/baton.v1.InferenceService/GenerateStream", data)
    assert code in TYPED - {Code.DEADLINE_EXCEEDED, Code.UNAVAILABLE}


OTHERS: list[tuple[str, type[Message]]] = [
    ("InferenceService/ListModels", inference_pb2.ListModelsRequest),
    ("ControlService/GetStatus", control_pb2.GetStatusRequest),
    ("ControlService/Drain", control_pb2.DrainRequest),
]


@pytest.mark.parametrize(("method", "kind"), OTHERS, ids=[method for method, _ in OTHERS])
@given(draw=st.data())
@examples(30)
async def test_what_operators_ask(target: Target, method: str, kind: type[Message], draw: Any) -> None:
    data = draw.draw(payloads(kind))
    assert await code_of_unary(target.router, f"/baton.v1.{method}", data) in TYPED - {Code.DEADLINE_EXCEEDED}


@given(draw=st.data())
@examples(200)
async def test_register(target: Target, draw: Any) -> None:
    """The router dials back whatever registers; nobody is there, or somebody else."""
    size = st.sampled_from([64, (1 << 31) - 1])
    facts = {
        "worker_id": st.sampled_from("abcdefgh"),
        "role": st.sampled_from([1, 2, 3]),
        "address": st.sampled_from(target.addresses),
        "incarnation": st.integers(1, 3),
        "layout": st.just(fields_of(target.prefill.describe().layout)),
        "num_blocks": size,
        "max_model_len": size,
        "max_num_seqs": size,
    }
    plausible: Overrides = {"baton.v1.WorkerDescription": st.fixed_dictionaries(facts)}
    data = target.tame(draw.draw(payloads(control_pb2.RegisterRequest, plausible)), control_pb2.RegisterRequest)
    code = await code_of_unary(target.router, "/baton.v1.RegistryService/Register", data)
    assert code in TYPED - {Code.DEADLINE_EXCEEDED}


@given(data=payloads(kvtransfer_pb2.ReleaseRequest))
@examples(50)
async def test_release(target: Target, data: bytes) -> None:
    code = await code_of_unary(target.prefill.address, "/baton.v1.KVTransferService/Release", data)
    assert code in TYPED - {Code.DEADLINE_EXCEEDED}


# -- streams of requests


@given(draw=st.data())
@examples(120)
async def test_fetch(target: Target, draw: Any) -> None:
    """Some of the fetches are of a lease that exists."""
    kind, host = kvtransfer_pb2.FetchRequest, target.prefill
    async with leased(host) as lease_id:
        opened = {
            "lease_id": st.just(lease_id),
            "leg": st.integers(0, 3),
            "first_block": st.integers(0, 4),
            "transport": st.sampled_from([1, 2]),
            "layout": st.just(fields_of(layout_to_proto(host.layout))),
            "source_incarnation": st.just(host.incarnation),
        }
        plausible: Overrides = {
            "baton.v1.FetchOpen": st.fixed_dictionaries(opened, optional={"checksums": st.booleans()}),
            "baton.v1.FetchAck": st.fixed_dictionaries({"copied_blocks": st.integers(0, 4)}),
        }
        opening = messages(kvtransfer_pb2.FetchOpen, plausible).map(lambda message: kind(open=message))
        first = st.one_of(opening.map(lambda message: message.SerializePartialToString()), payloads(kind, plausible))
        data = [draw.draw(first), *draw.draw(st.lists(payloads(kind, plausible), max_size=3))]
        method = "/baton.v1.KVTransferService/Fetch"
        code = await asyncio.to_thread(outcome, host.address, method, data, lambda answer: None, linger=0)
        assert code in TYPED - {Code.DEADLINE_EXCEEDED}


SESSIONS: list[tuple[str, type[Message], type[Message], Callable[[Target], WorkerHost]]] = [
    (
        "PrefillService",
        prefill_pb2.PrefillServiceSessionRequest,
        prefill_pb2.PrefillServiceSessionResponse,
        lambda target: target.prefill,
    ),
    (
        "DecodeService",
        decode_pb2.DecodeServiceSessionRequest,
        decode_pb2.DecodeServiceSessionResponse,
        lambda target: target.decode,
    ),
]
_session_numbers = itertools.count(1)


@pytest.mark.parametrize(("service", "kind", "answers", "host_of"), SESSIONS, ids=[each[0] for each in SESSIONS])
@given(draw=st.data())
@examples(250)
async def test_sessions(
    target: Target, service: str, kind: Any, answers: Any, host_of: Callable[[Target], WorkerHost], draw: Any
) -> None:
    """Most begin in order, so that the commands are looked at; the legs that are accepted come to an end."""
    host = host_of(target)
    source = target.prefill.source()
    handoff = {
        "address": st.sampled_from(target.addresses),
        "incarnation": st.sampled_from([source.incarnation, host.incarnation]),
        "layout": st.just(fields_of(source.layout)),
    }
    optional = {
        "handoff": st.fixed_dictionaries(
            {"lease_id": st.just(bytes(16)), "source": st.fixed_dictionaries(handoff)},
        ),
        "age_ms": st.sampled_from([-(1 << 63), 0, 5_000, (1 << 63) - 1]),
    }
    plausible: Overrides = {
        **PLAUSIBLE,
        "baton.v1.DecodeCommand": st.fixed_dictionaries(COMMAND, optional={**EXTRAS, **optional}),
    }
    hello = types_pb2.SessionHello(
        router_incarnation=77, session_number=next(_session_numbers), worker_incarnation=host.incarnation
    )
    requests = st.lists(payloads(kind, plausible), max_size=4)
    data = [staying(target.tame(each, kind), kind) for each in draw.draw(requests)]
    if draw.draw(st.integers(0, 5)):
        data.insert(0, kind(hello=hello).SerializeToString())
    code = await asyncio.to_thread(
        outcome,
        host.address,
        f"/baton.v1.{service}/Session",
        data,
        lambda answer: check_events(answers.FromString(answer)),
        linger=3 if data else 0,
    )
    assert code in TYPED - {Code.DEADLINE_EXCEEDED}


def staying(data: bytes, kind: type[Message]) -> bytes:
    """The same bytes unless they say that the worker is to leave: it would, and with it the rest of the test."""
    message = kind()
    try:
        message.ParseFromString(data)
    except DecodeError:
        return data
    if message.WhichOneof("message") != "leave":
        return data
    message.ClearField("leave")
    return message.SerializePartialToString()


def fields_of(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


def check_events(response: Any) -> None:
    """What a worker says of a leg that failed is typed too."""
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
        call = channel.stream_stream(method)(requests(), timeout=HUNG_S)
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
    """A context with a sealed lease of three blocks, held by a session of its own. Gives the lease's id."""

    def __init__(self, host: WorkerHost) -> None:
        self._host = host
        self._session = ScriptedRouter(incarnation=5).prefill(host, number=next(_session_numbers))

    async def __aenter__(self) -> bytes:
        session: ScriptedSession = await self._session.__aenter__()
        command = prefill_pb2.PrefillCommand(
            leg=1, token_ids=PROMPT + PROMPT[:10], sampling=types_pb2.SamplingParams(temperature=0.0)
        )
        await session.send(prefill=command)
        started = await session.next("started", 1)
        await session.tokens(1, count=1)
        return bytes(started.lease_id)

    async def __aexit__(self, *error: object) -> None:
        await self._session.__aexit__(None, None, None)
