"""Models in 8 and 4 bits: whole generations are those of transformers over the same rounded weights and inputs.

The reference computes in torch, with the weights dequantised and each linear layer's inputs rounded as the kernels do
it. A difference in the last bit of an input may take it to the next of its 255 values, so near-ties are wider than in
float32; they are counted.
"""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest

from services.core.errors import ConfigError
from services.engine.cpu import quantised_linear
from services.engine.cpu.quantisation import quantise
from tests.support.cluster import running_cluster, split_and_whole
from tests.support.engine_driver import drive
from tests.support.equality import GreedyReference
from tests.support.examples import combinations
from tests.support.models import FAMILIES, VOCAB_SIZE, tiny_model
from tests.support.workers import DECODE, PREFILL

LENGTHS = (1, 15, 16, 17, 40, 63, 64, 65, 130)
MAX_TOKENS = 24
GAP_BOUND = 0.5
"""Logits. The largest gap observed is 0.11; rounding the inputs moves these logits by 0.16 on average, at most 1.6."""
SCHEMES = ("int8", "int4")


def prompts() -> list[list[int]]:
    return [random.Random(f"quantised {length}").choices(range(3, VOCAB_SIZE), k=length) for length in LENGTHS]


def reference_of(model: Path, scheme: str) -> GreedyReference:
    reference = GreedyReference(model, GAP_BOUND)
    with mock.patch.object(quantised_linear, "kernels", return_value=None):
        quantise(reference.model, scheme, model)
    return reference


def check_near_ties(reference: GreedyReference) -> None:
    print(f"equal tokens {reference.num_compared}, outputs that ended at a near-tie {reference.num_near_ties}")
    assert reference.num_near_ties * 40 <= reference.num_compared


@pytest.mark.parametrize(("family", "scheme"), combinations(FAMILIES, SCHEMES))
def test_generations_are_those_of_the_plain_path(family: str, scheme: str, tmp_path: Path) -> None:
    model = tiny_model(family, tmp_path)
    reference = reference_of(model, scheme)
    with drive(model, quantization=scheme, max_num_batched_tokens=48) as driver:
        together = driver.generate(prompts(), MAX_TOKENS)
        alone = [driver.generate([prompt], MAX_TOKENS)[0] for prompt in prompts()[::4]]
    for prompt, found in zip(prompts() + prompts()[::4], together + alone, strict=True):
        reference.check(prompt, found)
    check_near_ties(reference)


@pytest.mark.parametrize(("scheme", "transport"), combinations(SCHEMES, ["shm", "grpc"]))
async def test_split_equals_unsplit(scheme: str, transport: str, tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    reference = reference_of(model, scheme)
    split = {"transport": transport}
    pairs = await split_and_whole(model, prompts(), MAX_TOKENS, split=split, quantization=scheme)
    for prompt, (one, other) in zip(prompts(), pairs, strict=True):
        reference.check(prompt, one.token_ids)
        reference.check(prompt, one.token_ids, other.token_ids)
    check_near_ties(reference)


async def test_workers_of_different_schemes_do_not_pair(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    each = [{"quantization": scheme} for scheme in ("none", "int8", "int4")]
    async with running_cluster(model, [PREFILL, DECODE, DECODE], each=each) as cluster:
        status = await cluster.status()
        assert not status.pairs
        prints = [worker.worker.fingerprint for worker in status.workers]
        assert len({each.kv for each in prints}) == len({each.numerics for each in prints}) == 3


def test_without_kernels_torch_computes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_model("llama", tmp_path)
    with drive(model, quantization="int4") as driver:
        expected = driver.engine.info
    for module in ("services.engine.cpu.quantised_linear", "services.engine.cpu.quantisation"):
        monkeypatch.setattr(f"{module}.kernels", lambda: None)
    reference = reference_of(model, "int4")
    with drive(model, quantization="int4") as driver:
        assert driver.engine.info == expected, "it is the same that is computed"
        for prompt, found in zip(prompts(), driver.generate(prompts(), MAX_TOKENS), strict=True):
            reference.check(prompt, found)
    assert "without the CPU kernels, which were not built, int4 is slower than none" in caplog.text


def test_quantization_is_for_cpus(tmp_path: Path) -> None:
    elsewhere = GreedyReference(tiny_model("llama", tmp_path)).model.to("meta")
    with pytest.raises(ConfigError, match="--quantization: int8 works on a CPU only, and the device is meta"):
        quantise(elsewhere, "int8", tmp_path)
    assert quantise(elsewhere, "auto", tmp_path) == quantise(elsewhere, "none", tmp_path) == ""
