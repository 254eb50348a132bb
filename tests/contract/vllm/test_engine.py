"""Tests `VllmEngine` by itself, over a vLLM that follows a script: the order of events, aborts at odd moments, and the
engine's life."""

from __future__ import annotations

import random
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.core.errors import InvalidRequest, SequencePreempted, StepFailed, UnsupportedModel
from services.engine.schedule.sequence import (
    Admitted,
    Failed,
    Mode,
    Progress,
    SamplingParams,
    SequenceEvent,
    Token,
)
from services.kv.handoff_admission import EngineRoom
from services.kv.pool import Holder
from services.vllm import messages
from tests.support.footprint import children_left
from tests.support.scripted_memory import script
from tests.support.scripted_vllm_engine import VOCAB_SIZE, Driver, ScriptedVllm, engine_config

pytestmark = pytest.mark.process

PROMPT = [5 + i * i % 250 for i in range(200)]


def said(prompt: list[int], num_tokens: int) -> list[int]:
    return script(prompt, num_tokens, VOCAB_SIZE)


@pytest.fixture
def driver(model: Path, vllm: ScriptedVllm) -> Iterator[Driver]:
    with Driver(vllm.load(engine_config(model, num_blocks=40))) as driver:
        yield driver


def no_check(num_fresh: int, room: EngineRoom) -> None:
    pass


def test_events_come_in_the_order_of_the_protocol(driver: Driver) -> None:
    sequence = driver.add(PROMPT, 5, mode=Mode.PREFILL_ONLY)
    driver.until(lambda: driver.said(sequence), "its token")
    admitted, *progress, token = driver.of(sequence)
    assert isinstance(admitted, Admitted)
    assert len(admitted.block_ids) == 13
    assert [each.num_computed for each in progress if isinstance(each, Progress)] == [64, 128, 192, 200]
    assert len(progress) == 4
    assert isinstance(token, Token)
    assert driver.said(sequence) == said(PROMPT, 1)
    driver.engine.release(admitted.block_ids, Holder.LEASE)
    driver.idle()


def test_they_do_when_the_worker_looks_late(driver: Driver) -> None:
    """All that has been told meanwhile is read at once."""
    may_go = threading.Event()

    def hold(event: SequenceEvent) -> None:
        driver.events.append(event)
        may_go.wait(10.0)

    driver.on_event = hold
    first = driver.add([7, 8, 9], 1)
    driver.until(lambda: driver.of(first), "it has begun")
    with driver.engine._lock:  # passed on by hand: the engine's thread is busy
        held = [driver.sequence(PROMPT[at : at + 40], 1, mode=Mode.PREFILL_ONLY) for at in range(3)]
        for sequence in held:
            driver.engine.hash_prompt(sequence)
            assert driver.engine._fits(sequence)
        driver.engine._process._write()
    time.sleep(0.2)  # until all has been computed and said to be gone
    may_go.set()
    for sequence in held:
        driver.until(lambda sequence=sequence: driver.said(sequence), "its token")
        first_event, *progress, token = driver.of(sequence)
        assert isinstance(first_event, Admitted)
        assert isinstance(progress[-1], Progress)
        assert progress[-1].num_computed == 40
        assert isinstance(token, Token)
    for sequence in held:
        admitted = driver.of(sequence)[0]
        assert isinstance(admitted, Admitted)
        driver.engine.release(admitted.block_ids, Holder.LEASE)
    driver.idle()


