"""GPTQ and AWQ checkpoints are served: dequantised token for token, and as they are like torch computes it.

The reference of the latter has the same weights and rounds inputs as the kernels do it, in torch; see
`test_quantised` for its near-ties.
"""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import pytest
import torch

from services.core.errors import ConfigError
from services.engine.config import EngineConfig, EngineInfo
from services.engine.cpu import quantisation, quantised_linear
from services.engine.cpu.quantisation import quantise
from services.engine.cpu.quantised_linear import QuantisedLinear
from services.engine.loading import load
from services.engine.model.weights import load_model
from tests.support.checkpoints import Form, write_checkpoint
from tests.support.cluster import split_and_whole
from tests.support.engine_driver import drive
from tests.support.equality import GreedyReference
from tests.support.examples import combinations
from tests.support.models import VOCAB_SIZE, tiny_model

MAX_TOKENS = 24
GAP_BOUND = 0.5
"""Logits, as in `test_quantised`."""
FORMS = {
    "symmetric": Form(sym=True, group_size=64),
    "act order": Form(desc_act=True),
    "8 bits": Form(bits=8, version="gptq_v2"),
    "awq": Form("awq", group_size=-1),
}
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "phi3")


def prompts() -> list[list[int]]:
    return [random.Random(f"saved {length}").choices(range(3, VOCAB_SIZE), k=length) for length in (1, 16, 17, 64, 130)]


def reference_of(saved: Path, plain: Path, method: str) -> GreedyReference:
    reference = GreedyReference(plain, GAP_BOUND)
    with mock.patch.object(quantised_linear, "kernels", return_value=None):
        reference.model = load_model(saved, "float32", torch.device("cpu"), "eager")
        quantise(reference.model, method, saved)
    assert any(isinstance(each, QuantisedLinear) for each in reference.model.modules())
    return reference


@pytest.mark.parametrize(("family", "form"), combinations(FAMILIES, tuple(FORMS)))
def test_generations(family: str, form: str, tmp_path: Path) -> None:
    saved, plain = write_checkpoint(tiny_model(family, tmp_path), FORMS[form], shards=2)
    exact = GreedyReference(plain)
    with drive(saved, max_num_batched_tokens=48) as driver:
        assert driver.engine.info.numerics == "float32 weights, float32 activations"
        for prompt, found in zip(prompts(), driver.generate(prompts(), MAX_TOKENS), strict=True):
            exact.check(prompt, found)
    assert exact.num_near_ties <= 1
    method = FORMS[form].method
    reference = reference_of(saved, plain, method)
    with drive(saved, quantization=method, max_num_batched_tokens=48) as driver:
        assert driver.engine.info.numerics.startswith(f"{method.upper()} {FORMS[form].bits}-bit (")
        for prompt, found in zip(prompts(), driver.generate(prompts(), MAX_TOKENS), strict=True):
            reference.check(prompt, found)
    assert reference.num_near_ties * 20 <= reference.num_compared


@pytest.mark.parametrize("form", ["act order", "awq"])
async def test_split_equals_unsplit(form: str, tmp_path: Path) -> None:
    saved, plain = write_checkpoint(tiny_model("llama", tmp_path), FORMS[form])
    method = FORMS[form].method
    reference = reference_of(saved, plain, method)
    pairs = await split_and_whole(saved, prompts(), MAX_TOKENS, quantization=method)
    for prompt, (one, other) in zip(prompts(), pairs, strict=True):
        reference.check(prompt, one.token_ids)
        reference.check(prompt, one.token_ids, other.token_ids)
    assert reference.num_near_ties * 20 <= reference.num_compared


def info_of(model: Path, **flags: str) -> EngineInfo:
    loaded = load(EngineConfig(str(model), "m", num_blocks=8, **flags))  # type: ignore[arg-type]
    loaded.cache.close()
    return loaded.info


def test_fingerprints_tell_schemes_and_weights_apart(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    saved, _ = write_checkpoint(model, Form())
    found = [info_of(saved, quantization=scheme) for scheme in ("none", "gptq", "int8", "int4")]
    assert len({each.weights_digest for each in found}) == len({each.numerics for each in found}) == 4
    other, _ = write_checkpoint(tiny_model("llama", tmp_path / "other", seed=1), Form())
    newer, _ = write_checkpoint(model, Form(version="gptq_v2"))
    again = {info_of(each, quantization="gptq").weights_digest for each in (saved, other, newer)}
    assert len(again) == 3
    assert info_of(saved, quantization="auto").numerics == found[0].numerics
    with pytest.raises(ConfigError, match="has no weights of AWQ; give none, int8 or int4"):
        info_of(saved, quantization="awq")
    with pytest.raises(ConfigError, match="has no weights of GPTQ"):
        info_of(model, quantization="gptq")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_of_16_bits(dtype: str, tmp_path: Path) -> None:
    """Each checks itself against the plain path as it is loaded."""
    saved, _ = write_checkpoint(tiny_model("llama", tmp_path, torch.float16), Form("awq"))
    assert info_of(saved, dtype=dtype, quantization="awq").dtype == dtype
    assert info_of(saved, dtype=dtype).numerics == f"{dtype} weights, {dtype} activations"
    assert info_of(saved).dtype == "float16"


def test_layers_that_cannot_be_kept_are_dequantised(tmp_path: Path) -> None:
    """Each set of 32 inputs has to lie within a group, and groups of 16 are smaller."""
    saved, plain = write_checkpoint(tiny_model("llama", tmp_path), Form(group_size=16))
    reference = GreedyReference(plain)
    with drive(saved, quantization="gptq") as driver:
        for prompt, found in zip(prompts(), driver.generate(prompts(), MAX_TOKENS), strict=True):
            reference.check(prompt, found)


def test_some_layers_may_be_plain_and_others_have_biases(tmp_path: Path) -> None:
    saved, plain = write_checkpoint(
        tiny_model("qwen2", tmp_path), Form("awq"), keep_plain=lambda name: "lm_head" in name or "layers.1" in name
    )
    model = load_model(saved, "float32", torch.device("cpu"), "eager")
    quantise(model, "awq", saved)
    kinds = {name: type(each) for name, each in model.named_modules() if name.endswith(("q_proj", "lm_head"))}
    assert sorted(name for name, kind in kinds.items() if kind is torch.nn.Linear) == [
        "lm_head",
        "model.layers.1.self_attn.q_proj",
    ]
    weights = GreedyReference(plain).model.state_dict()
    name = "model.layers.0.self_attn.q_proj"
    assert torch.equal(model.get_submodule(name).bias, weights[f"{name}.bias"])
    assert "quantization_config" not in model.config.to_dict()


def test_without_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    saved, plain = write_checkpoint(tiny_model("llama", tmp_path), Form(desc_act=True))
    expected = info_of(saved, quantization="gptq")
    reference = reference_of(saved, plain, "gptq")
    for module in (quantised_linear, quantisation):
        monkeypatch.setattr(module, "kernels", lambda: None)
    with drive(saved, quantization="gptq", num_blocks=8) as driver:
        assert driver.engine.info.numerics == expected.numerics
        assert driver.engine.info.weights_digest == expected.weights_digest
        (found,) = driver.generate(prompts()[2:3], MAX_TOKENS)
    reference.check(prompts()[2], found)
    assert "without the CPU kernels, which were not built, gptq is slower than none" in caplog.text
