"""Bad input gets a typed status that names the field, and the server is unharmed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.v1 import inference_pb2, types_pb2
from services.core.errors import ContextLengthExceeded
from services.rpc.status import from_call
from tests.support.cluster import Cluster, greedy_request, running_cluster
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.trusted import dial
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(range(10, 40))
Code = grpc.StatusCode


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model: Path = tiny_model("llama", tmp_path_factory.mktemp("bad"))
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(cluster: Cluster) -> Any:
    yield
    assert len((await cluster.greedy(PROMPT, 4)).token_ids) == 4
    await cluster.idle()


def changed(change: Callable[[Any], Any]) -> Any:
    request = greedy_request(PROMPT, 4)
    change(request)
    return request


def field_of(error: grpc.aio.AioRpcError) -> str | None:
    status = rpc_status.from_call(error)
    for detail in status.details if status else ():
        if detail.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            detail.Unpack(bad)
            return str(bad.field_violations[0].field)
    return None


def number(path: str, value: float) -> Callable[[Any], None]:
    group, name = path.split(".")
    return lambda request: setattr(getattr(request, group), name, value)


NAN, INF = float("nan"), float("inf")
CASES: list[tuple[str, Callable[[Any], Any], str | None, grpc.StatusCode]] = [
    ("no prompt", lambda r: r.ClearField("token_ids"), "prompt", Code.INVALID_ARGUMENT),
    ("no tokens", lambda r: r.token_ids.ClearField("ids"), "token_ids", Code.INVALID_ARGUMENT),
    ("empty text", lambda r: setattr(r, "text", ""), "text", Code.INVALID_ARGUMENT),
    ("no messages", lambda r: r.messages.SetInParent(), "messages", Code.INVALID_ARGUMENT),
    ("too long", lambda r: r.token_ids.ids.extend([9] * 2000), "prompt", Code.INVALID_ARGUMENT),
    ("id out of range", lambda r: r.token_ids.ids.append(VOCAB_SIZE), "token_ids", Code.INVALID_ARGUMENT),
    ("negative id", lambda r: r.token_ids.ids.append(-1), "token_ids", Code.INVALID_ARGUMENT),
    ("unknown model", lambda r: setattr(r, "model", "gpt-9"), None, Code.NOT_FOUND),
    ("long id", lambda r: setattr(r, "request_id", "x" * 129), "request_id", Code.INVALID_ARGUMENT),
    ("priority", lambda r: setattr(r, "priority", 101), "priority", Code.INVALID_ARGUMENT),
    ("many stops", lambda r: r.stopping.stop.extend("abcdefghijklmnopq"), "stopping.stop", Code.INVALID_ARGUMENT),
    ("empty stop", lambda r: r.stopping.stop.append(""), "stopping.stop", Code.INVALID_ARGUMENT),
    ("long stop", lambda r: r.stopping.stop.append("x" * 257), "stopping.stop", Code.INVALID_ARGUMENT),
    (
        "many stop ids",
        lambda r: r.stopping.stop_token_ids.extend(range(65)),
        "stopping.stop_token_ids",
        Code.INVALID_ARGUMENT,
    ),
    (
        "unknown role",
        lambda r: r.messages.messages.add(role="wizard", content="hi"),
        "messages",
        Code.INVALID_ARGUMENT,
    ),
    (
        "bias id",
        lambda r: r.sampling.logit_bias.add(token_id=VOCAB_SIZE, bias=1.0),
        "sampling.logit_bias",
        Code.INVALID_ARGUMENT,
    ),
    *(
        (f"{path}={value}", number(path, value), path, Code.INVALID_ARGUMENT)
        for path, value in [
            ("sampling.temperature", -0.1),
            ("sampling.temperature", NAN),
            ("sampling.temperature", INF),
            ("sampling.top_p", 1.5),
            ("sampling.top_p", NAN),
            ("sampling.top_k", -1),
            ("sampling.min_p", -0.5),
            ("sampling.repetition_penalty", 0.0),
            ("sampling.repetition_penalty", NAN),
            ("sampling.presence_penalty", 3.0),
            ("sampling.frequency_penalty", -INF),
            ("stopping.max_tokens", 0),
            ("stopping.max_tokens", -5),
            ("stopping.max_tokens", 100_000),
            ("stopping.min_tokens", -1),
            ("stopping.min_tokens", 5),
            ("response.logprobs", 21),
            ("response.logprobs", -1),
        ]
    ),
]


@pytest.mark.parametrize(("change", "field", "code"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
async def test_bad_fields(cluster: Cluster, change: Any, field: str | None, code: grpc.StatusCode) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stream(changed(change))
    assert caught.value.code() is code, caught.value.details()
    found = field_of(caught.value)
    assert found == field or (found is not None and field is not None and found.startswith(field)), found


@pytest.mark.parametrize(
    ("change", "field", "asked"),
    [
        (lambda r: r.token_ids.ids.extend([9] * 1000), "prompt", "the prompt has 1030, and at most 1023 leave room"),
        (number("stopping.max_tokens", 995), "stopping.max_tokens", "1025 were asked for: 30 in the prompt, 995 after"),
        (lambda r: setattr(r, "text", "x" * 100_000), "text", "the prompt's 100000 characters are at least "),
    ],
    ids=["prompt", "output", "characters"],
)
async def test_what_no_context_holds_has_a_reason_of_its_own(
    cluster: Cluster, change: Any, field: str, asked: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await cluster.stream(changed(change))
    assert caught.value.code() is Code.INVALID_ARGUMENT
    error = from_call(caught.value)
    assert isinstance(error, ContextLengthExceeded)
    assert error.field == field
    assert error.description.startswith(f"This model's maximum context length is 1024 tokens; {asked}")


async def test_a_prompt_of_100_mb_is_refused_by_the_runtime(cluster: Cluster) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.router.port}", options=options) as channel:
        call = channel.unary_unary(
            "/baton.v1.InferenceService/Generate",
            request_serializer=inference_pb2.GenerateRequest.SerializeToString,
            response_deserializer=inference_pb2.GenerateResponse.FromString,
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(inference_pb2.GenerateRequest(text="x" * 100_000_000))
    assert caught.value.code() is Code.RESOURCE_EXHAUSTED


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_malformed_bytes(cluster: Cluster, method: str) -> None:
    async with dial(f"127.0.0.1:{cluster.router.port}") as channel:
        make = channel.unary_stream if method == "GenerateStream" else channel.unary_unary
        call = make(f"/baton.v1.InferenceService/{method}")(b"\xff\xff\xff\xff")
        assert await call.code() is Code.INVALID_ARGUMENT


async def test_malformed_bytes_in_a_worker_session(cluster: Cluster) -> None:
    async with dial(cluster.workers[0].address) as channel:
        call = channel.stream_stream("/baton.v1.WorkerService/Session")()
        await call.write(b"\xff\xff\xff")
        assert await call.code() is Code.INVALID_ARGUMENT


async def test_unknown_enum_and_fields_do_no_harm(cluster: Cluster) -> None:
    request = types_pb2.StoppingParams()
    request.MergeFromString(b"\xa2\x06\x03abc")  # field 100, which this version does not know
    answer = await cluster.stream(changed(lambda r: r.stopping.MergeFrom(request)))
    assert len(answer.token_ids) == 4
