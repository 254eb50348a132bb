"""Tests what `--dtype auto` means: chosen by a timing, once per host and model, whatever becomes
of the file with it."""

from __future__ import annotations

import json
import logging
import pathlib
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest

from services.cli import dtype_choice
from services.cli.dtype_choice import (
    MIN_SPEEDUP,
    Choice,
    TimingFailed,
    Timings,
    choose_dtype,
    decide,
    kept_weights,
    saved_dtype,
)
from services.core.config import KEPT_BLOCKS_FILE, KEPT_WEIGHTS
from services.core.errors import ConfigError

EMULATED = Timings({"bfloat16": (46.0, 45.0), "float32": (4.0, 57.0)}, "AVX2")
NATIVE = Timings({"bfloat16": (0.9, 38.0), "float32": (2.9, 62.0)}, "AVX512")


class Clockwork:
    """Gives the timings it has, and counts how often it is asked."""

    def __init__(self, timings: Timings | None = EMULATED) -> None:
        self.timings = timings
        self.num_calls = 0

    def __call__(self, model: pathlib.Path, saved: str, ways: Sequence[str], kv_dtype: str) -> Timings:
        self.num_calls += 1
        self.ways, self.kv_dtype = ways, kv_dtype
        if self.timings is None:
            raise TimingFailed("no layer fits")
        return self.timings


