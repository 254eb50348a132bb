"""Tests lending between a real source and a real destination: blocks of the prefix cache, asked for by their hashes."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from baton.v1 import kvtransfer_pb2, types_pb2
from services.core.errors import BatonError, InvalidRequest, LayoutMismatch, LeaseInvalid, Overloaded, StaleIncarnation
from services.core.hashing import BlockHash, block_hashes
from services.kv.imports import ImportState
from services.kv.lease import LeaseState
from services.kvtransfer import borrowing
from services.kvtransfer.borrowing import LOAN_LEG, Loan
from services.kvtransfer.client import FetchOrder
from services.kvtransfer.lending import MOST_LENDS, MOST_LENT_S, UNFETCHED_S
from services.kvtransfer.servicer import KVTransferServicer
from services.kvtransfer.wire import whole_shard
from services.rpc.interceptors import CallContext
from tests.support.kv_harness import LAYOUT, Destination, Source, opening, raw_stub, running, until
from tests.support.kv_memory import content
from tests.support.patience import HANG_S

TRANSPORTS = pytest.mark.parametrize("transport", ["shm", "grpc"])
QUARTER = 16
"""Of the source's 64 blocks: the most that it lends at once."""


def order_for(
    source: Source, destination: Destination, loan: Loan, *, transport: str = "auto", first_block: int = 0
) -> FetchOrder:
    where = source.where
    if transport != "auto":
        kind = types_pb2.Transport.Value(f"TRANSPORT_{transport.upper()}")
        offers = [offer for offer in where.offers if offer.transport == kind]
        del where.offers[:]
        where.offers.extend(offers)
    import_ = destination.reserve(loan.num_blocks - first_block)
    return FetchOrder(where, loan.lease_id, LOAN_LEG, import_, first_block, import_.block_ids)


async def borrow(source: Source, destination: Destination, hashes: list[BlockHash]) -> Loan:
    loan = await destination.borrower.borrow(source.where, hashes)
    assert loan is not None
    return loan


async def give_back(source: Source, destination: Destination, loan: Loan) -> None:
    destination.borrower.give_back(loan)
    await until(lambda: source.table.get(loan.lease_id) is None)


class SlowLender(KVTransferServicer):
    """Lends at once, and says so when it may."""

    may_answer: asyncio.Event

    async def Lend(self, request: kvtransfer_pb2.LendRequest, context: CallContext) -> kvtransfer_pb2.LendResponse:
        answer = await super().Lend(request, context)
        await self.may_answer.wait()
        return answer


