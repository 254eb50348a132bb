"""Tests the log-probabilities of prompts against transformers' own logits: split and unsplit, in chunks, with the
prompt in the prefix cache, after a replay, and in the forms of both fronts."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from baton.v1 import inference_pb2
from services.engine.schedule.sequence import StepPlan, StepResult
from services.router.front import validation
from tests.support.cluster import Answer, Cluster, greedy_request, running_cluster
from tests.support.fake_runner import RunnerInFront
from tests.support.http_client import HTTP, openai_client
from tests.support.models import VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, MIXED, PREFILL

CLOSE = 2e-3
"""Rounding in float32 of a tiny model; found: 1e-5."""


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}-{seed}").choices(range(3, VOCAB_SIZE), k=length)


class Reference:
    """Computes the log-probabilities with transformers, in float32."""

    def __init__(self, directory: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")

    @torch.inference_mode()
    def check(self, prompt: Sequence[int], found: inference_pb2.PromptLogprobs, num_top: int) -> None:
        wanted = self.model(torch.tensor([list(prompt)])).logits[0, :-1].log_softmax(-1)
        assert found.position == 1
        assert len(found.logprobs) == len(prompt) - 1
        for row, (token_id, entry) in enumerate(zip(prompt[1:], found.logprobs, strict=True)):
            assert entry.logprob == pytest.approx(wanted[row, token_id].item(), abs=CLOSE)
            better = int((wanted[row] > wanted[row, token_id] + CLOSE).sum())
            assert better < entry.rank <= 1 + int((wanted[row] > wanted[row, token_id] - CLOSE).sum())
            values = wanted[row].topk(num_top).values.tolist()
            assert [top.logprob for top in entry.top] == pytest.approx(values, abs=CLOSE)
            for top in entry.top:
                assert top.logprob == pytest.approx(wanted[row, top.token_id].item(), abs=CLOSE)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("scored"))


@pytest.fixture(scope="module")
def reference(model: Path) -> Reference:
    return Reference(model)


async def scored(
    cluster: Cluster, prompt: Sequence[int], num_top: int, max_tokens: int = 3
) -> tuple[inference_pb2.PromptLogprobs, Answer]:
    """Returns what a stream says of the prompt, and the rest of the answer. Asserts the order of the contract."""
    response = inference_pb2.ResponseOptions(prompt_logprobs=num_top)
    whole, answer = inference_pb2.PromptLogprobs(position=1), Answer()
    async for message in cluster.inference.GenerateStream(greedy_request(prompt, max_tokens, response=response)):
        match message.WhichOneof("event"):
            case "prompt_info":
                answer.prompt_info = message.prompt_info
            case "prompt_logprobs":
                assert answer.prompt_info is not None
                assert not answer.token_ids
                assert message.prompt_logprobs.position == 1 + len(whole.logprobs)
                whole.logprobs.extend(message.prompt_logprobs.logprobs)
            case "chunk":
                answer.token_ids += message.chunk.token_ids
            case "completion":
                answer.completion = message.completion
    return whole, answer


@pytest.mark.parametrize("roles", [[PREFILL, DECODE], [MIXED]], ids=["split", "unsplit"])
async def test_scores_are_transformers_own(model: Path, reference: Reference, roles: Any) -> None:
    async with running_cluster(model, roles, max_num_batched_tokens=32, kv_blocks=200) as cluster:
        prompts = [prompt_of(length) for length in (1, 2, 16, 17, 33, 100, 300)]
        plain = [await cluster.greedy(prompt, 3) for prompt in prompts]  # they are all in the prefix cache now
        answers = await asyncio.gather(*(scored(cluster, prompt, 3) for prompt in prompts))
        for prompt, (found, answer), without in zip(prompts, answers, plain, strict=True):
            reference.check(prompt, found, 3)
            assert answer.prompt_info is not None
            assert answer.prompt_info.cached_tokens == 0
            assert answer.token_ids == without.token_ids
        again = await cluster.greedy(prompts[-1], 3)
        assert again.prompt_info is not None
        assert again.prompt_info.cached_tokens > 0, "its own blocks serve others"


async def test_penalties_do_not_change_them_and_one_message_has_them_all(model: Path, reference: Reference) -> None:
    async with running_cluster(model, [PREFILL, DECODE], kv_blocks=200) as cluster:
        prompt = prompt_of(90)
        request = greedy_request(prompt, 2, response=inference_pb2.ResponseOptions(prompt_logprobs=20, logprobs=1))
        request.sampling.repetition_penalty, request.sampling.temperature = 2.0, 0.7
        request.sampling.logit_bias.add(token_id=5, bias=50.0)
        answer = await cluster.inference.Generate(request)
        reference.check(prompt, answer.prompt_logprobs, 20)
        assert len(answer.output.logprobs) == len(answer.output.token_ids) == 2


async def test_more_than_an_answer_may_have_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(validation, "MOST_PROMPT_ENTRIES", 100)
    async with running_cluster(model, [MIXED], kv_blocks=200) as cluster:
        for length, num_top in ((5, 21), (5, -1), (26, 3)):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await scored(cluster, prompt_of(length), num_top)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert "prompt_logprobs" in (refused.value.details() or "")
        found, _ = await scored(cluster, prompt_of(25), 3)
        assert len(found.logprobs) == 24


class LosesItsWorker(RunnerInFront):
    """Fails the step that would score beyond a place in the prompt, once."""

    def __init__(self, host: Any, beyond: int) -> None:
        super().__init__(host)
        self.beyond: int | None = beyond

    def run(self, plan: StepPlan) -> StepResult:
        for part in plan.sequences:
            if self.beyond is not None and part.scoring is not None and part.scoring.position > self.beyond:
                self.beyond = None
                raise RuntimeError("injected")
        return super().run(plan)


async def test_a_replay_sends_the_rest(model: Path, reference: Reference) -> None:
    async with running_cluster(model, [PREFILL, PREFILL, DECODE], max_num_batched_tokens=32, kv_blocks=200) as cluster:
        fronts = [LosesItsWorker(worker, 60) for worker in cluster.workers[:2]]
        fronts[1].beyond = None
        for seed in range(3):  # the faulty worker is among those that are chosen
            prompt = prompt_of(200, seed)
            found, answer = await scored(cluster, prompt, 1)
            reference.check(prompt, found, 1)
            assert len(answer.token_ids) == 3
            assert answer.completion is not None
            if answer.completion.workers.retries:
                return
        pytest.fail("no prompt was replayed")


async def test_http_writes_them_as_openai_and_vllm_do(model: Path, reference: Reference) -> None:
    async with running_cluster(model, [PREFILL, DECODE], router=HTTP, kv_blocks=200) as cluster:
        ids = prompt_of(40)
        found, _ = await scored(cluster, ids, 2, max_tokens=4)
        async with openai_client(cluster) as client:
            asked: dict[str, Any] = {
                "model": "tiny-llama",
                "prompt": ids,
                "temperature": 0.0,
                "logprobs": 2,
                "echo": True,
            }
            fields = {"ignore_eos": True, "prompt_logprobs": 1}
            whole = await client.completions.create(**asked, max_tokens=4, extra_body=fields)
            choice: Any = whole.choices[0]
            lists = choice.logprobs
            assert lists.token_logprobs[0] is None
            assert lists.top_logprobs[0] is None
            assert len(lists.tokens) == len(lists.token_logprobs) == len(lists.text_offset) == 44
            wanted = [entry.logprob for entry in found.logprobs]
            assert lists.token_logprobs[1:40] == pytest.approx(wanted, abs=1e-4)
            assert [len(top) for top in lists.top_logprobs[1:]] >= [1] * 43
            assert lists.text_offset == sorted(lists.text_offset)
            assert all(0 <= place <= len(choice.text) for place in lists.text_offset)
            assert whole.usage is not None
            assert whole.usage.completion_tokens == 4

            entries = choice.prompt_logprobs
            assert entries[0] is None
            for token_id, entry, ours in zip(ids[1:], entries[1:], found.logprobs, strict=True):
                assert next(iter(entry)) == str(token_id)
                own = entry[str(token_id)]
                assert own["logprob"] == pytest.approx(ours.logprob, abs=1e-4)
                assert own["rank"] == ours.rank
                assert set(entry) == {str(token_id), str(ours.top[0].token_id)}

            only = await client.completions.create(**asked, max_tokens=0)
            assert only.choices[0].logprobs is not None
            assert only.choices[0].logprobs.tokens == lists.tokens[:40]
            # Bytes at its end that are no character may be one with the output's.
            assert choice.text.startswith(only.choices[0].text.rstrip("\ufffd"))
            assert only.choices[0].finish_reason == "length"
            assert only.usage is not None
            assert (only.usage.prompt_tokens, only.usage.completion_tokens) == (40, 0)

            chat: Any = await client.chat.completions.create(
                model="tiny-llama",
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=2,
                extra_body={"prompt_logprobs": 0},
            )
            assert chat.prompt_logprobs[0] is None
            assert len(chat.prompt_logprobs) == chat.usage.prompt_tokens
            assert all(len(entry) == 1 for entry in chat.prompt_logprobs[1:])