@pytest.mark.parametrize("mode", [Mode.GENERATE, Mode.PREFILL_ONLY])
def test_aborts_at_any_moment_leave_nothing(driver: Driver, mode: Mode) -> None:
    randomness = random.Random(3)
    sequences = []
    for _ in range(60):
        length = randomness.choice([1, 16, 40, 150])
        sequences.append(driver.add(PROMPT[:length], randomness.choice([1, 2, 9]), mode=mode))
        time.sleep(randomness.random() * 0.006)
        chosen = randomness.choice(sequences)
        driver.engine.abort(chosen.seq_id)
        driver.engine.abort(chosen.seq_id)
    for sequence in sequences[::2]:
        driver.engine.abort(sequence.seq_id)
    leased = set[int]()

    def are_over() -> bool:
        for event in list(driver.events):
            if isinstance(event, Admitted) and mode is Mode.PREFILL_ONLY and event.seq_id not in leased:
                leased.add(event.seq_id)
                driver.engine.release(event.block_ids, Holder.LEASE)
        return driver.engine.stats().ledger.idle and not driver.engine._runs and not driver.engine._waiting

    driver.until(are_over, "all are over", 10.0)
    driver.engine.check_idle()
    assert not [event for event in driver.events if isinstance(event, Failed)]
    for sequence in sequences:
        tokens = driver.said(sequence)
        assert tokens == said(PROMPT[: sequence.num_prompt_tokens], len(tokens))
        was_reported = any(isinstance(event, Admitted) for event in driver.of(sequence))
        assert driver.engine.was_admitted(sequence) == was_reported


def test_nothing_is_reported_after_an_abort(driver: Driver, vllm: ScriptedVllm) -> None:
    with vllm.controls.held("hold-output"):
        sequence = driver.add(PROMPT, 1)
        driver.until(lambda: vllm.controls.is_held("hold-output"), "its token waits")
        driver.engine.abort(sequence.seq_id)
    driver.idle()
    time.sleep(0.05)
    assert [type(event) for event in driver.of(sequence)] == [Admitted]


def test_one_that_waits_is_aborted_and_the_next_one_runs_at_once(driver: Driver, vllm: ScriptedVllm) -> None:
    with vllm.controls.held("hold-decode"):
        first = driver.add(PROMPT[:100], 400)  # 32 of 40 blocks
        driver.until(lambda: vllm.controls.is_held("hold-decode"), "it decodes")
        large = driver.add(PROMPT[1:], 300)
        small = driver.add([7, 8, 9], 2)
        driver.until(lambda: driver.engine.stats().num_waiting == 2, "both wait")
        time.sleep(0.6)  # a look that finds nothing is over
        began_s = time.monotonic()
        driver.engine.abort(large.seq_id)
        driver.until(lambda: not driver.engine.stats().num_waiting, "the small one is passed on")
        assert time.monotonic() - began_s < 0.3, "it did not wait for the next look"
        driver.engine.abort(first.seq_id)
    driver.until(lambda: len(driver.said(small)) == 2, "it is answered")
    assert not driver.of(large)
    driver.idle()


@pytest.mark.parametrize("mode", [Mode.GENERATE, Mode.PREFILL_ONLY])
def test_further_answers_are_aborted_before_and_after_they_begin(driver: Driver, mode: Mode) -> None:
    further = [driver.sequence(PROMPT, 6, SamplingParams(seed=each), mode=mode) for each in (4, 5)]
    driver.engine.abort(further[0].seq_id)  # not known yet
    first = driver.add(PROMPT, 6, mode=mode, further=list(further))
    driver.until(lambda: driver.said(further[1]), "they begin")
    driver.engine.abort(further[1].seq_id)
    number = 6 if mode is Mode.GENERATE else 1
    for sequence in (first, further[0]):
        driver.until(lambda sequence=sequence: len(driver.said(sequence)) == number, "it goes on")
    tokens = [event for event in driver.events if isinstance(event, Token)]
    assert [each.seq_id for each in tokens[:3]] == [first.seq_id, further[0].seq_id, further[1].seq_id]
    admitted = [event for event in driver.events if isinstance(event, Admitted)]
    assert [each.seq_id for each in admitted] == [first.seq_id], "the others' prompt is no news"
    if mode is Mode.PREFILL_ONLY:
        driver.engine.release(admitted[0].block_ids, Holder.LEASE)
    driver.idle()