@pytest.fixture
def model(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_model(tmp_path / "model", {"dtype": "bfloat16", "hidden_size": 8})


def write_model(path: pathlib.Path, config: dict[str, object]) -> pathlib.Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize(
    ("timings", "dtype"),
    [
        (EMULATED, "float32"),
        (NATIVE, "bfloat16"),
        # A prompt's tokens count eight times as often as the answer's.
        (Timings({"bfloat16": (2.0, 40.0), "float32": (1.0, 46.0)}, "x"), "bfloat16"),
        (Timings({"bfloat16": (4.0, 40.0), "float32": (2.0, 46.0)}, "x"), "float32"),
        # Twice the memory must be worth it.
        (Timings({"bfloat16": (MIN_SPEEDUP * 0.99, 0.0), "float32": (1.0, 0.0)}, "x"), "bfloat16"),
        (Timings({"bfloat16": (MIN_SPEEDUP * 1.01, 0.0), "float32": (1.0, 0.0)}, "x"), "float32"),
    ],
)
def test_the_faster_type_for_a_usual_request(timings: Timings, dtype: str) -> None:
    choice = decide("bfloat16", timings)
    assert choice.dtype == dtype
    assert timings.capability in choice.reason
    assert "\n" not in choice.reason


@pytest.mark.parametrize(
    ("float32", "packed", "packed_float32", "expected"),
    [
        (2.0, 0.8, 2.0, ("bfloat16", "gguf")),
        (2.0, 0.95, 2.0, ("bfloat16", "none")),  # not worth what rounding the inputs costs
        (0.5, 0.6, 0.4, ("float32", "gguf")),
        (0.5, 0.4, 0.39, ("bfloat16", "gguf")),
        (0.5, 0.5, 0.48, ("float32", "none")),
    ],
)
def test_the_weights_of_a_gguf_file_if_they_are_clearly_faster(
    float32: float, packed: float, packed_float32: float, expected: tuple[str, str]
) -> None:
    seconds = {"bfloat16": 1.0, "float32": float32, "bfloat16+gguf": packed, "float32+gguf": packed_float32}
    choice = decide("bfloat16", Timings({name: (each, each) for name, each in seconds.items()}, "x"))
    assert (choice.dtype, choice.quantization) == expected
    alone = decide("bfloat16", Timings({name: (each, each) for name, each in seconds.items() if "+" in name}, "x"))
    assert alone.quantization == "gguf", "there was no other way"


def test_each_type_of_the_kv_cache_has_its_own_timing(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    """Attention computes another way over 8 bits, or over another type than the activations'."""
    for timings, kv_dtype, expected in [(EMULATED, "auto", "float32"), (NATIVE, "int8", "bfloat16")]:
        clockwork = Clockwork(timings)
        for _ in range(2):
            choice = choose_dtype("auto", "cpu", model, kv_dtype=kv_dtype, measure=clockwork, folder=tmp_path / "dtype")
            assert choice.dtype == expected
        assert (clockwork.kv_dtype, clockwork.num_calls) == (kv_dtype, 1)


@pytest.mark.parametrize(
    ("dtype", "quantization", "ways", "expected"),
    [
        ("auto", "auto", ("bfloat16", "float32", "bfloat16+gguf", "float32+gguf"), ("bfloat16", "gguf")),
        ("auto", "none", ("bfloat16", "float32"), ("bfloat16", "none")),
        ("auto", "int8", ("bfloat16+int8", "float32+int8"), ("float32", "int8")),
        ("auto", "gguf", ("bfloat16+gguf", "float32+gguf"), ("bfloat16", "gguf")),
        ("float32", "auto", None, ("float32", "none")),  # an explicit type is exact
        ("bfloat16", "gguf", None, ("bfloat16", "gguf")),
    ],
)
def test_what_is_timed_of_a_model_with_a_gguf_files_weights(
    tmp_path: pathlib.Path,
    model: pathlib.Path,
    dtype: str,
    quantization: str,
    ways: tuple[str, ...] | None,
    expected: tuple[str, str],
) -> None:
    (model / KEPT_BLOCKS_FILE).write_bytes(b"")
    all_ways = {"bfloat16": 1.0, "float32": 2.0, "bfloat16+gguf": 0.5, "float32+gguf": 2.0}
    all_ways |= {"bfloat16+int8": 2.0, "float32+int8": 1.0}
    clockwork = Clockwork(Timings({name: (each, each) for name, each in all_ways.items() if name in (ways or ())}, "x"))
    for _ in range(2):
        choice = choose_dtype(dtype, "cpu", model, quantization, measure=clockwork, folder=tmp_path / "dtype")
        assert (choice.dtype, choice.quantization) == expected
    assert clockwork.num_calls == (ways is not None)
    assert ways is None or clockwork.ways == ways


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_what_is_timed_of_a_quantised_checkpoint(tmp_path: pathlib.Path, method: str) -> None:
    fields = {"dtype": "float16", "quantization_config": {"quant_method": method, "bits": 4}}
    model = write_model(tmp_path / "model", fields)
    ways = ("float16", "float32", f"float16+{method}", f"float32+{method}")
    clockwork = Clockwork(
        Timings({name: (each, each) for name, each in zip(ways, (1.0, 2.0, 2.0, 0.5), strict=True)}, "")
    )
    for _ in range(2):
        choice = choose_dtype("auto", "cpu", model, measure=clockwork, folder=tmp_path / "dtype")
        assert (choice.dtype, choice.quantization) == ("float32", method)
        assert choice.reason.startswith(f"over the {method.upper()} weights, faster here than float16; ")
    assert (clockwork.num_calls, clockwork.ways) == (1, ways)
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
    clockwork = Clockwork()
    assert choose_dtype(dtype, device, model, measure=clockwork, folder=tmp_path / "dtype") == Choice(dtype, "")
    assert clockwork.num_calls == 0
    assert not (tmp_path / "dtype").exists()


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


def test_once_for_a_host_and_a_model(
    tmp_path: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, clockwork = tmp_path / "dtype", Clockwork()
    first = choose_dtype("auto", "cpu", model, measure=clockwork, folder=folder)
    clockwork.timings = NATIVE
    again = choose_dtype("auto", "cpu", model, measure=clockwork, folder=folder)
    assert (first.dtype, again.dtype, clockwork.num_calls) == ("float32", "float32", 1)
    assert first.reason in again.reason, "why is told each time"
    # Other instructions, or another model, are another matter.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    assert choose_dtype("auto", "cpu", model, measure=clockwork, folder=folder).dtype == "bfloat16"
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA")
    other = write_model(tmp_path / "other", {"dtype": "bfloat16", "hidden_size": 16})
    assert choose_dtype("auto", "cpu", other, measure=clockwork, folder=folder).dtype == "bfloat16"
    assert clockwork.num_calls == 3
    assert len(list(folder.glob("*.json"))) == 3


def test_processes_side_by_side_choose_once(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    """Threads contend for a lock as processes do, since locks of one file are held by descriptors."""
    together = threading.Barrier(8)
    turns = [EMULATED, NATIVE] * 4

    def choose(turn: int) -> tuple[str, int]:
        clockwork = Clockwork(turns[turn])
        together.wait()
        return choose_dtype("auto", "cpu", model, measure=clockwork, folder=tmp_path).dtype, clockwork.num_calls

    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(choose, range(8)))
    assert len({dtype for dtype, _ in found}) == 1
    assert sum(num_calls for _, num_calls in found) == 1


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"dtype": "float32"}',
        '{"dtype": "float32", "reason": "x"}',
        '{"dtype": "int8", "quantization": "none", "reason": "x"}',
        '{"dtype": 1, "reason": 2}',
        '{"dtype": "float32", "quantization": "int2", "reason": "x"}',
        "\x00\xff",
    ],
)
def test_a_file_that_makes_no_sense_is_made_again(
    tmp_path: pathlib.Path, model: pathlib.Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    clockwork = Clockwork()
    choose_dtype("auto", "cpu", model, measure=clockwork, folder=tmp_path / "dtype")
    (entry,) = (tmp_path / "dtype").glob("*.json")
    whole = entry.read_text()
    entry.write_bytes(content.encode("latin-1"))
    caplog.clear()
    assert choose_dtype("auto", "cpu", model, measure=clockwork, folder=tmp_path / "dtype").dtype == "float32"
    assert clockwork.num_calls == 2
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert entry.read_text() == whole


def test_a_folder_that_cannot_be_written_costs_a_line(
    tmp_path: pathlib.Path, model: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        caplog.clear()
        choice = choose_dtype("auto", "cpu", model, measure=Clockwork(), folder=folder)
        assert choice.dtype == "float32"
        assert "cannot be kept" in caplog.records[-1].getMessage()


def test_what_is_kept_is_read_where_nothing_can_be_written(
    tmp_path: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The volume is only there to be read, as for workers in containers."""
    choose_dtype("auto", "cpu", model, measure=Clockwork(), folder=tmp_path)

    def refuse(*arguments: object, **more: object) -> None:
        raise OSError("read-only file system")

    monkeypatch.setattr(pathlib.Path, "mkdir", refuse)
    monkeypatch.setattr(pathlib.Path, "write_text", refuse)
    clockwork = Clockwork(NATIVE)
    caplog.set_level(logging.WARNING)
    assert choose_dtype("auto", "cpu", model, measure=clockwork, folder=tmp_path).dtype == "float32"
    assert (clockwork.num_calls, caplog.records) == (0, [])


def test_a_timing_that_fails_means_as_saved_for_an_hour(
    tmp_path: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers that start one after the other choose alike, though the second would have had the time; and on a slow
    host only the first waits."""
    choice = choose_dtype("auto", "cpu", model, measure=Clockwork(None), folder=tmp_path / "dtype")
    assert choice.dtype == "bfloat16"
    assert "no layer fits" in choice.reason
    quick = Clockwork()
    again = choose_dtype("auto", "cpu", model, measure=quick, folder=tmp_path / "dtype")
    assert (again.dtype, quick.num_calls) == ("bfloat16", 0)
    assert "no layer fits" in again.reason
    now_s = time.time()
    monkeypatch.setattr(time, "time", lambda: now_s + 3601)
    assert choose_dtype("auto", "cpu", model, measure=quick, folder=tmp_path / "dtype").dtype == "float32"
    monkeypatch.setattr(time, "time", lambda: now_s + 99999)
    assert choose_dtype("auto", "cpu", model, measure=Clockwork(None), folder=tmp_path / "dtype").dtype == "float32"


def test_who_waits_for_a_timing_is_told_so(tmp_path: pathlib.Path, model: pathlib.Path) -> None:
    told: list[str] = []
    for _ in range(2):
        choose_dtype("auto", "cpu", model, measure=Clockwork(), folder=tmp_path / "dtype", tell=told.append)
    assert told == ["timing bfloat16 and float32 on this CPU, once for this model; --dtype bfloat16 spares it"]
    (model / KEPT_BLOCKS_FILE).write_bytes(b"")
    choose_dtype("auto", "cpu", model, measure=Clockwork(), folder=tmp_path / "dtype", tell=told.append)
    assert told[1].endswith("; --dtype bfloat16 --quantization gguf spares it"), "a type alone means weights as saved"


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
def test_a_limit_of_instructions_that_makes_no_sense(
    dtype: str, tmp_path: pathlib.Path, model: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no failed timing, which would be kept, and is told before one begins."""
    monkeypatch.setenv("BATON_CPU_ISA", "avx10")
    clockwork = Clockwork()
    with pytest.raises(ConfigError, match="BATON_CPU_ISA: 'avx10' is not one of"):
        choose_dtype(dtype, "cpu", model, measure=clockwork, folder=tmp_path / "dtype")
    assert clockwork.num_calls == 0
    assert not (tmp_path / "dtype").exists()


@pytest.mark.process
def test_a_timing_that_takes_too_long_is_told_in_words(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says by which flag the wait is spared."""
    monkeypatch.setattr(dtype_choice, "_TIMING_LIMIT_S", 0.01)
    with pytest.raises(TimingFailed, match=r"^it took longer than 0.01 s; --dtype float32 or bfloat16 spares it$"):
        dtype_choice.measure_in_child(tmp_path, "bfloat16", ("bfloat16", "float32"))


@pytest.mark.parametrize("dtype", ["auto", "float32"])
@pytest.mark.parametrize("quantization", KEPT_WEIGHTS)
def test_weights_that_the_model_does_not_have_are_refused_before_anything_is_timed(
    tmp_path: pathlib.Path, model: pathlib.Path, quantization: str, dtype: str
) -> None:
    clockwork = Clockwork()
    with pytest.raises(ConfigError, match=f"--quantization: .* has no {quantization} weights; give auto, none, int8"):
        choose_dtype(dtype, "cpu", model, quantization, measure=clockwork, folder=tmp_path / "dtype")
    assert clockwork.num_calls == 0
    assert not (tmp_path / "dtype").exists()


@pytest.mark.parametrize("quantization", ["int8", "int4", *KEPT_WEIGHTS])
def test_quantised_weights_are_refused_for_an_accelerator_at_once(model: pathlib.Path, quantization: str) -> None:
    with pytest.raises(ConfigError, match="works only on a CPU; give none or auto for --device cuda:1"):
        choose_dtype("auto", "cuda:1", model, quantization, measure=Clockwork())
