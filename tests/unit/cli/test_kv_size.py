"""Tests `baton kv size`: what it reckons is what a pool takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from services.cli import kv
from services.core.errors import ConfigError, UnknownModel, UnsupportedModel
from services.kv.sizing import HANDOFF_MS, KVShapeOfModel, KVSize, kv_shape_of, size_of
from tests.support import ROOT


@pytest.fixture
def model(tmp_path: Path) -> Path:
    config = {
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_size_in_words(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", str(model), "--bytes", "1GiB", "--link", "1", "--link", "0.04", "--ms-per-token", "0.5"]
    assert kv.main(["size", *flags], "baton kv") == 0
    shown = capsys.readouterr().out
    assert "KV in bfloat16" in shown
    assert "23,040 bytes" in shown
    assert "128 blocks, 47.2 MB" in shown
    assert "2,912 blocks: 22 such sequences" in shown
    assert "47.2 ms over 1 GB/s: splitting pays from 7 tokens on" in shown
    assert "1,179.6 ms over 0.04 GB/s: computing it takes less, at any length" in shown
    assert "1,024.0 ms at 0.5 ms a token" in shown
    assert "faster above 0.0461 GB/s" in shown


def test_a_size_as_json(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kv.main(["size", "--model", str(model), "--kv-dtype", "int8", "--tokens", "17", "--json"], "baton kv")
    found = json.loads(capsys.readouterr().out)
    assert found["token_bytes"] == 30 * 2 * 3 * 68
    assert found["num_blocks"] == 2
    assert found["num_bytes"] == 2 * 16 * found["token_bytes"]
    assert "pays_from_tokens" not in found, "what computing takes is not known"


def test_from_which_length_splitting_pays() -> None:
    """A handoff costs something whatever its length, so short prompts are computed sooner than they are moved."""
    size = KVSize(token_bytes=1_000_000, block_size=16, num_tokens=1)
    assert size.pays_from(1e9, ms_per_token=2.0) == HANDOFF_MS + 1, "a millisecond a token is saved"
    assert size.pays_from(1e9, ms_per_token=100.0) == 1
    assert size.pays_from(1e9, ms_per_token=1.0) is None


def test_the_table_of_the_docs() -> None:
    """docs/kvtransfer.md shows what `baton kv size` reckons."""
    document = (ROOT / "docs" / "kvtransfer.md").read_text()
    heading, _, *rows = document.partition("| model | ")[2].partition("\n\n")[0].splitlines()
    assert len(rows) == 9
    links = [float(rate) for rate in re.findall(r"\(([\d.]+) GB/s\)", heading)]
    shapes = {"SmolLM2-135M": (30, 3, 64), "Llama 3.1 8B": (32, 8, 128), "Llama 3.1 70B": (80, 8, 128)}
    for row in rows:
        name, token_ms, tokens, megabytes, *times = (cell.strip() for cell in row.strip("|").split("|"))
        size = size_of(KVShapeOfModel(*shapes[name]), "bfloat16", 16, int(tokens.replace(",", "")))
        assert megabytes == f"{size.num_bytes / 1e6:,.0f} MB"
        for rate, shown in zip(links, times, strict=True):
            pays = size.pays_from(rate * 1e9, float(token_ms.split()[0]))
            assert shown == f"{1e3 * size.seconds(rate * 1e9):,.0f} ms, " + (f"from {pays:,}" if pays else "never")


@pytest.mark.parametrize(
    "flags",
    [
        ["--tokens", "0"],
        ["--tokens", "many"],
        ["--bytes", "16 apples"],
        ["--link", "-1"],
        ["--ms-per-token", "nan"],
        ["--block-size", "99999999999999999999999999"],
    ],
)
def test_wrong_flags_are_named(model: Path, flags: list[str]) -> None:
    with pytest.raises(ConfigError, match=flags[0]):
        kv.main(["size", "--model", str(model), *flags], "baton kv")


@pytest.mark.parametrize("text", ["", "[]", "{"])
def test_a_config_that_cannot_be_read(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(UnknownModel, match=r"config\.json"):
        kv.main(["size", "--model", str(model)], "baton kv")


@pytest.mark.parametrize("config", [{}, {"num_hidden_layers": 1, "num_attention_heads": 0}, {"num_hidden_layers": "x"}])
def test_a_config_without_kv(config: dict[str, object]) -> None:
    with pytest.raises(UnsupportedModel):
        kv_shape_of(config)


def test_the_text_part_of_a_model_counts() -> None:
    inner = {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "hidden_size": 64}
    size = size_of(kv_shape_of({"text_config": inner, "num_hidden_layers": 99}), "float32", 16, 16)
    assert size.token_bytes == 2 * 2 * 4 * 8 * 4
    assert size.num_sequences(size.block_bytes - 1) == 0
