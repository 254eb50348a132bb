"""Tests workers that say what they should not: only their own requests are affected, and they go on elsewhere."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import hypothesis.strategies as st
import pytest
from google.protobuf import any_pb2
from google.rpc import status_pb2
from hypothesis import HealthCheck, given, settings
from prometheus_client import generate_latest

from baton.v1 import control_pb2, control_pb2_grpc, inference_pb2, types_pb2, worker_pb2
from services.core.ids import new_incarnation
from services.core.step_average import StepAverage
from tests.support.cluster import CONFIG, Cluster, begun, read, request
from tests.support.examples import num_examples
from tests.support.patience import HANG_S
from tests.support.protofuzz import Overrides, extremes, messages
from tests.support.scripted_worker import OUTPUT, TEXT, TOKENIZER, ScriptedWorker

VOCAB_SIZE = TOKENIZER.get_vocab_size()
GARBAGE_ANY = any_pb2.Any(type_url="type.googleapis.com/google.rpc.RetryInfo", value=b"\xff\xff")
REST = TEXT.removeprefix(TOKENIZER.decode(OUTPUT[:1]))
LONG = "the runner that decodes " * 8
"""More tokens than a block holds."""


@pytest.fixture
async def cluster(model: str, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Cluster]:
    caplog.set_level(logging.ERROR)
    cluster = Cluster(replace(CONFIG, model=model))
    await cluster.start()
    try:
        yield cluster
        await cluster.idle()
    finally:
        await cluster.stop()
    complaints = [record.getMessage() for record in caplog.get_records("call") if record.levelno >= logging.ERROR]
    assert not complaints, "nothing went wrong unseen"


def tokens(leg: int, position: int, *token_ids: int, **fields: Any) -> worker_pb2.LegEvent:
    said = types_pb2.SequenceTokens(leg=leg, position=position, token_ids=token_ids, **fields)
    return worker_pb2.LegEvent(tokens=said)


def failed(leg: int, **status: Any) -> worker_pb2.LegEvent:
    return worker_pb2.LegEvent(failed=worker_pb2.LegFailed(leg=leg, status=status_pb2.Status(**status)))


# What a decode worker says after its first token, which was right. `leg` is live.
NONSENSE = {
    "a gap": lambda leg: tokens(leg, 5, OUTPUT[5]),
    "out of order": lambda leg: tokens(leg, 2, OUTPUT[2]),
    "another first token": lambda leg: tokens(leg, 0, OUTPUT[0] + 1),
    "a negative position": lambda leg: tokens(leg, -1, OUTPUT[0]),
    "a negative token": lambda leg: tokens(leg, 1, -5),
    "a token beyond the vocabulary": lambda leg: tokens(leg, 1, VOCAB_SIZE),
    "more than was asked for": lambda leg: tokens(leg, 1, *[OUTPUT[1]] * 1000),
    "a finish before what was sent": lambda leg: tokens(leg, 0, finish=types_pb2.SequenceFinish(reason=1)),
    "log-probabilities of other tokens": lambda leg: tokens(
        leg, 1, OUTPUT[1], logprobs=[types_pb2.TokenLogprobs()] * 3
    ),
    "a failure without a code": lambda leg: failed(leg),
    "a failure of an unknown kind": lambda leg: failed(leg, code=99, details=[GARBAGE_ANY]),
    "a failure with broken details": lambda leg: failed(leg, code=14, details=[GARBAGE_ANY]),
    "a refusal after it began": lambda leg: worker_pb2.LegEvent(refused=worker_pb2.DecodeRefused(leg=leg)),
}
# What changes nothing.
NOISE = {
    "an empty event": lambda leg: worker_pb2.LegEvent(),
    "tokens of nobody": lambda leg: tokens(1 << 63, 0, 1, 2, 3),
    "no tokens": lambda leg: tokens(leg, 1),
    "a second admission": lambda leg: worker_pb2.LegEvent(admitted=worker_pb2.DecodeAdmitted(leg=leg)),
    "a second import": lambda leg: worker_pb2.LegEvent(ready=worker_pb2.ImportReady(leg=leg)),
}


@pytest.mark.parametrize("what", NONSENSE)
async def test_a_worker_that_talks_nonsense_loses_the_request(cluster: Cluster, what: str) -> None:
    rogue, stream = await talking(cluster)
    other = await cluster.add("decode", worker_id="other")
    leg = rogue.commands[-1].leg
    rogue.say(NONSENSE[what](leg))
    events, text = await read(stream)
    assert text == REST
    assert events[-1].completion.workers.decode == other.worker_id
    assert rogue.commands[-1].leg == leg, "it is not asked again"
    rogue.decode_gate.set()  # what it still says of that leg is nobody's


@pytest.mark.parametrize("what", NOISE)
async def test_noise_changes_nothing(cluster: Cluster, what: str) -> None:
    rogue, stream = await talking(cluster)
    rogue.say(NOISE[what](rogue.commands[-1].leg))
    rogue.decode_gate.set()
    events, text = await read(stream)
    assert text == REST
    assert events[-1].completion.workers.retries == 0


async def test_a_prefill_worker_that_talks_nonsense(cluster: Cluster) -> None:
    """The worker sends a second lease, or a token before any lease, and that leg is cancelled."""
    rogue = await cluster.add("prefill")
    await cluster.add("decode")
    rogue.prefill_gate.clear()
    for nonsense in ("started", "tokens"):
        call = cluster.inference.GenerateStream(request())
        before = len(rogue.commands)
        await rogue.until(lambda before=before: len(rogue.commands) > before)
        leg = rogue.commands[-1].leg
        if nonsense == "started":
            cluster.leases[b"?"] = asyncio.Event()
            for _ in range(2):
                rogue.say(worker_pb2.LegEvent(started=worker_pb2.PrefillStarted(leg=leg, lease_id=b"?")))
        else:
            rogue.say(worker_pb2.LegEvent(tokens=types_pb2.SequenceTokens(leg=leg, token_ids=[1])))
        await rogue.until(lambda leg=leg: leg in rogue.cancelled)
        call.cancel()


async def talking(cluster: Cluster) -> tuple[ScriptedWorker, Any]:
    """Returns a decode worker that has sent a request's first token and holds the rest back, and
    the client's stream."""
    await cluster.add("prefill")
    rogue = await cluster.add("decode", worker_id="rogue")
    rogue.decode_gate.clear()
    call = cluster.inference.GenerateStream(request())
    await rogue.until(lambda: rogue.commands)
    return rogue, await begun(call)


