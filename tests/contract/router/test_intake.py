"""Tests prompts on their way through the tokenizer: what waits there is bounded, and frees its place when nobody wants
it."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import grpc
import httpx2
import pytest
from google.rpc import error_details_pb2

from baton.v1 import inference_pb2, types_pb2
from services.core.hashing import block_hashes, short_hashes
from services.router.policy import PRESETS, Job, PolicyConfig, WorkerView
from services.router.policy.terms import Question, prefix_cached
from services.router.text.tokenisation import ModelText
from services.rpc.status import status_of_call
from tests.support.cluster import CONFIG, Cluster, code_of, request
from tests.support.patience import HANG_S
from tests.support.scripted_worker import TEXT
from tests.support.text_model import CONTEXT_TOKENS, byte_tokenizer

LONG = "the baton " * 100
"""Too long to be tokenised on the event loop."""


class Gate:
    """Keeps long texts from being tokenised while it is shut; `passing` of them are on their threads."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.passing = threading.Semaphore(0)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self.passing.acquire, timeout=HANG_S)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate, encode = Gate(), ModelText.encode_text

    def gated(self: ModelText, text: str, most_tokens: int | None = None, **options: bool) -> list[int]:
        if len(text) >= len(LONG):
            assert threading.current_thread() is not threading.main_thread(), "the event loop goes on"
            gate.passing.release()
            assert gate.open.wait(20)
        return encode(self, text, most_tokens, **options)

    monkeypatch.setattr(ModelText, "encode_text", gated)
    yield gate
    gate.open.set()


@pytest.fixture
async def small(model: str) -> AsyncIterator[Cluster]:
    """Sets up a router in which at most two requests may wait."""
    cluster = Cluster(replace(CONFIG, model=model, max_queue=2, tokenizer_threads=1))
    await cluster.start()
    await cluster.add("prefill")
    await cluster.add("decode")
    yield cluster
    await cluster.idle()
    await cluster.stop()


async def refused(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


async def waiting(cluster: Cluster, num: int) -> None:
    """That many prompts are with the tokenizer."""
    async with asyncio.timeout(HANG_S):
        while cluster.router.coordinator.num_expected != num:  # noqa: ASYNC110  # no event tells of it
            await asyncio.sleep(0.002)


async def test_what_waits_for_the_tokenizer_counts_as_queued(small: Cluster, gate: Gate) -> None:
    generate = small.inference.Generate
    calls = [asyncio.ensure_future(generate(request(LONG))) for _ in range(2)]
    await waiting(small, 2)
    error = await refused(generate(request(LONG)))
    assert code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "the queue is full"
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_of_call(error).details)
    assert code_of(await refused(generate(request()))) is grpc.StatusCode.RESOURCE_EXHAUSTED, "short ones count too"
    gate.open.set()
    for call in calls:
        assert (await call).output.text == TEXT
    assert (await generate(request(LONG))).output.text == TEXT


async def test_a_client_that_leaves_frees_its_place_at_once(small: Cluster, gate: Gate) -> None:
    generate = small.inference.Generate
    first = asyncio.ensure_future(generate(request(LONG)))
    await gate.reached()
    second = generate(request(LONG))
    await waiting(small, 2)
    second.cancel()
    await waiting(small, 1)
    assert (await generate(request())).output.text == TEXT
    gate.open.set()
    assert (await first).output.text == TEXT


async def test_a_deadline_that_passes_in_the_line_frees_its_place(small: Cluster, gate: Gate) -> None:
    generate = small.inference.Generate
    first = asyncio.ensure_future(generate(request(LONG)))
    await gate.reached()
    assert code_of(await refused(generate(request(LONG), timeout=0.3))) is grpc.StatusCode.DEADLINE_EXCEEDED
    await waiting(small, 1)
    gate.open.set()
    assert (await first).output.text == TEXT


async def test_the_tokenizer_is_waited_for_as_long_as_a_queue(model: str, gate: Gate) -> None:
    """The bound holds without a deadline too, for a text that never ends and for the one behind it."""
    cluster = Cluster(replace(CONFIG, model=model, queue_timeout_s=0.5, tokenizer_threads=1))
    await cluster.start()
    calls = [asyncio.ensure_future(refused(cluster.inference.Generate(request(LONG)))) for _ in range(2)]
    for error in await asyncio.gather(*calls):
        assert code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert error.details() == "the prompt was not tokenised in time"
    gate.open.set()
    await cluster.idle()
    await cluster.stop()


