"""Peers and clients that misbehave: a typed error, bounded memory, and nobody else feels it."""

from __future__ import annotations

import contextlib
import gc
import math
import random
import resource
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import pytest_asyncio

from baton.v1 import inference_pb2_grpc, kvtransfer_pb2, kvtransfer_pb2_grpc, types_pb2, worker_pb2
from services.core.errors import CorruptBlock, LayoutMismatch, ProtocolViolation
from services.kvtransfer.wire import layout_to_proto
from services.router.answer import Answer
from services.rpc.authentication import credentials
from services.rpc.status import from_status
from tests.support.bad_peers import HTTP2_PREFACE, HTTP2_SETTINGS, BadSource, FlippingMemory, connections
from tests.support.cluster import Cluster, greedy_request, receive, running_cluster
from tests.support.equality import GreedyReference
from tests.support.models import VOCAB_SIZE
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN, dial
from tests.support.workers import DECODE, PREFILL, ScriptedRouter, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = random.Random(3).choices(range(3, VOCAB_SIZE), k=50)
NUM_PROMPT_BLOCKS = 4
GREEDY = types_pb2.SamplingParams(temperature=0.0)
Code = grpc.StatusCode


@pytest.fixture(scope="module")
def expected(model: Path) -> list[int]:
    return GreedyReference(model).generate(PROMPT, 12)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def unharmed(cluster: Cluster, expected: list[int]) -> AsyncIterator[None]:
    yield
    await good(cluster, expected)
    await cluster.idle()


async def good(cluster: Cluster, expected: list[int]) -> None:
    """Asserts that a client that behaves gets its answer. Its prompt is in no cache, so that it comes as a handoff."""
    salt = f"{random.getrandbits(64):x}"
    answer = await cluster.stream(greedy_request(PROMPT, 12, cache_salt=salt), timeout_s=HANG_S)
    assert answer.token_ids == expected


# -- what comes over a handoff


@pytest.mark.parametrize("transport", ["grpc", "auto"])
@pytest.mark.parametrize("num_flips", [1, 2], ids=["another try", "computed again"])
async def test_a_corrupted_block_reaches_no_client(
    model: Path, expected: list[int], transport: str, num_flips: int
) -> None:
    async with running_cluster(model, [PREFILL, DECODE], transport=transport) as cluster:
        prefill, decode = cluster.workers
        memory = FlippingMemory(decode)
        memory.num_flips = num_flips
        await good(cluster, expected)
        assert memory.num_flips == 0
        assert decode.tally.imports_failed == num_flips
        # Twice is enough for one lease: the prompt then runs again.
        assert sum(prefill.tally.leases_ended.values()) == num_flips


async def test_a_corrupted_block_is_data_loss_and_the_lease_lives(cluster: Cluster) -> None:
    decode = cluster.workers[1]
    async with handoff(cluster) as (command, session):
        FlippingMemory(decode).num_flips = 1
        await session.send(decode=command)
        failed = await session.next("import_failed", command.leg)
        assert failed.lease_alive
        assert failed.status.code == Code.DATA_LOSS.value[0]
        assert isinstance(from_status(failed.status), CorruptBlock)
        command.leg += 1
        await session.send(decode=command)
        assert len((await session.tokens(command.leg))[0]) == 3


SEALS = {
    "the stream ends": None,
    "no token": types_pb2.SequenceTokens(),
    "two tokens": types_pb2.SequenceTokens(token_ids=[1, 2]),
    "a token beyond the vocabulary": types_pb2.SequenceTokens(token_ids=[VOCAB_SIZE]),
    "a negative token": types_pb2.SequenceTokens(token_ids=[-1]),
    "too many tokens": types_pb2.SequenceTokens(token_ids=[5]),
    "another position": types_pb2.SequenceTokens(token_ids=[5], position=3),
    "no log-probability": types_pb2.SequenceTokens(token_ids=[5], logprobs=[types_pb2.TokenLogprobs(logprob=math.nan)]),
}