async def test_a_worker_that_speaks_of_another_ones_leg(cluster: Cluster) -> None:
    rogue = await cluster.add("decode", worker_id="rogue", num_blocks=1)
    prefill, decode = await cluster.add("prefill"), await cluster.add("decode")
    decode.decode_gate.clear()
    call = cluster.inference.GenerateStream(request(LONG))
    await decode.until(lambda: decode.commands)
    leg = decode.commands[-1].leg
    rogue.say(tokens(leg, 1, OUTPUT[1] + 1))
    await rogue.until(lambda: leg in rogue.cancelled)
    rogue.say(failed(leg, code=14))
    rogue.say(failed(prefill.commands[-1].leg, code=14))
    decode.decode_gate.set()
    events, text = await read(call)
    assert text == TEXT
    assert events[-1].completion.workers.retries == 0


async def test_a_worker_that_was_only_announced_counts_for_nothing(cluster: Cluster) -> None:
    """Whoever registers claims what he likes; limits follow workers that have had a session."""
    await cluster.add("prefill")
    decode = await cluster.add("decode")
    (before,) = (await cluster.inference.ListModels(inference_pb2.ListModelsRequest())).models
    claim = decode.description()
    claim.worker_id, claim.address = "claim", "127.0.0.1:1"
    claim.num_blocks = claim.max_model_len = 1 << 30
    registry = control_pb2_grpc.RegistryServiceStub(cluster.control_channel)
    await registry.Register(control_pb2.RegisterRequest(worker=claim))
    (after,) = (await cluster.inference.ListModels(inference_pb2.ListModelsRequest())).models
    assert after.max_model_len == before.max_model_len
    assert (await cluster.inference.Generate(request())).output.text == TEXT
    claim.num_blocks = -1
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await registry.Register(control_pb2.RegisterRequest(worker=claim))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def cases() -> list[tuple[str, Any]]:
    """Returns loads, events and timings of a worker's, each with one number at an extreme of its type."""
    response = worker_pb2.SessionResponse()
    found = [(what, message) for what, message in extremes(response) if not what.endswith("leg=1")]
    ending = ("worker", "cache")  # what they tell must be whole and in order, or the session ends
    # A verdict ends what may be wrong by it, whoever says so.
    return [
        (what, message) for what, message in found if "verdicts" not in what and not any(map(message.HasField, ending))
    ]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_extremes_of_what_a_worker_says(cluster: Cluster, role: str) -> None:
    """What the worker that serves says of its load is taken or left, and its requests go on."""
    workers = {each: await cluster.add(each) for each in ("prefill", "decode")}
    worker = workers[role]
    all_cases = cases()
    assert len(all_cases) > 200
    for start in range(0, len(all_cases), 40):
        call = cluster.inference.GenerateStream(request(LONG), timeout=HANG_S)
        for what, message in all_cases[start : start + 40]:
            if message.HasField("load"):
                message.load.sequence_number = 0 if "sequence_number" in what else worker.next_snapshot()
            worker.say(message)
        assert (await read(call))[1] == TEXT, [what for what, _ in all_cases[start : start + 40]]
        deadlined = await cluster.inference.Generate(request(LONG), timeout=HANG_S)
        assert deadlined.output.text == TEXT
        assert 0 <= deadlined.completion.usage.cached_tokens <= deadlined.completion.usage.prompt_tokens


