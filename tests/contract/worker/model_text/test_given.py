"""Tests that a router gets the text side of a worker's model over a real connection, and what that may cost a
worker."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import worker_pb2, worker_pb2_grpc
from services.core.errors import (
    Overloaded,
    Unauthenticated,
    UnsupportedModel,
)
from services.core.model_files import MOST_PART_BYTES, MOST_TEXT_BYTES, TEXT_FILES
from services.router.text.model_text_fetch import fetch_model_text
from services.router.text.tokenisation import load_model_text
from services.rpc import channels
from services.worker.model_text import MOST_CALLS, text_files
from tests.support.models import tiny_model
from tests.support.text_fetch import OnlyText, fetch, files, serving
from tests.support.text_model import write_model
from tests.support.trusted import dial
from tests.support.workers import MIXED, running_worker, until, worker_config

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


async def test_without_the_token_nothing_is_given(model: Path, folder: Path) -> None:
    async with serving(OnlyText(model)) as address, channels.dial(address) as channel:
        with pytest.raises(Unauthenticated):
            await fetch_model_text(channel, folder, within_s=30.0)
    assert not files(folder)


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


def test_a_file_that_changes_while_it_is_read(model: Path) -> None:
    tokenizer, template = (
        next(f for f in text_files(model) if f.name == name) for name in (TEXT_FILES[0], TEXT_FILES[3])
    )
    assert tokenizer.read_part(0) == (model / tokenizer.name).read_bytes()
    (model / "new").write_text(json.dumps({"another": "tokenizer"}))
    (model / "new").replace(model / tokenizer.name)
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json of the model was changed"):
        tokenizer.read_part(0)
    (model / template.name).unlink()
    with pytest.raises(UnsupportedModel, match=r"chat_template\.jinja of the model cannot be read: No such file"):
        template.read_part(0)


def test_what_is_no_file_is_not_opened(model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    os.mkfifo(model / "chat_template.jinja")
    assert {file.name for file in text_files(model)} == set(TEXT_FILES) - {"chat_template.jinja"}


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


# What callers may cost


@pytest.fixture
def large(tmp_path: Path) -> Path:
    """Returns a model whose text is more than connections hold that nobody reads."""
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "tokenizer.json").write_bytes(bytes(16 * MIB))
    return tmp_path / "large"


async def test_one_caller_too_many_is_refused(large: Path, folder: Path) -> None:
    servicer = OnlyText(large)
    async with serving(servicer) as address, contextlib.AsyncExitStack() as stack:
        calls = []
        for _ in range(MOST_CALLS):  # each a connection of its own: on one they would share its window
            stub = worker_pb2_grpc.WorkerServiceStub(await stack.enter_async_context(dial(address)))
            calls.append(stub.GetModelText(worker_pb2.GetModelTextRequest()))
        await until(lambda: len(servicer.host) == MOST_CALLS, "they all have a place")
        with pytest.raises(Overloaded) as caught:
            await fetch(address, folder)
        assert caught.value.retry_after_s == 1.0
        assert not files(folder)
        calls[0].cancel()
        await until(lambda: len(servicer.host) < MOST_CALLS, "a place is free")
        await fetch(address, folder)
        assert files(folder) == text_of(large)


async def test_a_caller_that_does_not_read_loses_its_place(large: Path) -> None:
    servicer = OnlyText(large, within_s=0.5)
    async with serving(servicer) as address, dial(address) as channel:
        call: Any = worker_pb2_grpc.WorkerServiceStub(channel).GetModelText(worker_pb2.GetModelTextRequest())
        await until(lambda: bool(len(servicer.host)), "it has a place")
        await until(lambda: not len(servicer.host), "it has lost it")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_router_that_goes_away_leaves_nothing(large: Path, folder: Path) -> None:
    """No write is left either: whoever is cancelled removes the folder at once."""
    async with serving(OnlyText(large)) as address:
        task = asyncio.create_task(fetch(address, folder))
        await until(lambda: bool(files(folder)), "it has begun")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        written = files(folder)
        await asyncio.sleep(0.05)
        assert files(folder) == written