def test_an_adopted_sequence_goes_on_from_what_was_written(driver: Driver) -> None:
    lease = driver.add(PROMPT[:100], 8, mode=Mode.PREFILL_ONLY)
    driver.until(lambda: driver.said(lease), "its token")
    admitted = driver.of(lease)[0]
    assert isinstance(admitted, Admitted)
    adopted = driver.sequence(PROMPT[:100], 8)
    driver.engine.adopt(adopted, [], admitted.block_ids, driver.said(lease)[0], Holder.LEASE)
    driver.until(lambda: len(driver.said(adopted)) == 7, "it ends")
    assert driver.said(adopted) == said(PROMPT[:100], 8)[1:]
    driver.idle()


def test_who_hands_a_sequence_over_does_not_wait_until_it_is_encoded(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 100 000 tokens takes 10 ms and more, in which the worker's event loop would stand still."""
    threads: set[threading.Thread] = set()
    encode = messages.encode

    def observed(message: messages.JsonMessage) -> bytes:
        threads.add(threading.current_thread())
        return encode(message)

    monkeypatch.setattr(messages, "encode", observed)
    lease = driver.add(PROMPT[:100], 8, mode=Mode.PREFILL_ONLY)
    driver.until(lambda: driver.said(lease), "its token")
    admitted = driver.of(lease)[0]
    assert isinstance(admitted, Admitted)
    adopted = driver.sequence(PROMPT[:100], 200)
    driver.engine.adopt(adopted, [], admitted.block_ids, driver.said(lease)[0], Holder.LEASE)
    driver.until(lambda: driver.said(adopted), "its token")
    driver.engine.abort(adopted.seq_id)
    driver.idle()
    assert threads
    assert threading.current_thread() not in threads


def test_what_can_never_run_fails_and_the_next_one_runs(driver: Driver) -> None:
    failed = driver.add(PROMPT, 4, num_prompt_logprobs=0)
    too_long = driver.add([7] * 512, 4)
    after = driver.add(PROMPT, 4)
    driver.until(lambda: len(driver.said(after)) == 4, "it is answered")
    for sequence, kind, words in (
        (failed, UnsupportedModel, "of prompts"),
        (too_long, InvalidRequest, "must be fewer than 512"),
    ):
        (event,) = driver.of(sequence)
        assert isinstance(event, Failed)
        assert isinstance(event.error, kind)
        assert words in str(event.error)
    driver.idle()


def test_a_failed_load_and_a_preempted_one_are_to_be_replayed(driver: Driver, vllm: ScriptedVllm) -> None:
    driver.add(PROMPT, 1)  # its prefix is loaded then
    driver.idle()
    for control, kind in (("fail-load", StepFailed), ("preempt", SequencePreempted)):
        vllm.controls.set(control)
        sequence = driver.add(PROMPT, 200)
        driver.until(lambda sequence=sequence: driver.is_over(sequence), control)
        event = driver.of(sequence)[-1]
        assert isinstance(event, Failed)
        assert isinstance(event.error, kind)
        tokens = driver.said(sequence)
        assert tokens == said(PROMPT, len(tokens))
        driver.idle()


def test_positions_count_from_the_original_prompt(driver: Driver) -> None:
    """Noise and penalties go by them, so a replay would not go on identically otherwise."""
    whole, sampling = said(PROMPT, 6), SamplingParams(temperature=0.0, num_logprobs=1)
    sequence = driver.add([*PROMPT, *whole[:2]], 6, sampling=sampling, output_base=2)
    driver.until(lambda: driver.is_over(sequence), "what is told of each token has its position")
    tokens = [event for event in driver.of(sequence) if isinstance(event, Token)]
    assert [(each.position, each.token.token_id) for each in tokens] == list(enumerate(whole))[2:]
    driver.idle()


def test_slots_are_freed_when_every_rank_has_said_that_it_is_done(model: Path, tmp_path: Path) -> None:
    two = ScriptedVllm(tmp_path, tensor_parallel_size="2")
    with Driver(two.load(engine_config(model))) as driver:
        with two.controls.held("hold-last-gone"):
            sequence = driver.add(PROMPT, 3)
            driver.until(
                lambda: driver.is_over(sequence) and two.controls.is_held("hold-last-gone"), "one rank is done"
            )
            time.sleep(0.1)  # what it has said is taken in
            assert driver.engine.stats().ledger.active
        driver.idle()


# The engine's life


def test_stop_while_sequences_run_and_wait(model: Path, vllm: ScriptedVllm) -> None:
    with Driver(vllm.load(engine_config(model))) as driver:
        vllm.controls.set("hold-decode")
        running = driver.add(PROMPT[:100], 400)
        driver.until(lambda: vllm.controls.is_held("hold-decode") and driver.said(running), "it decodes")
        driver.add(PROMPT, 300)
        num_events = len(driver.events)
        driver.engine.stop()
        driver.engine.join()
        assert not driver.engine.alive
        assert driver.engine.why_over == ""
        driver.engine.check_idle()
        driver.engine.stop()
        driver.engine.abort(1)
        driver.engine.release([], Holder.LEASE)
        assert len(driver.events) == num_events, "they are dropped without events"
    assert not children_left(0.0)


def test_stop_before_start_and_close(model: Path, vllm: ScriptedVllm) -> None:
    engine = vllm.load(engine_config(model))
    folder = Path(engine._process.folder)
    assert not engine.alive
    engine.stop()
    engine.join()
    engine.close()
    assert not folder.exists()
    assert not children_left(0.0)


def test_a_defect_of_whom_it_reports_to_ends_it(model: Path, vllm: ScriptedVllm) -> None:
    def fail(event: SequenceEvent) -> None:
        raise ZeroDivisionError

    with Driver(vllm.load(engine_config(model))) as driver:
        driver.on_event = fail
        driver.add(PROMPT, 3)
        driver.engine.join()
        assert not driver.engine.alive
        assert "ZeroDivisionError" in driver.engine.why_over
        driver.engine.stop()
        assert not children_left(0.0)


STARTS: dict[str, tuple[str, dict[str, str], str]] = {
    "it is no model": ("broken", {}, "vLLM's engine process .*ValueError: this model is none"),
    "it ends": ("exit", {}, "vLLM has ended; its output says why"),
    "other sizes": ("", {"scripted_head_dim": "7"}, "Baton hands over no other kind"),
}


@pytest.mark.parametrize("case", STARTS)
def test_a_start_that_fails_says_why_and_leaves_nothing(model: Path, tmp_path: Path, case: str) -> None:
    control, arguments, why = STARTS[case]
    vllm = ScriptedVllm(tmp_path, **arguments)
    if control:
        vllm.controls.set(control)
    with pytest.raises(UnsupportedModel, match=why):
        vllm.load(engine_config(model))
    assert not children_left(0.0)


@pytest.fixture
def deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Makes a folder for temporary files in which no socket can be."""
    folder = tmp_path / ("d" * 80)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_a_folder_too_deep_for_sockets_is_not_used(model: Path, vllm: ScriptedVllm, deep: Path) -> None:
    with Driver(vllm.load(engine_config(model))) as driver:
        sequence = driver.add(PROMPT, 3)
        driver.until(lambda: driver.is_over(sequence), "it runs")
        assert driver.said(sequence) == said(PROMPT, 3)
    assert not list(deep.iterdir())


def test_vllm_may_end_between_being_ready_and_being_told_so(model: Path, vllm: ScriptedVllm) -> None:
    engine = vllm.load(engine_config(model))
    engine.stop()
    engine._process.loaded()
    engine.close()


def test_what_cannot_be_run_fails_the_start(model: Path, vllm: ScriptedVllm) -> None:
    vllm.python.chmod(0o644)
    with pytest.raises(UnsupportedModel, match="its output says why"):
        vllm.load(engine_config(model))
    assert not children_left(0.0)