async def test_a_short_text_does_not_wait_behind_a_long_one(small: Cluster, gate: Gate) -> None:
    asked = request(LONG * 20, truncate_prompt=True, stopping=types_pb2.StoppingParams(max_tokens=12))
    long = asyncio.ensure_future(small.inference.Generate(asked))
    await gate.reached()
    assert (await small.inference.Generate(request("the baton is passed " * 30))).output.text == TEXT
    gate.open.set()
    assert (await long).prompt_info.prompt_tokens == CONTEXT_TOKENS - 12


async def test_no_thread_sees_a_text_that_no_context_could_hold(small: Cluster, gate: Gate) -> None:
    for text in (LONG * 100, "x" * (CONFIG.max_text_bytes + 1)):
        error = await refused(small.inference.Generate(request(text)))
        assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT
    assert not gate.passing.acquire(blocking=False)


async def test_an_overlong_text_is_truncated_if_asked_for(small: Cluster) -> None:
    stopping = types_pb2.StoppingParams(max_tokens=12)
    answer = await small.inference.Generate(request(LONG * 100, truncate_prompt=True, stopping=stopping))
    assert answer.prompt_info.prompt_tokens == CONTEXT_TOKENS - 12
    error = await refused(small.inference.Generate(request("x" * (CONFIG.max_text_bytes + 1), truncate_prompt=True)))
    assert "at most 2097152 are allowed" in str(error.details())


async def test_token_ids_are_checked_where_they_are_used(small: Cluster) -> None:
    def asked(*ids: int, **fields: Any) -> Any:
        token_ids = inference_pb2.TokenIds(ids=ids)
        return small.inference.Generate(inference_pb2.GenerateRequest(token_ids=token_ids, **fields))

    assert "has ids outside" in str((await refused(asked(5, -1))).details())
    assert "has 1000" in str((await refused(asked(*[-1] * 1000))).details()), "too many to look at each"
    stopping = types_pb2.StoppingParams(max_tokens=12)
    assert "has ids outside" in str((await refused(asked(*[5] * 1000, -1, truncate_prompt=True))).details())
    answer = await asked(-1, *[5] * 1000, truncate_prompt=True, stopping=stopping)
    assert answer.prompt_info.prompt_tokens == CONTEXT_TOKENS - 12


# Bytes


async def test_bytes_beyond_the_budget_are_refused_over_grpc_and_http(model: str, gate: Gate) -> None:
    """What waits is charged by its bytes; what is tokenised, by its tokens; what has ended is not charged any more."""
    config = replace(CONFIG, model=model, http_port=0, max_pending_bytes=50_000, tokenizer_threads=1)
    cluster = Cluster(config)
    await cluster.start()
    await cluster.add("prefill")
    await cluster.add("decode")
    generate = cluster.inference.Generate
    wide = {"truncate_prompt": True, "stopping": types_pb2.StoppingParams(max_tokens=12)}
    first = asyncio.ensure_future(generate(request(LONG * 30, **wide)))
    await gate.reached()
    error = await refused(generate(request(LONG * 30, **wide)))
    assert code_of(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "too many bytes of requests are waiting"
    retry = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(retry) for detail in status_of_call(error).details)
    url = f"http://127.0.0.1:{cluster.router.http_port}/v1/completions"
    async with httpx2.AsyncClient(timeout=HANG_S, trust_env=False) as client:
        answer = await client.post(url, json={"prompt": "x" * 30_000})
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")
        assert "retry-after" in answer.headers
        assert (await client.post(url, json={"prompt": "hi"})).status_code == 200, "small ones still fit"
        gate.open.set()
        await first
        assert (await client.post(url, json={"prompt": "x" * 30_000})).status_code == 400, "too long, and read again"
    assert (await generate(request())).output.text == TEXT
    await cluster.idle()
    await cluster.stop()


NUMBERS = b",".join(b"%d" % number for number in range(10**6, 10**6 + (1 << 18)))
PART = b'{"type": "text", "text": "a", "more": "%s"}' % (b"x" * 10_000)
SHAPES: dict[str, bytes] = {
    "numbers": b'{"prompt": "hi", "metadata": [' + NUMBERS + b"]}",
    "a user": b'{"prompt": "hi", ' + b",".join(b'"f%d": "%s"' % (n, b"x" * (1 << 18)) for n in range(8)) + b"}",
    "parts": b'{"messages": [{"role": "user", "content": [' + b",".join([PART] * 190) + b"]}]}",
}