@pytest.fixture
async def slow(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(SlowLender, "may_answer", asyncio.Event(), raising=False)
    return Source(servicer=SlowLender)


@TRANSPORTS
@pytest.mark.parametrize("num_slots", [0, 2])
async def test_what_is_lent_is_fetched_and_released_as_a_handoff_is(transport: str, num_slots: int) -> None:
    source, destination = Source(num_slots=num_slots), Destination()
    async with running(source, destination):
        loan = await borrow(source, destination, source.cache(5))
        assert loan.num_blocks == source.lender.num_lent_blocks == 5
        assert all(list(offer.shards) == [whole_shard(LAYOUT)] for offer in loan.source.offers)
        order = order_for(source, destination, loan, transport=transport)
        outcome = await destination.fetcher.fetch(order)
        assert outcome.ready
        assert outcome.num_tokens == 5 * LAYOUT.block_size
        assert not outcome.first_token.token_ids
        assert order.import_.state is ImportState.READY
        assert destination.holds(order.targets) == [content(seed, LAYOUT.block_bytes) for seed in range(5)]
        assert source.ended[0].state is LeaseState.RELEASED


async def test_the_longest_run_from_the_first_block_on_is_lent() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        hashes = source.cache(6)
        del source.cached[hashes[3]]
        loan = await borrow(source, destination, hashes[1:])
        assert loan.num_blocks == 2, "blocks 1 and 2; what is behind a gap is of no use"
        order = order_for(source, destination, loan, first_block=1)
        await destination.fetcher.fetch(order)
        assert destination.holds(order.targets) == [content(2, LAYOUT.block_bytes)]
        assert await destination.borrower.borrow(source.where, hashes[3:]) is None
        assert await destination.borrower.borrow(source.where, []) is None


async def test_other_namespaces_are_other_blocks() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        source.cache(2)
        salted = block_hashes(range(2 * LAYOUT.block_size), LAYOUT.block_size, "another tenant")
        assert await destination.borrower.borrow(source.where, salted) is None


async def test_what_is_not_fetched_is_the_sources_again_when_its_time_is_over() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        loan = await borrow(source, destination, source.cache(3))
        source.pass_time(UNFETCHED_S - 0.1)
        assert source.lender.num_lends == 1
        source.pass_time(0.2)
        assert source.lender.num_lends == 0
        with pytest.raises(LeaseInvalid):
            await destination.fetcher.fetch(order_for(source, destination, loan))


async def test_what_is_not_wanted_is_given_back() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        loan = await borrow(source, destination, source.cache(3))
        await give_back(source, destination, loan)
        assert source.lender.num_lends == 0
        with pytest.raises(LeaseInvalid):
            await destination.fetcher.fetch(order_for(source, destination, loan))


async def test_what_is_lent_to_somebody_who_has_gone_meanwhile_is_given_back(slow: Source) -> None:
    destination = Destination()
    async with running(slow, destination):
        asking = asyncio.create_task(destination.borrower.borrow(slow.where, slow.cache(3)))
        await until(lambda: slow.lender.num_lends == 1)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        SlowLender.may_answer.set()
        await until(lambda: slow.lender.num_lends == 0)


async def test_a_worker_that_stops_gives_back_what_it_is_lent_in_that_moment(slow: Source) -> None:
    destination = Destination()
    async with running(slow):
        asking = asyncio.create_task(destination.borrower.borrow(slow.where, slow.cache(3)))
        await until(lambda: slow.lender.num_lends == 1)
        asking.cancel()
        asyncio.get_running_loop().call_soon(SlowLender.may_answer.set)
        await asyncio.wait([asking])
        await destination.close()
        assert slow.lender.num_lends == 0


async def test_a_worker_that_stops_does_not_wait_long_for_what_it_is_lent(
    slow: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(borrowing, "_RETURNED_WITHIN_S", 0.05)
    destination = Destination()
    async with running(slow):
        asking = asyncio.create_task(destination.borrower.borrow(slow.where, slow.cache(3)))
        await until(lambda: slow.lender.num_lends == 1)
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(HANG_S):
            await destination.close()
        slow.pass_time(11.0)


async def test_what_is_lent_ends_with_its_worker() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        handoff = source.lease(40)
        await borrow(source, destination, source.cache(3))
        source.lender.close()
        assert source.lender.num_lends == 0
        assert handoff.live, "its session ends it"
        source.table.abort(handoff.lease_id, 0.0)


async def test_whoever_fetches_slowly_has_what_was_lent_for_a_bounded_time() -> None:
    source, destination = Source(shared=False), Destination()
    async with running(source, destination), raw_stub(source) as stub:
        loan = await borrow(source, destination, source.cache(QUARTER))
        lease = source.table.get(loan.lease_id)
        assert lease is not None
        call = stub.Fetch()
        await call.write(opening(source, loan.lease_id, leg=LOAN_LEG))
        num_turns = int(MOST_LENT_S / 4.9)
        assert num_turns < QUARTER, "it always has another block to copy"
        for copied in range(1, num_turns + 1):
            await until(lambda upto=copied: lease.fetch is not None and lease.fetch.announced >= upto)  # type: ignore[misc]
            ack = kvtransfer_pb2.FetchAck(copied_blocks=copied)
            await call.write(kvtransfer_pb2.FetchRequest(ack=ack))
            await until(lambda upto=copied: lease.most_copied == upto)  # type: ignore[misc]
            source.pass_time(4.9)
            assert lease.fetch is not None, "its clocks say nothing"
        source.pass_time(MOST_LENT_S - num_turns * 4.9 + 0.1)
        assert lease.state is LeaseState.EXPIRED
        assert source.lender.num_lends == 0
        call.cancel()


async def test_at_most_a_quarter_of_the_pool_is_lent() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        hashes = source.cache(30)
        first = await borrow(source, destination, hashes)
        assert first.num_blocks == QUARTER
        again = await borrow(source, destination, hashes)
        assert again.num_blocks == QUARTER, "the same blocks are pinned only once"
        with pytest.raises(Overloaded):
            await destination.borrower.borrow(source.where, hashes[QUARTER:])
        await give_back(source, destination, first)
        with pytest.raises(Overloaded):
            await destination.borrower.borrow(source.where, hashes[QUARTER:])
        await give_back(source, destination, again)
        rest = await borrow(source, destination, hashes[QUARTER:])
        assert rest.num_blocks == 30 - QUARTER
        await give_back(source, destination, rest)


async def test_the_number_of_lends_is_bounded() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        hashes = source.cache(1)
        loans = [await borrow(source, destination, hashes) for _ in range(MOST_LENDS)]
        with pytest.raises(Overloaded):
            await destination.borrower.borrow(source.where, hashes)
        for loan in loans:
            await give_back(source, destination, loan)
        assert (await borrow(source, destination, hashes)).num_blocks == 1
        source.pass_time(11.0)


@pytest.mark.parametrize("wrong", ["incarnation", "layout"])
async def test_nothing_is_lent_to_whoever_means_another_process_or_layout(wrong: str) -> None:
    other = replace(LAYOUT, weights_digest="others") if wrong == "layout" else LAYOUT
    source, destination = Source(), Destination(other)
    async with running(source, destination):
        hashes = source.cache(2)
        where = source.where
        where.incarnation += wrong == "incarnation"
        expected: type[BatonError] = LayoutMismatch if wrong == "layout" else StaleIncarnation
        with pytest.raises(expected):
            await destination.borrower.borrow(where, hashes)
        assert source.lender.lends == 0


async def test_halves_of_hashes_are_refused() -> None:
    source, destination = Source(), Destination()
    async with running(source, destination):
        with pytest.raises(InvalidRequest):
            await destination.borrower.borrow(source.where, [b"half"])


async def test_a_source_that_dies_while_it_lends_fails_the_fetch_only() -> None:
    source, destination = Source(), Destination()
    async with running(destination):
        await source.server.start()
        loan = await borrow(source, destination, source.cache(2))
        order = order_for(source, destination, loan)
        await source.server.stop()
        with pytest.raises(BatonError):
            await destination.fetcher.fetch(order)
        await until(lambda: order.import_.state is ImportState.FREED)
    await source.close()


async def test_a_peer_that_repeats_a_hash_is_lent_no_more_for_it() -> None:
    """Otherwise one small message pins a lease as long as it likes, and is answered in as much time."""
    source, destination = Source(), Destination()
    async with running(source, destination):
        repeated = source.cache(1) * 4_000
        loans = [await borrow(source, destination, repeated) for _ in range(3)]
        assert all(loan.num_blocks <= QUARTER for loan in loans)
        for loan in loans:
            await give_back(source, destination, loan)
