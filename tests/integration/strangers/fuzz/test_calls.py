"""Tests every RPC of router and workers under random input: no crash, no hang, a typed status, and the server unharmed.

Inputs are drawn the same way in every run; more of them with
`BATON_EXAMPLES=2000 pytest tests/integration/strangers/fuzz`.
"""

from __future__ import annotations

import asyncio
from typing import Any

import hypothesis.strategies as st
import pytest
from google.protobuf.message import Message
from hypothesis import given

from baton.v1 import control_pb2, inference_pb2, kvtransfer_pb2, types_pb2
from tests.support.bad_peers import grpc_frames, grpc_request
from tests.support.cluster import greedy_request
from tests.support.fuzz import (
    HUNG_S,
    PLAUSIBLE,
    PROMPT,
    TYPED,
    Code,
    Target,
    batches,
    code_of_stream,
    code_of_unary,
    examples,
    fields_of,
)
from tests.support.protofuzz import Overrides, extremes, payloads
from tests.support.trusted import dial

pytestmark = pytest.mark.asyncio(loop_scope="module")


# -- one request, one answer or a stream of them


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
    assert await code_of_unary(target.door(method), f"/baton.v1.{method}", data) in TYPED - {Code.DEADLINE_EXCEEDED}


@given(draw=st.data())
@examples(200)
async def test_register(target: Target, draw: Any) -> None:
    """The router dials back whatever registers; nobody is there, or somebody else."""
    size = st.sampled_from([64, (1 << 31) - 1])
    facts = {
        "worker_id": st.sampled_from("abcdefgh"),
        "roles": st.lists(st.sampled_from([1, 2]), min_size=1, max_size=2, unique=True),
        "address": st.sampled_from(target.addresses),
        "incarnation": st.integers(1, 3),
        "layout": st.just(fields_of(target.prefill.describe().layout)),
        "num_blocks": size,
        "max_model_len": size,
        "max_num_seqs": size,
    }
    plausible: Overrides = {"baton.v1.WorkerDescription": st.fixed_dictionaries(facts)}
    data = target.tame(draw.draw(payloads(control_pb2.RegisterRequest, plausible)), control_pb2.RegisterRequest)
    code = await code_of_unary(target.door("RegistryService"), "/baton.v1.RegistryService/Register", data)
    assert code in TYPED - {Code.DEADLINE_EXCEEDED}


# -- every number at its extremes

EXTREME: list[tuple[str, Message]] = [
    ("InferenceService/Generate", greedy_request(PROMPT, 4)),
    ("ControlService/Drain", control_pb2.DrainRequest(worker_id="nobody")),
    ("RegistryService/Register", control_pb2.RegisterRequest()),
    ("KVTransferService/Release", kvtransfer_pb2.ReleaseRequest(lease_id=bytes(16), leg=1)),
]


@pytest.mark.parametrize(("method", "base"), EXTREME, ids=[method for method, _ in EXTREME])
async def test_extremes_of_every_number(target: Target, method: str, base: Message) -> None:
    """The answer is a typed refusal or a right one, and who asks for something sensible beside them gets all of it."""
    if isinstance(base, control_pb2.RegisterRequest):
        base.worker.CopyFrom(target.prefill.describe())
        base.worker.worker_id, base.worker.address = "extreme", "127.0.0.1:1"
        base.worker.roles[:] = [types_pb2.WORKER_ROLE_PREFILL]
    address = target.door(method)
    cases = list(extremes(base))
    assert len(cases) > 5

    async def try_one(case: tuple[str, Message]) -> None:
        what, message = case
        code = await code_of_unary(address, f"/baton.v1.{method}", message.SerializeToString())
        assert code in TYPED - {Code.DEADLINE_EXCEEDED}, what

    for batch in batches(cases):
        async with asyncio.TaskGroup() as group:
            for case in batch:
                group.create_task(try_one(case))
            innocent = group.create_task(target.cluster.greedy(PROMPT, 8))
        assert innocent.result().token_ids == target.known.token_ids


TIMEOUTS = {
    **dict.fromkeys([b"86401S", b"99999999S", b"99999999M", b"99999999H"], "answered"),
    **dict.fromkeys([b"1n", b"0S", b"99999999n"], "too short, or just enough"),
    **dict.fromkeys([b"", b"S", b"-1S", b"+1S", b"1", b"1 S", b" 1S", b"1e300S", b"nanS", b"infS", b"1x"], "no number"),
    **dict.fromkeys([b"9" * 20 + b"S", b"9" * 5000 + b"H", "１S".encode(), "²S".encode(), b"0x1S"], "no number"),
}


@pytest.mark.parametrize("given_timeout", TIMEOUTS, ids=lambda given: repr(given[:16]))
async def test_extremes_of_the_deadlines_header(target: Target, given_timeout: bytes) -> None:
    """The header is given as it goes over the wire, since libraries count in doubles and give up before."""
    request = grpc_request(
        "/baton.v1.InferenceService/Generate",
        greedy_request(PROMPT, 4).SerializeToString(),
        {"grpc-timeout": given_timeout, "traceparent": b"00-" + b"f" * 32 + b"-" + b"f" * 16 + b"-zz"},
    )
    reader, writer = await asyncio.open_connection("127.0.0.1", target.cluster.router.port)
    writer.write(request)
    async with asyncio.timeout(HUNG_S), asyncio.TaskGroup() as group:
        asked = group.create_task(grpc_frames(reader, writer))
        innocent = group.create_task(target.cluster.greedy(PROMPT, 8))
    writer.close()
    assert innocent.result().token_ids == target.known.token_ids
    if TIMEOUTS[given_timeout] == "answered":
        assert any(kind == 0 and payload for kind, _, payload in asked.result())


@given(data=payloads(kvtransfer_pb2.ReleaseRequest))
@examples(50)
async def test_release(target: Target, data: bytes) -> None:
    code = await code_of_unary(target.prefill.address, "/baton.v1.KVTransferService/Release", data)
    assert code in TYPED - {Code.DEADLINE_EXCEEDED}
