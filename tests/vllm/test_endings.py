"""Tests that however a sequence ends, nothing of it is left: no slot, and no block of vLLM's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from services.core.errors import SequencePreempted, StepFailed
from services.core.hashing import num_blocks_for
from services.engine.schedule.sequence import Mode, Preempted, Progress, Token
from services.kv.pool import Holder
from services.vllm import messages
from services.vllm.engine import VllmEngine
from tests.support.engine_driver import Output
from tests.support.equality import GreedyReference
from tests.support.vllm_driver import BLOCK, NUM_BLOCKS, VllmDriver, config_of, load, tiny_for_vllm

pytestmark = pytest.mark.timeout(300)

LONG = 1200
ATTEMPTS = 10
"""A busy machine may be late."""


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(at * 37 + number * 101) % 300 + 3 for at in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_for_vllm(tmp_path_factory.mktemp("models"), num_hidden_layers=16)


@pytest.fixture(scope="module")
def reference(model: Path) -> GreedyReference:
    return GreedyReference(model)


@pytest.fixture(scope="module")
def driver(model: Path) -> Iterator[VllmDriver]:
    with VllmDriver(load(config_of(model, max_num_batched_tokens=64))) as driver:
        yield driver


@pytest.fixture(autouse=True)
def leaves_nothing(driver: VllmDriver) -> Iterator[None]:
    yield
    driver.idle()
    assert driver.vllm.stats().ledger.free + driver.vllm.stats().ledger.cached == NUM_BLOCKS
    assert len(driver.whole(prompt_of(40), 3)) == 3, "it goes on"


def until(condition: Callable[[], bool], within_s: float = 30.0) -> None:
    until_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until_s
        time.sleep(0.001)


def events_of(driver: VllmDriver, seq_id: int, kind: type) -> list[Any]:
    events = [each for report in list(driver.reports) for each in report.events]
    return [each for each in events if each.seq_id == seq_id and isinstance(each, kind)]


@pytest.mark.parametrize("after_ms", [0, 1, 3, 10, 30])
def test_an_abort_whenever_it_comes(driver: VllmDriver, after_ms: int) -> None:
    """It comes while the sequence waits, is being added, or has just begun."""
    seq_id = driver.submit(prompt_of(300, after_ms), 500)
    time.sleep(after_ms / 1e3)
    driver.engine.abort(seq_id)
    driver.idle()


def test_an_abort_between_chunks_of_a_prompt(driver: VllmDriver) -> None:
    for attempt in range(ATTEMPTS):
        seq_id = driver.submit(prompt_of(LONG, 1), 1, mode=Mode.PREFILL_ONLY, cache_salt=str(attempt))
        until(lambda each=seq_id: bool(events_of(driver, each, Progress)))
        driver.engine.abort(seq_id)
        driver.engine.release(driver.outputs[seq_id].block_ids, Holder.LEASE)
        driver.idle()
        if not driver.outputs[seq_id].tokens:
            return
    raise AssertionError("every abort was too late")


def test_an_abort_while_it_decodes(driver: VllmDriver) -> None:
    seq_id = driver.submit(prompt_of(100, 2), 1500)
    until(lambda: len(driver.outputs[seq_id].tokens) > 5)
    driver.engine.abort(seq_id)
    driver.idle()
    assert len(driver.outputs[seq_id].tokens) < 1500, "it was too late"


@pytest.mark.parametrize("after_ms", [0, 1, 3, 10])
def test_an_abort_while_kv_is_loaded(driver: VllmDriver, after_ms: int) -> None:
    prompt = prompt_of(LONG, 3)
    [first] = driver.wait(driver.submit(prompt, 100, mode=Mode.PREFILL_ONLY, cache_salt="here"))
    seq_id = driver.go_on(prompt, 100, source=driver, first=first, cache_salt=f"there {after_ms}")
    time.sleep(after_ms / 1e3)
    driver.engine.abort(seq_id)
    driver.engine.release(first.block_ids, Holder.LEASE)
    driver.idle()


def test_a_load_that_fails_gives_an_error_and_no_token(driver: VllmDriver) -> None:
    prompt = prompt_of(LONG, 4)
    [first] = driver.wait(driver.submit(prompt, 100, mode=Mode.PREFILL_ONLY))
    send = driver.vllm._process.send

    def misdirect(peer: Any, message: messages.JsonMessage) -> None:
        if message["kind"] == messages.ADD:
            message["kv"]["slots"] = [*message["kv"]["slots"][:-1], NUM_BLOCKS + 5]
        send(peer, message)

    with mock.patch.object(driver.vllm._process, "send", misdirect):
        seq_id = driver.go_on(prompt, 100, source=driver, first=first, cache_salt="elsewhere")
    [failed] = driver.wait(seq_id)
    driver.engine.release(first.block_ids, Holder.LEASE)
    assert isinstance(failed.error, StepFailed)
    assert not events_of(driver, seq_id, Token)


def test_a_sequence_whose_blocks_vllm_takes_fails_to_be_replayed(
    driver: VllmDriver, reference: GreedyReference
) -> None:
    """The worker is made to admit what the prompts need, as if neither had an answer. Both answers would take 128 of 96
    blocks, so vLLM runs out of them unless the second one begins a thousand steps late."""
    prompts, num_tokens = [prompt_of(30, number) for number in (5, 6)], 2000

    def too_few(self: VllmEngine, sequence: Any) -> int:
        return num_blocks_for(len(sequence.token_ids), BLOCK)

    with mock.patch.object(VllmEngine, "_num_needed", too_few):
        ids = [driver.submit(prompt, num_tokens) for prompt in prompts]
        outputs = driver.wait(*ids)
    [robbed] = [output for output in outputs if output.error is not None]
    assert isinstance(robbed.error, SequencePreempted)
    assert [bool(events_of(driver, seq_id, Preempted)) for seq_id in ids] == [each is robbed for each in outputs]
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.token_ids
        if output is robbed:
            answer += driver.whole([*prompt, *answer], num_tokens, output_base=len(answer))
        assert len(answer) == num_tokens
        reference.check_at_once(prompt, answer)


def test_vllm_waits_for_a_worker_that_reads_nothing_for_a_while(driver: VllmDriver) -> None:
    prompt = prompt_of(30, 9)
    expected = driver.whole(prompt, 1500)
    seq_id = driver.submit(prompt, 1500)
    until(lambda: len(driver.outputs[seq_id].tokens) > 5)
    with driver.vllm._lock:  # its thread waits, and what vLLM sends fills the sockets
        time.sleep(2.0)
    [output] = driver.wait(seq_id)
    assert output.token_ids == expected


def test_many_sequences_that_come_and_go(driver: VllmDriver) -> None:
    """Some are ended by their stop token, some by their length, and every third by an abort in some phase."""
    ids = [
        driver.submit(prompt_of(20 + 13 * number, number), 5 + 4 * number, stop_token_ids=frozenset({number}))
        for number in range(24)
    ]
    for at, seq_id in enumerate(ids[::3]):
        time.sleep(0.01 * at)
        driver.engine.abort(seq_id)
    left = [seq_id for at, seq_id in enumerate(ids) if at % 3]
    outputs: list[Output] = driver.wait(*left)
    assert all(output.error is None and output.finish is not None for output in outputs)