@pytest.mark.parametrize("shape", SHAPES)
async def test_nothing_is_kept_of_what_waits_but_its_tokens(model: str, shape: str) -> None:
    """Neither the body nor what was parsed of it: of the smallest, two megabytes."""
    cluster = Cluster(replace(CONFIG, model=model, http_port=0))
    await cluster.start()
    body, path = SHAPES[shape], "chat/completions" if shape == "parts" else "completions"
    url = f"http://127.0.0.1:{cluster.router.http_port}/v1/{path}"

    async with httpx2.AsyncClient(timeout=HANG_S, trust_env=False) as client:

        async def wait(num: int) -> asyncio.Task[Any]:
            asked = client.post(url, content=body, headers={"content-type": "application/json"})
            task = asyncio.ensure_future(asked)
            async with asyncio.timeout(HANG_S):
                while cluster.router.coordinator.num_live != num:  # no event tells of it
                    assert not task.done(), (await task).text
                    await asyncio.sleep(0.002)
            return task

        first = await wait(1)  # what it makes the router load is not its own
        tracemalloc.start()
        try:
            second = await wait(2)
            async with asyncio.timeout(HANG_S):
                while tracemalloc.get_traced_memory()[0] >= len(body) / 4:  # noqa: ASYNC110  (no event tells)
                    await asyncio.sleep(0.002)
        finally:
            tracemalloc.stop()
        for task in (first, second):
            task.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
    assert cluster.router.byte_budget.used_bytes < len(body) / 4
    await cluster.idle()
    await cluster.stop()


async def test_a_client_that_sends_no_request_or_half_of_one(cluster: Cluster, pair: Any) -> None:
    path = "/baton.v1.InferenceService/Generate"

    async def nothing() -> AsyncIterator[bytes]:
        return
        yield b""

    for call in (cluster.channel.stream_unary(path)(nothing()), cluster.channel.unary_unary(path)(b"\xff" * 100_000)):
        error = await refused(call)
        assert code_of(error) is grpc.StatusCode.INVALID_ARGUMENT
    assert (await cluster.inference.Generate(request())).output.text == TEXT


async def test_calls_at_once_are_bounded(model: str, gate: Gate) -> None:
    cluster = Cluster(replace(CONFIG, model=model, max_concurrent_rpcs=2))
    await cluster.start()
    await cluster.add("prefill")
    await cluster.add("decode")
    calls = [asyncio.ensure_future(cluster.inference.Generate(request(LONG))) for _ in range(2)]
    await waiting(cluster, 2)
    assert code_of(await refused(cluster.inference.Generate(request()))) is grpc.StatusCode.RESOURCE_EXHAUSTED
    gate.open.set()
    await asyncio.gather(*calls)
    assert (await cluster.inference.Generate(request())).output.text == TEXT
    await cluster.idle()
    await cluster.stop()


@pytest.mark.parametrize("kind", ["short text", "long text", "ids"])
async def test_prompts_are_hashed_off_the_loop_where_policy_looks_at_their_blocks(
    model: str, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Proves that the hashes which reach policy are those of the prompt, and that a long one's are made on a thread."""
    hashed: list[tuple[int, bool]] = []
    jobs: list[Job] = []

    def hashing(token_ids: list[int], block_size: int, cache_salt: str = "") -> list[bytes]:
        hashed.append((len(token_ids), threading.current_thread() is threading.main_thread()))
        return block_hashes(token_ids, block_size, cache_salt)

    def look(workers: Sequence[WorkerView], asked: Question) -> list[float]:
        jobs.append(asked.job)
        return prefix_cached(workers, asked)

    terms = ((1.0, look),)
    policy = PolicyConfig(hash_prompts=True, prefill_terms=terms, decode_terms=terms)
    monkeypatch.setattr("services.router.front.intake.block_hashes", hashing)
    monkeypatch.setattr("services.router.front.intake._INLINE_TOKENS", 64)
    monkeypatch.setitem(PRESETS, "pressure", policy)
    cluster = Cluster(replace(CONFIG, model=model))
    await cluster.start()
    for role in ("prefill", "decode"):
        await cluster.add(role)
    asked = inference_pb2.GenerateRequest(cache_salt="s")
    if kind == "ids":
        asked.token_ids.ids.extend([3 + number % 50 for number in range(200)])
    else:
        asked.text = LONG if kind == "long text" else "the baton is passed"
    await cluster.inference.Generate(asked)
    ids = list(asked.token_ids.ids) or byte_tokenizer().encode(asked.text).ids
    sizes = {worker.block_size for worker in cluster.router.coordinator.workers.views()}
    assert hashed == [(len(ids), len(ids) <= 64)] * len(sizes)
    assert jobs
    for job in jobs:
        assert job.block_hashes == {size: short_hashes(block_hashes(ids, size, "s")) for size in sizes}
    await cluster.idle()
    await cluster.stop()
