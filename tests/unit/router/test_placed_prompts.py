"""Tests what policy may know of prompts: their blocks' hashes, their conversations, and where these were placed."""

from __future__ import annotations

import random

import pytest

from services.core.hashing import block_hashes
from services.engine.schedule.prefix import hash_prompt
from services.engine.schedule.sequence import SamplingParams, Sequence, StoppingParams
from services.router.policy import PlacedPrompts, PolicyConfig, Role
from services.router.policy.terms import prefix_placed, same_conversation, short_queue
from tests.support.router_bench import Bench

PROMPT = tuple(range(37))
HASHES = {16: tuple(block_hashes(PROMPT, 16, "s"))}


def test_a_job_knows_its_prompts_blocks_as_a_workers_cache_does() -> None:
    bench = Bench()
    bench.submit(num_tokens=37, block_hashes=HASHES, cache_salt="s", conversation="c", tenant="t")
    (request,) = bench.coordinator._book.requests.values()
    job = request.next_job()
    sequence = Sequence(
        seq_id=1,
        token_ids=list(PROMPT),
        num_prompt_tokens=37,
        sampling=SamplingParams(),
        stopping=StoppingParams(max_tokens=8),
        arrival_s=0.0,
        cache_salt="s",
    )
    hash_prompt(sequence, 16)
    assert list(job.block_hashes[16]) == sequence.hashes
    assert (len(sequence.hashes), job.conversation, job.tenant) == (2, "c", "t")


@pytest.mark.parametrize("by", ["prefix", "conversation"])
@pytest.mark.parametrize("first", ["p-0", "p-1"])
def test_a_policy_can_send_a_prompt_where_its_beginning_or_its_conversation_was_placed(by: str, first: str) -> None:
    """Places a prompt on one of two workers, and then others that share its prefix, or its conversation, or neither.

    The queue of the first worker is longer, so that all others go to the other one.
    """
    term = prefix_placed if by == "prefix" else same_conversation
    policy = PolicyConfig(hash_prompts=True, prefill_terms=((4.0, term), (1.0, short_queue)))
    bench = Bench(policy=policy)
    other = "p-1" if first == "p-0" else "p-0"
    for worker_id in ("d", first):
        bench.join(worker_id, Role.DECODE if worker_id == "d" else Role.PREFILL)

    def submit(request_id: str, prompt: tuple[int, ...], conversation: str) -> str:
        hashes = {16: tuple(block_hashes(prompt, 16))}
        bench.submit(request_id, len(prompt), block_hashes=hashes, conversation=conversation)
        worker_id = bench.take_leg(Role.PREFILL).worker_id
        bench.cancel(request_id)
        return worker_id

    assert submit("r", PROMPT, "c") == first
    bench.join(other, Role.PREFILL)
    bench.load(first, queued_prefill_tokens=200)
    assert bench.coordinator.block_sizes_to_hash() == {16}
    same = submit("same", (*PROMPT[:32], 5, 6), "of another") if by == "prefix" else submit("same", (7,) * 37, "c")
    assert same == first
    assert submit("neither", (8,) * 37, "another") == other
    bench.assert_idle()


def test_by_default_no_prompt_is_hashed_or_remembered() -> None:
    bench = Bench()
    bench.join("p", Role.PREFILL)
    assert bench.coordinator.block_sizes_to_hash() == frozenset()
    (view,) = bench.coordinator._book.workers.views()
    assert view.placed is None


def test_what_a_process_was_given_is_forgotten_with_it() -> None:
    bench = Bench(policy=PolicyConfig(hash_prompts=True))
    bench.join("d", Role.DECODE)
    bench.join("p", Role.PREFILL)
    bench.submit(num_tokens=37, block_hashes=HASHES)
    bench.cancel()
    placed = bench.coordinator._book.workers.cluster.views["p"].placed
    assert placed is not None
    assert placed.num_blocks(HASHES[16]) == 2
    bench.lose("p")
    bench.join("p", Role.PREFILL, incarnation=2)
    again = bench.coordinator._book.workers.cluster.views["p"].placed
    assert again is not None
    assert again.num_blocks(HASHES[16]) == 0


def test_what_is_remembered_is_bounded_and_the_newest() -> None:
    placed = PlacedPrompts(most_blocks=8)
    prompts = [tuple(block_hashes([number] * 48, 16)) for number in range(4)]
    for number, hashes in enumerate(prompts):
        placed.add(hashes, f"c{number}")
    assert [placed.num_blocks(hashes) for hashes in prompts] == [0, 2, 3, 3]  # the last block of a prompt goes first
    placed.add(tuple(block_hashes(range(1600), 16)), "long")
    assert len(placed._blocks) == 8
    assert placed.num_blocks(block_hashes(range(1600), 16)) == 8
    for number in range(10_000):
        placed.add((), f"conversation {number}")
    assert len(placed._conversations) == 4096
    assert placed.has_conversation("conversation 9999")
    assert not placed.has_conversation("long")


@pytest.mark.parametrize("most", [1, 4, 7, 100])
def test_what_is_remembered_of_a_prompt_is_its_beginning(most: int) -> None:
    """Checks that one place among a prompt's blocks parts those that are remembered from those that are not."""
    random_ = random.Random(most)
    placed = PlacedPrompts(most)
    prompts = [tuple(block_hashes([number % 3] * 4 + [number] * 8, 2, "")) for number in range(9)]
    for _ in range(200):
        prompt = random_.choice(prompts)
        placed.add(prompt[: random_.randint(1, len(prompt))], "")
        for each in prompts:
            known = [block in placed._blocks for block in each]
            assert placed.num_blocks(each) == (known.index(False) if False in known else len(known)) == sum(known)
