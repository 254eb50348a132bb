"""Tests that the text side of a model that a worker brought is read only if it does no harm."""

from __future__ import annotations

import asyncio
import json
import pathlib
import string
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from services.core.errors import ConfigError
from services.router.text.template_process import TemplateProcess
from services.router.text.tokenisation import load_model_text
from services.router.text.vetting import vetted_model_text
from tests.support.text_model import write_model

pytestmark = pytest.mark.process

LETTERS = string.ascii_letters


BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


@pytest.fixture
def new_children() -> Callable[[], list[psutil.Process]]:
    """Returns a function that lists the children of this process that it did not have when the test began."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


def replacing(content: str, pattern: str = "a") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def template_processing(single: list[str], ids: list[int]) -> dict[str, Any]:
    pieces = [{"Sequence" if name == "A" else "SpecialToken": {"id": name, "type_id": 0}} for name in single]
    special = {"x": {"id": "x", "ids": ids, "tokens": ["x"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": pieces, "pair": pieces[:1], "special_tokens": special}


def with_entry(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["model"]["vocab"].update({text: len(content["model"]["vocab"])})


def with_added(text: str) -> Callable[[dict[str, Any]], None]:
    return lambda content: content["added_tokens"].append({**content["added_tokens"][0], "id": 900, "content": text})


def with_part(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: content.update(parts)


def with_trie(content: dict[str, Any]) -> None:
    """Gives it a model of 9,000 long entries, of which no two begin alike: reading it takes gigabytes."""
    entries = [[f"{number:05}" + LETTERS * 19, -1.0] for number in range(9000)]
    content.update(model={"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], *entries], "byte_fallback": False})


def nested(**parts: Any) -> dict[str, Any]:
    return {"type": "Sequence", **parts}


HARMFUL: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a long entry": (with_entry("Z" * 1025), "a vocabulary entry has 1025 characters"),
    "a long added token": (with_added("Z" * 5000), "an added token has 5000 characters"),
    "a long prefix": (with_part(normalizer={"type": "Prepend", "prepend": "ab " * 9999}), "3e+04 times as long"),
    "a replacement": (with_part(normalizer=replacing("b" * 2000)), "its normalizer makes texts 2e+03 times"),
    "replacements of a decoder": (
        with_part(decoder=nested(decoders=[replacing("a" * 6)] * 2)),
        "its decoder makes texts 36 times",
    ),
    "an expression in a decoder": (
        with_part(decoder={"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}),
        "its decoder has a regular expression",
    ),
    "bytes of bytes": (
        with_part(pre_tokenizer=nested(pretokenizers=[BYTES] * 9)),
        "it makes texts 1.34e+08 times as long",
    ),
    "many tokens added": (with_part(post_processor=template_processing(["x", "A"], [1] * 99)), "adds 99 tokens"),
    "a text repeated": (with_part(post_processor=template_processing(["A", "A"], [])), "adds inf tokens"),
    "many parts": (with_part(normalizer=nested(normalizers=[{"type": "NFC"}] * 99)), "has 100 parts|has 10[0-9] parts"),
    "a trie": (with_trie, "reading (it ended its process by signal|tokenizer.json takes)"),
    "a panic": (
        lambda content: content["model"].update(continuing_subword_prefix="#" * 50),
        "LibraryPanic|is no tokenizer",
    ),
}


def changed(folder: pathlib.Path, change: Callable[[dict[str, Any]], None]) -> pathlib.Path:
    path = write_model(folder) / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize("name", HARMFUL)
async def test_a_harmful_tokenizer_is_refused_with_the_reason(
    tmp_path: pathlib.Path, new_children: Callable[[], list[psutil.Process]], name: str
) -> None:
    change, reason = HARMFUL[name]
    with pytest.raises(ConfigError, match=reason.replace("+", r"\+")):
        await vetted_model_text(changed(tmp_path, change))
    assert not new_children()


async def test_a_harmless_one_is_what_it_would_be_if_it_were_trusted(
    tmp_path: pathlib.Path, new_children: Callable[[], list[psutil.Process]]
) -> None:
    own, brought = load_model_text(write_model(tmp_path)), await vetted_model_text(tmp_path)
    for name in ("vocab_size", "context_tokens", "bound"):
        assert getattr(brought, name) == getattr(own, name)
    assert brought.encode_text("the baton 🙂") == own.encode_text("the baton 🙂")
    assert isinstance(brought.template, TemplateProcess)
    messages = [{"role": "user", "content": "hi"}]
    assert brought.encode_messages(messages) == own.encode_messages(messages)
    assert brought.token_texts.join([70, 71]) == own.token_texts.join([70, 71])
    assert (own.is_trusted, brought.is_trusted) == (True, False)
    brought.close()
    assert not new_children()


@pytest.mark.parametrize(
    ("template", "reason"),
    [("{{ 1 }}" * 10_000, "its chat template has 70000 bytes"), ("{% for %}", "TemplateSyntaxError")],
    ids=["long", "wrong"],
)
async def test_a_template_that_cannot_be_used_is_refused(tmp_path: pathlib.Path, template: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        await vetted_model_text(write_model(tmp_path, template=template))


async def test_a_special_token_is_short(tmp_path: pathlib.Path) -> None:
    (write_model(tmp_path) / "tokenizer_config.json").write_text(json.dumps({"bos_token": "x" * 2000}))
    with pytest.raises(ConfigError, match="a special token has 2000 characters"):
        await vetted_model_text(tmp_path)


async def test_one_that_takes_too_long_is_refused(
    tmp_path: pathlib.Path, new_children: Callable[[], list[psutil.Process]]
) -> None:
    with pytest.raises(ConfigError, match=r"reading it took more than 0\.001 s"):
        await vetted_model_text(write_model(tmp_path), within_s=0.001)
    assert not new_children()


async def test_whoever_waits_no_longer_leaves_no_process(
    tmp_path: pathlib.Path, new_children: Callable[[], list[psutil.Process]]
) -> None:
    reading = asyncio.create_task(vetted_model_text(write_model(tmp_path)))
    await asyncio.sleep(0)  # its first step starts the process
    (child,) = new_children()
    reading.cancel()
    await asyncio.wait([reading])
    assert await asyncio.to_thread(psutil.wait_procs, [child], 30) == ([child], [])


async def test_a_text_that_might_become_huge_is_refused(tmp_path: pathlib.Path) -> None:
    brought = await vetted_model_text(changed(tmp_path, with_part(normalizer=replacing("b" * 100, "q"))))
    assert brought.growth == 800
    assert brought.encode_text("x" * 10_000)
    with pytest.raises(Exception, match="may become too many"):
        brought.encode_text("x" * 100_000)
