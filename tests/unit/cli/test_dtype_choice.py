"""Tests what `--dtype auto` and `--quantization auto` mean: a rule by the model's files and this CPU's instructions."""

from __future__ import annotations

import json
import pathlib
import struct

import pytest

from services.cli.dtype_choice import Choice, choose_dtype, kept_weights, saved_dtype
from services.core.config import KEPT_BLOCKS_FILE, KEPT_WEIGHTS
from services.core.errors import ConfigError
from services.engine.native import instruction_sets
from services.engine.native.instruction_sets import InstructionSet

NAMES = [each.name for each in instruction_sets.instruction_sets("x86_64")]


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_model(tmp_path / "model", {"dtype": "bfloat16", "hidden_size": 8})


@pytest.fixture
def cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    """Has this process run on a CPU whose best instruction set is the parameter, with kernels built for it."""
    name, without_kernels, _ = request.param.partition(" without kernels")
    library = tmp_path / f"kernels-{name}.so"
    if not without_kernels:
        library.touch()
    monkeypatch.setattr(InstructionSet, "shared_object", library)
    best = tuple(each for each in instruction_sets.instruction_sets("x86_64") if each.name == name)
    monkeypatch.setattr(instruction_sets, "usable", lambda: best)
    monkeypatch.setattr(instruction_sets, "multiplies_bfloat16", lambda: name == "avx512_bf16")


def write_model(path: pathlib.Path, config: dict[str, object]) -> pathlib.Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("saved", ["bfloat16", "float16"])
@pytest.mark.parametrize("cpu", NAMES, indirect=True)
def test_as_saved_where_this_cpu_multiplies_it(
    cpu: None, saved: str, tmp_path: pathlib.Path, request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.params["cpu"]
    choice = choose_dtype("auto", "cpu", write_model(tmp_path / "model", {"dtype": saved}))
    assert choice.dtype == (saved if (name, saved) == ("avx512_bf16", "bfloat16") else "float32")
    assert name in choice.reason
    assert saved in choice.reason or "as saved" in choice.reason


@pytest.mark.parametrize(
    ("dtype", "quantization", "expected"),
    [
        ("auto", "auto", ("bfloat16", "gguf")),
        ("auto", "int8", ("bfloat16", "int8")),
        ("auto", "gguf", ("bfloat16", "gguf")),
        ("float32", "auto", ("float32", "none")),  # an explicit type is exact
        ("bfloat16", "gguf", ("bfloat16", "gguf")),
    ],
)
@pytest.mark.parametrize("cpu", ["avx512_bf16", "avx2"], indirect=True)
def test_weights_of_a_gguf_file(
    cpu: None, model: pathlib.Path, dtype: str, quantization: str, expected: tuple[str, str]
) -> None:
    (model / KEPT_BLOCKS_FILE).write_bytes(b"")
    choice = choose_dtype(dtype, "cpu", model, quantization)
    assert (choice.dtype, choice.quantization) == expected


@pytest.mark.parametrize("cpu", ["avx2 without kernels"], indirect=True)
def test_without_kernels_weights_of_few_bits_are_not_kept(cpu: None, model: pathlib.Path) -> None:
    (model / KEPT_BLOCKS_FILE).write_bytes(b"")
    assert choose_dtype("auto", "cpu", model).quantization == "none"
    assert choose_dtype("auto", "cpu", model).dtype == "float32"
    assert choose_dtype("auto", "cpu", model, "gguf").quantization == "gguf", "asked for"


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("cpu", ["avx2"], indirect=True)
def test_weights_of_a_quantised_checkpoint(cpu: None, tmp_path: pathlib.Path, method: str) -> None:
    fields = {"dtype": "float16", "quantization_config": {"quant_method": method, "bits": 4}}
    model = write_model(tmp_path / "model", fields)
    choice = choose_dtype("auto", "cpu", model)
    assert (choice.dtype, choice.quantization) == ("float32", method)
    assert choice.reason == f"faster on this avx2 CPU than float16 as saved; over the {method.upper()} weights"
    assert choose_dtype("bfloat16", "cpu", model) == Choice("bfloat16", "")


@pytest.mark.parametrize("fields", [None, [], {"quant_method": "fp8"}, {"quant_method": ["gptq"]}, "gptq"])
def test_other_checkpoints_have_nothing_to_keep(tmp_path: pathlib.Path, fields: object) -> None:
    assert kept_weights(write_model(tmp_path / "model", {"quantization_config": fields})) == ""
    assert kept_weights(tmp_path / "nothing") == ""


@pytest.mark.parametrize(
    ("dtype", "device", "saved"),
    [
        ("bfloat16", "cpu", "bfloat16"),
        ("float16", "cpu", "bfloat16"),
        ("auto", "cuda", "bfloat16"),
        ("auto", "cuda:1", "bfloat16"),
        ("auto", "cpu", "float32"),
        ("auto", "cpu", "float8_e4m3fn"),
        ("auto", "cpu", None),
    ],
)
def test_nothing_to_choose_is_left_as_it_is(tmp_path: pathlib.Path, dtype: str, device: str, saved: str | None) -> None:
    model = write_model(tmp_path / "model", {} if saved is None else {"torch_dtype": saved})
    assert choose_dtype(dtype, device, model) == Choice(dtype, "")


def test_saved_types_are_found_wherever_they_stand(tmp_path: pathlib.Path) -> None:
    assert saved_dtype(write_model(tmp_path / "a", {"dtype": "float16"})) == "float16"
    assert saved_dtype(write_model(tmp_path / "b", {"torch_dtype": "torch.bfloat16"})) == "bfloat16"
    assert saved_dtype(write_model(tmp_path / "c", {"text_config": {"dtype": "bfloat16"}})) == "bfloat16"
    silent = write_model(tmp_path / "d", {"dtype": None})
    header = json.dumps({"__metadata__": {}, "ids": {"dtype": "I64"}, "weight": {"dtype": "BF16"}}).encode()
    (silent / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header)
    assert saved_dtype(silent) == "bfloat16"
    (silent / "model.safetensors").write_bytes(b"\xff" * 20)
    assert saved_dtype(silent) == ""
    (silent / "config.json").write_text("[")
    assert saved_dtype(silent) == ""


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_limit_of_instructions_that_makes_no_sense(
    dtype: str, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATON_CPU_ISA", "avx10")
    with pytest.raises(ConfigError, match="BATON_CPU_ISA: 'avx10' is not one of"):
        choose_dtype(dtype, "cpu", model)


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("quantization", KEPT_WEIGHTS)
def test_weights_that_the_model_does_not_have_are_refused(model: pathlib.Path, quantization: str, dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantization: .* has no {quantization} weights; give auto, none, int8"):
        choose_dtype(dtype, "cpu", model, quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4", *KEPT_WEIGHTS])
def test_quantised_weights_are_refused_for_an_accelerator_at_once(model: pathlib.Path, quantization: str) -> None:
    with pytest.raises(ConfigError, match="works only on a CPU; give none or auto for --device cuda:1"):
        choose_dtype("auto", "cuda:1", model, quantization)