@pytest.mark.parametrize("what", SEALS)
async def test_a_source_that_makes_no_sense(model: Path, expected: list[int], what: str) -> None:
    """Both tries of its handoff are failures, and the prompt is computed again."""
    async with running_cluster(model, [PREFILL, DECODE], transport="grpc") as cluster:
        source, token = BadSource(cluster.workers[0]), SEALS[what]
        source.num_blocks = NUM_PROMPT_BLOCKS
        if token is not None:
            num_tokens = len(PROMPT) + (what == "too many tokens")
            source.seal = kvtransfer_pb2.FetchSealed(num_tokens=num_tokens, first_token=token)
        async with source.running():
            await good(cluster, expected)
        assert source.num_fetches == 2


async def test_another_layout_is_refused_before_anything_is_reserved(cluster: Cluster) -> None:
    async with handoff(cluster) as (command, session):
        right = command.handoff.source.layout.block_size
        command.handoff.source.layout.block_size = 2 * right
        await session.send(decode=command)
        failed = await session.next("import_failed", command.leg)
        assert isinstance(from_status(failed.status), LayoutMismatch)
        assert failed.status.code == Code.FAILED_PRECONDITION.value[0]
        assert failed.lease_alive
        command.handoff.source.layout.block_size = right
        command.leg += 1
        await session.send(decode=command)
        await session.tokens(command.leg)


async def test_a_handoff_of_other_tokens_than_were_prefilled(cluster: Cluster) -> None:
    async with handoff(cluster) as (command, session):
        command.token_ids.append(7)
        await session.send(decode=command)
        failed = await session.next("import_failed", command.leg)
        assert isinstance(from_status(failed.status), ProtocolViolation)


async def test_a_lease_is_used_once(cluster: Cluster) -> None:
    """Release again by the same leg is safe; anything else that comes later, or guesses, gets nothing."""
    prefill = cluster.workers[0]
    async with dial(prefill.address) as channel, handoff(cluster) as (command, _):
        transfer = kvtransfer_pb2_grpc.KVTransferServiceStub(channel)
        lease_id = command.handoff.lease_id
        opened = kvtransfer_pb2.FetchOpen(
            leg=9,
            transport=types_pb2.TRANSPORT_GRPC,
            layout=layout_to_proto(prefill.layout),
            source_incarnation=prefill.incarnation,
        )

        async def valid(lease: bytes, leg: int) -> bool:
            return bool((await transfer.Release(kvtransfer_pb2.ReleaseRequest(lease_id=lease, leg=leg))).valid)

        async def fetched(lease: bytes) -> grpc.StatusCode:
            opened.lease_id = lease
            call = transfer.Fetch(iter([kvtransfer_pb2.FetchRequest(open=opened)]))
            with contextlib.suppress(grpc.aio.AioRpcError):
                assert [message async for message in call] == []
            return await call.code()

        guessed = bytes(reversed(lease_id))
        assert not await valid(guessed, 5)
        assert await fetched(guessed) is Code.ABORTED
        assert await valid(lease_id, 5)
        assert await valid(lease_id, 5)
        assert not await valid(lease_id, 6)
        assert not await valid(lease_id, 4)
        assert await fetched(lease_id) is Code.ABORTED


@contextlib.asynccontextmanager
async def handoff(cluster: Cluster) -> AsyncIterator[tuple[worker_pb2.DecodeCommand, Any]]:
    """Yields a sealed lease, the command that takes it over (for 3 tokens), and a session with the decode worker."""
    prefill, decode = cluster.workers
    scripted = ScriptedRouter(incarnation=random.getrandbits(32) + 1)
    stopping = types_pb2.StoppingParams(max_tokens=3, ignore_eos=True)
    async with scripted.session(prefill) as source, scripted.session(decode) as target:
        prompt = {"token_ids": PROMPT, "sampling": GREEDY, "stopping": stopping, "cache_salt": "handoff"}
        await source.send(prefill=worker_pb2.PrefillCommand(leg=1, **prompt))
        started = await source.next("started", 1)
        await source.tokens(1, count=1)
        command = worker_pb2.DecodeCommand(leg=2, **prompt)
        command.handoff.lease_id = started.lease_id
        command.handoff.source.CopyFrom(started.source)
        yield command, target


