"""Tests that a router gets the text side of a worker's model over a real connection."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.core.errors import (
    Unauthenticated,
    UnsupportedModel,
)
from services.core.model_files import MOST_PART_BYTES, MOST_TEXT_BYTES, TEXT_FILES
from services.router.text.model_text_fetch import fetch_model_text
from services.router.text.tokenisation import load_model_text
from services.rpc import channels
from tests.support.models import tiny_model
from tests.support.text_fetch import OnlyText, fetch, files, serving
from tests.support.text_model import write_model
from tests.support.workers import MIXED, running_worker, worker_config

MIB = 1 << 20
MESSAGES = [{"role": "user", "content": "the baton is passed"}]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model")


def text_of(model: Path) -> dict[str, bytes]:
    return {name: data for name, data in files(model).items() if name in TEXT_FILES}


# What a worker gives


async def test_a_worker_gives_the_text_of_its_model(tmp_path: Path, folder: Path) -> None:
    model = tiny_model("llama", tmp_path)
    async with running_worker(worker_config(model), MIXED) as host:
        await fetch(host.address, folder)
    assert files(folder) == text_of(model)
    assert files(folder).keys() == {"tokenizer.json", "tokenizer_config.json", "config.json"}
    fetched, own = load_model_text(folder), load_model_text(model)
    assert fetched.encode_text("the baton") == own.encode_text("the baton")
    assert fetched.encode_messages(MESSAGES) == own.encode_messages(MESSAGES)
    assert (fetched.vocab_size, fetched.context_tokens) == (own.vocab_size, own.context_tokens)


async def test_a_template_of_its_own_and_no_weights(model: Path, folder: Path) -> None:
    (model / "model.safetensors").write_bytes(b"weights")
    (model / "generation_config.json").write_text("{}")
    async with serving(OnlyText(model)) as address:
        await fetch(address, folder)
    assert files(folder).keys() == set(TEXT_FILES)
    assert files(folder) == text_of(model)
    fetched, own = load_model_text(folder), load_model_text(model)
    assert fetched.encode_messages(MESSAGES) == own.encode_messages(MESSAGES)


async def test_a_model_without_a_template(tmp_path: Path, folder: Path) -> None:
    async with serving(OnlyText(write_model(tmp_path / "base", template=None))) as address:
        await fetch(address, folder)
    assert not (folder / "chat_template.jinja").exists()
    assert load_model_text(folder).template is None


@pytest.mark.parametrize("num_bytes", [0, 1, MOST_PART_BYTES - 1, MOST_PART_BYTES, MOST_PART_BYTES + 1, 3 * MIB + 5])
async def test_files_of_every_length(tmp_path: Path, folder: Path, num_bytes: int) -> None:
    (tmp_path / "tokenizer.json").write_bytes(os.urandom(num_bytes))
    (tmp_path / "config.json").write_bytes(b"{}")
    async with serving(OnlyText(tmp_path)) as address:
        await fetch(address, folder)
    assert files(folder) == text_of(tmp_path)


async def test_without_the_token_nothing_is_given(model: Path) -> None:
    async with serving(OnlyText(model)) as address, channels.dial(address) as channel:
        with pytest.raises(Unauthenticated):
            await fetch_model_text(channel, within_s=30.0)


async def test_a_file_that_cannot_be_read(model: Path, folder: Path) -> None:
    path = model / "tokenizer_config.json"
    path.unlink()
    path.symlink_to(path)
    async with serving(OnlyText(model)) as address:
        with pytest.raises(
            UnsupportedModel, match=r"tokenizer_config\.json of the model cannot be read: Too"
        ) as caught:
            await fetch(address, folder)
    assert str(model) not in str(caught.value), "where models lie is not told"


async def test_the_most_and_one_byte_more(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", MOST_TEXT_BYTES - 2)
    async with serving(OnlyText(tmp_path)) as address:
        await fetch(address, folder)
        assert (folder / "tokenizer.json").stat().st_size == MOST_TEXT_BYTES - 2
        os.truncate(tmp_path / "tokenizer.json", MOST_TEXT_BYTES - 1)
        (folder / "tokenizer.json").unlink()
        (folder / "config.json").unlink()
        with pytest.raises(UnsupportedModel, match=f"{MOST_TEXT_BYTES + 1} bytes, and at most {MOST_TEXT_BYTES}"):
            await fetch(address, folder)
        assert not files(folder)