BAD_TIMINGS = [float("nan"), float("inf"), -float("inf"), -1.0, 1e300, 9.3e15]


@pytest.mark.parametrize("value", BAD_TIMINGS)
async def test_timings_that_cannot_be_are_as_if_not_measured(cluster: Cluster, value: float) -> None:
    """The timings neither reach the client nor spoil the sums of the histograms, and are dropped."""
    await cluster.add("prefill")
    decode = await cluster.add("decode")
    timings = types_pb2.PhaseTimings(transfer_bytes=-1, transfer_blocks=-1)
    for field in timings.DESCRIPTOR.fields:
        if field.name.endswith("_ms"):
            setattr(timings, field.name, value)
    decode.finish_timings = timings
    said = (await cluster.inference.Generate(request())).completion.timings
    assert all(0 <= getattr(said, field.name) < 1e6 for field, _ in said.ListFields())
    metrics = generate_latest(cluster.metrics()).decode()
    sums = [float(line.rpartition(" ")[2]) for line in metrics.splitlines() if "_sum" in line and line[0] != "#"]
    assert all(0 <= total < 1e6 for total in sums)


async def test_a_load_of_nonsense_shuts_nobody_out(cluster: Cluster) -> None:
    """NaN among the costs and negative blocks: requests with a deadline are still served, by this worker too."""
    await cluster.add("prefill")
    decode = await cluster.add("decode")
    worker = cluster.scripted[0]
    nonsense = types_pb2.LoadSnapshot(
        sequence_number=1 << 62,
        blocks_free=32,
        blocks_active=-5,
        num_running=-3,
        queued_prefill_tokens=-(1 << 31),
        ms_per_prefill_token=float("nan"),
        ms_per_decode_step=float("inf"),
        current_step_ms=-1.0,
        prefix_tokens_queried=1,
        prefix_tokens_hit=(1 << 64) - 1,
        prefill_step=types_pb2.StepAverage(ms=float("nan"), tokens=1, attended_tokens=1),
        decode_step=types_pb2.StepAverage(ms=1, tokens=1, attended_tokens=-1e300),
    )
    worker.say(worker_pb2.SessionResponse(load=nonsense))
    nonsense.prefill_step.CopyFrom(types_pb2.StepAverage(ms=5, tokens=0, attended_tokens=100))
    decode.say(worker_pb2.SessionResponse(load=nonsense))
    for _ in range(3):
        assert (await cluster.inference.Generate(request(), timeout=HANG_S)).output.text == TEXT
    for each in cluster.router.coordinator.workers.all():
        assert each.load is not None
        assert each.load.prefill_step == each.load.decode_step == StepAverage()
        figures = [getattr(each.load, name) for name in each.load.__dataclass_fields__]
        numbers = [figure for figure in figures if not isinstance(figure, StepAverage)]
        assert all(0 <= number < float("inf") for number in numbers), each.load


_QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large]
_LEG = st.integers(1, 200)
_LEGS: Overrides = {f"baton.v1.{kind}.leg": _LEG for kind in ("SequenceTokens", "LegFailed", "ImportFailed")}


@given(draw=st.data())
@settings(max_examples=num_examples(100), derandomize=True, database=None, suppress_health_check=_QUIET)
async def test_workers_that_rave(cluster: Cluster, draw: Any) -> None:
    """Random events and loads from two that are too small to be used; the others answer as ever."""
    if not cluster.scripted:
        for role in ("prefill", "decode"):
            await cluster.add(role)
            await cluster.add(role, worker_id=f"raving-{role}", num_blocks=1)
    for worker in cluster.scripted[1::2]:
        if not worker.num_sessions:  # it was thrown out, and if it had said that it drains, its process is to end
            worker.incarnation = new_incarnation()
        async with asyncio.timeout(HANG_S):
            while not worker.num_sessions:  # it may be known still: as workers do, it registers again and again
                await worker.register(cluster.control_channel)
                await asyncio.sleep(0.01)
        responses = st.lists(messages(worker_pb2.SessionResponse, _LEGS), min_size=1, max_size=3)
        for response in draw.draw(responses):
            worker.say(response)
    assert (await cluster.inference.Generate(request(LONG), timeout=HANG_S)).output.text == TEXT