# -- what comes over a session


async def test_an_oversize_message_ends_only_its_session(cluster: Cluster) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(cluster.workers[0].address, options=options) as channel:
        session = channel.stream_stream("/baton.v1.WorkerService/Session")
        call = session(
            iter([bytes(cluster.workers[0].config.max_message_bytes + 1)]), metadata=credentials(CLUSTER_TOKEN)
        )
        assert await call.code() is Code.RESOURCE_EXHAUSTED


# -- clients


async def test_clients_that_dawdle_over_their_first_bytes(cluster: Cluster, expected: list[int]) -> None:
    """A byte at a time, on many connections; whoever speaks whole sentences is served meanwhile."""
    with connections(cluster.router.port, 100, lambda number: HTTP2_PREFACE[: number % 24]) as dawdlers:
        for byte in range(24):
            for number, connection in enumerate(dawdlers):
                at = number % 24 + byte
                connection.sendall(HTTP2_PREFACE[at : at + 1])
            if byte % 8 == 0:
                await good(cluster, expected)


async def test_requests_that_never_come(cluster: Cluster, expected: list[int]) -> None:
    """Streams are open, their requests are not sent. They end with their connection and count for nothing."""
    async with dial(f"127.0.0.1:{cluster.router.port}") as channel:
        method = "/baton.v1.InferenceService/GenerateStream"
        calls = [channel.stream_stream(method)() for _ in range(200)]
        await good(cluster, expected)
        assert cluster.router.coordinator.num_live == 0
        for call in calls:
            call.cancel()


@pytest.mark.long
async def test_clients_that_never_read(cluster: Cluster, expected: list[int]) -> None:
    """Their requests end all the same; what waits for them is their output and no more."""
    request = greedy_request(PROMPT, 900)
    request.response.logprobs = 20  # more than a stream's window takes, if it does not grow
    options = [("grpc.http2.bdp_probe", 0)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{cluster.router.port}", options=options) as channel:
        idlers = [inference_pb2_grpc.InferenceServiceStub(channel).GenerateStream(request) for _ in range(4)]
        await until(lambda: cluster.router.coordinator.num_live == 4, "they are live")
        await good(cluster, expected)
        await until(lambda: cluster.router.coordinator.num_live == 0, "they are over")
        waiting = [answer.num_waiting_tokens for answer in answers()]
        assert len(waiting) == 4
        assert 0 < max(waiting) <= 900
        first = await receive(idlers[0])
        assert (len(first.token_ids), len(first.logprobs), first.token_ids[:12]) == (900, 900, expected)
        for idler in idlers[1:]:
            idler.cancel()
    await until(lambda: not answers(), "nothing is kept for them")


def answers() -> list[Answer]:
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is Answer]


@pytest.fixture
def many_files() -> Iterator[None]:
    """Allows for both ends of a thousand connections in this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip("this machine allows too few open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
async def test_a_thousand_idle_connections(cluster: Cluster, expected: list[int]) -> None:
    """Half of them use HTTP/2, half are silent: none may keep others out."""
    process = psutil.Process()
    num_files = process.num_fds()
    greeting = HTTP2_PREFACE + HTTP2_SETTINGS
    ports = [cluster.router.port, int(cluster.workers[0].address.rpartition(":")[2])]
    with contextlib.ExitStack() as stack:
        for port in ports:
            stack.enter_context(connections(port, 500, lambda number: greeting if number % 2 else b""))
        await good(cluster, expected)
    await until(lambda: process.num_fds() < num_files + 50, "the connections are closed")
