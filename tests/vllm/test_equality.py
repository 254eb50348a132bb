"""Tests that an answer in two legs is the one of vLLM alone, token for token, whatever its parameters.

Legs have salts of their own where no cache is to help: the prompt's leg then computes, and the other one gets all KV.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.engine.schedule.sequence import Finish, Mode, Progress, SamplingParams
from services.kv.pool import Holder
from tests.support.equality import GreedyReference
from tests.support.patience import HANG_S, Patience
from tests.support.vllm_driver import BLOCK, CHUNK, VllmDriver, config_of, load

pytestmark = [pytest.mark.timeout(600), pytest.mark.default_model]

MAX_TOKENS = 10
LENGTHS = (1, BLOCK - 1, BLOCK, BLOCK + 1, 701)
PARAMETERS = {
    "greedy": SamplingParams(temperature=0.0),
    "temperature": SamplingParams(temperature=1.7, seed=1),
    "top_k": SamplingParams(temperature=1.3, top_k=20, seed=2),
    "top_p": SamplingParams(temperature=1.3, top_p=0.8, seed=3),
    "min_p": SamplingParams(temperature=1.3, min_p=0.05, seed=4),
    "repetition_penalty": SamplingParams(temperature=0.7, repetition_penalty=1.4, seed=5),
    "presence_penalty": SamplingParams(temperature=0.0, presence_penalty=1.5),
    "frequency_penalty": SamplingParams(temperature=0.0, frequency_penalty=1.5),
    "logit_bias": SamplingParams(temperature=1.0, logit_bias={500: 11.0, 900: 12.0}, seed=6),
    "all": SamplingParams(
        0.9, 0.9, 50, 0.01, 1.1, 0.3, 0.2, logit_bias={700: 6.0}, seed=-(1 << 62) - 7, num_logprobs=3
    ),
}


def prompt_of(length: int, number: int = 0) -> list[int]:
    return [(at * 37 + number * 101) % 9000 + 100 for at in range(length)]


@pytest.fixture(scope="module")
def driver(smol: Path) -> Iterator[VllmDriver]:
    with VllmDriver(load(config_of(smol))) as driver:
        yield driver


@pytest.fixture(autouse=True)
def leaves_nothing(driver: VllmDriver) -> Iterator[None]:
    yield
    driver.idle()


@pytest.fixture(scope="module")
def reference(smol: Path) -> GreedyReference:
    return GreedyReference(smol)


@pytest.mark.parametrize("length", LENGTHS)
def test_prompts_of_every_length(driver: VllmDriver, reference: GreedyReference, length: int) -> None:
    prompt = prompt_of(length, length)
    first, rest = driver.split(prompt, MAX_TOKENS, salt=f"prefill {length}", decode_salt=f"decode {length}")
    assert rest.error is None
    answer = first.token_ids + rest.token_ids
    assert len(answer) == MAX_TOKENS
    assert rest.finish is Finish.LENGTH
    assert answer == driver.whole(prompt, MAX_TOKENS, cache_salt=f"whole {length}")
    reference.check_at_once(prompt, answer)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter(driver: VllmDriver, name: str) -> None:
    prompt, sampling = prompt_of(BLOCK + 7), PARAMETERS[name]
    first, rest = driver.split(prompt, MAX_TOKENS, sampling, salt=f"prefill {name}", decode_salt=f"decode {name}")
    [whole] = driver.wait(driver.submit(prompt, MAX_TOKENS, sampling, cache_salt=f"whole {name}"))
    assert first.token_ids + rest.token_ids == whole.token_ids
    for found, expected in zip(first.tokens + rest.tokens, whole.tokens, strict=True):
        assert (found.logprob is None) == (sampling.num_logprobs is None)
        assert found.logprob == pytest.approx(expected.logprob, abs=1e-3)
        assert len(found.top) == (sampling.num_logprobs or 0)


@pytest.mark.parametrize("name", ["temperature", "repetition_penalty", "frequency_penalty", "all"])
@pytest.mark.parametrize("num_received", [1, 4, MAX_TOKENS - 1])
def test_a_replay_goes_on_identically(driver: VllmDriver, name: str, num_received: int) -> None:
    prompt, sampling = prompt_of(BLOCK + 7), PARAMETERS[name]
    whole = driver.whole(prompt, MAX_TOKENS, sampling, cache_salt=f"whole {name}")
    again = [*prompt, *whole[:num_received]]
    salt = f"replay {name} {num_received}"
    assert driver.whole(again, MAX_TOKENS, sampling, output_base=num_received, cache_salt=salt) == whole[num_received:]
    if num_received < MAX_TOKENS - 1:
        first, rest = driver.split(
            again, MAX_TOKENS, sampling, output_base=num_received, salt=f"{salt} 1", decode_salt=f"{salt} 2"
        )
        assert first.token_ids + rest.token_ids == whole[num_received:]


def test_it_samples_as_the_reference_does(driver: VllmDriver, reference: GreedyReference) -> None:
    """A seed gives the tokens of Baton's own noise over transformers' logits."""
    for seed in (11, 12, 13):
        prompt = prompt_of(40, seed)
        first, rest = driver.split(prompt, MAX_TOKENS, SamplingParams(temperature=1.0, seed=seed))
        reference.check_at_once(prompt, first.token_ids + rest.token_ids, seed=seed)


def test_prefixes_are_used_on_both_sides(driver: VllmDriver, reference: GreedyReference) -> None:
    shared = prompt_of(4 * BLOCK + 5, 3)
    driver.whole(shared, 2)
    hit = driver.vllm.stats().prefix_tokens_hit
    for number in range(3):
        prompt = [*shared, *prompt_of(BLOCK, 50 + number)]
        first, rest = driver.split(prompt, MAX_TOKENS)
        reference.check_at_once(prompt, first.token_ids + rest.token_ids)
    driver.whole([*shared, 1, 2], 1)  # a step, with which vLLM tells of the one before
    assert driver.vllm.stats().prefix_tokens_hit > hit


def test_a_prompt_in_chunks_is_handed_over_as_it_is_computed(driver: VllmDriver) -> None:
    first_id = driver.submit(prompt_of(701, 9), 1, mode=Mode.PREFILL_ONLY, cache_salt="chunks")
    [first] = driver.wait(first_id)
    events = [each for report in driver.reports for each in report.events if each.seq_id == first_id]
    progress = [each.num_computed for each in events if isinstance(each, Progress)]
    assert progress == [CHUNK // BLOCK * BLOCK, 2 * CHUNK // BLOCK * BLOCK, 701]
    driver.engine.release(first.block_ids, Holder.LEASE)


def test_kv_that_is_loaded_beside_the_steps_of_others_is_whole_before_it_is_used(
    driver: VllmDriver, reference: GreedyReference
) -> None:
    """Such a load takes several steps: some blocks are there long before the others."""
    other = driver.submit(prompt_of(40, 77), 1500)
    patience = Patience(HANG_S)
    while not driver.outputs[other].tokens:
        assert not patience.is_over(), "it gives no token"
        time.sleep(0.01)
    for number in range(2):
        prompt = prompt_of(701, 60 + number)
        first, rest = driver.split(prompt, MAX_TOKENS, salt=f"prefill {number}", decode_salt=f"decode {number}")
        assert rest.error is None
        reference.check_at_once(prompt, first.token_ids + rest.token_ids)
    assert len(driver.outputs[other].tokens) < 1500, "it still computed"
    driver.engine.abort(other)


def test_several_answers_of_one_prompt(driver: VllmDriver) -> None:
    prompt = prompt_of(BLOCK + 3, 5)
    samplings = [SamplingParams(temperature=1.0, seed=seed, num_logprobs=1) for seed in (1, 2, 3)]
    outputs = driver.wait(*driver.submit_several(prompt, MAX_TOKENS, samplings))
    alone = [driver.whole(prompt, MAX_TOKENS, each, cache_salt=f"{each.seed}") for each in samplings]
    assert [output.token_ids for output in outputs] == alone
    assert len({tuple(answer) for answer in alone}) == 3


def test_stop_tokens_and_min_tokens(driver: VllmDriver) -> None:
    prompt = prompt_of(BLOCK + 3, 6)
    free = driver.whole(prompt, MAX_TOKENS)
    stop = frozenset({free[3]})
    at = free.index(free[3])
    [output] = driver.wait(driver.submit(prompt, MAX_TOKENS, stop_token_ids=stop))
    assert output.finish is Finish.STOP
    assert output.token_ids == free[: at + 1]
    first, rest = driver.split(prompt, MAX_TOKENS, stop_token_ids=stop)
    assert first.token_ids + rest.token_ids == output.token_ids
    assert rest.finish is Finish.STOP
    [longer] = driver.wait(driver.submit(prompt, MAX_TOKENS, stop_token_ids=stop, min_tokens=MAX_TOKENS - 1))
    assert free[3] not in longer.token_ids[: MAX_TOKENS - 1]
    assert len(longer.token_ids) >= MAX_TOKENS - 1
    first, rest = driver.split(prompt, MAX_TOKENS, stop_token_ids=stop, min_tokens=MAX_TOKENS - 1)
    assert first.token_ids + rest.token_ids == longer.token_ids
