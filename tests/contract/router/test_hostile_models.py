"""Tests that a model that a worker brings harms no other: its template and its tokenizer are not the router's own."""

from __future__ import annotations

import asyncio
import json
import pathlib
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import psutil
import pytest

from baton.v1 import inference_pb2
from services.router.catalogue import MOST_FAILURES
from services.router.text.template_process import RENDER_S
from tests.support.patience import HANG_S
from tests.support.router_harness import CONFIG, TEXT, Cluster, code_of
from tests.support.scripted_worker import MODEL_ID, ScriptedWorker
from tests.support.text_model import TEMPLATE, write_model

pytestmark = pytest.mark.process

OTHER = "other"
EQUAL = (
    "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(30) %}{% set ns.a = [ns.a, ns.a] %}"
    "{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}"
)
"""Compares two lists in one operation that takes minutes, and holds the interpreter lock."""
INDENTED = "{{ [1, 2]|tojson(indent=1500000000)|length }}"
"""Makes a text of gigabytes in one operation."""


@pytest.fixture
async def several(model: str) -> AsyncIterator[Cluster]:
    """Yields a router with room for two models, whose own one has a worker."""
    cluster = Cluster(replace(CONFIG, model=model, max_models=2))
    await cluster.start()
    await cluster.add("mixed", worker_id="first")
    yield cluster
    for served in cluster.router.catalogue.all():
        served.conductor.coordinator.check_idle()
    await cluster.stop()


def chat(model: str) -> inference_pb2.GenerateRequest:
    said = inference_pb2.GenerateRequest(model=model)
    said.messages.messages.add(role="user", content="hi")
    return said


@pytest.mark.parametrize("template", [EQUAL, INDENTED], ids=["equal", "indented"])
async def test_the_chats_of_other_models_go_on(several: Cluster, tmp_path: pathlib.Path, template: str) -> None:
    """The event loop does too: it never waits for what the template does in one operation."""
    await several.add("mixed", worker_id="second", model_id=OTHER, text=write_model(tmp_path, template=template))
    hanging = asyncio.ensure_future(several.inference.Generate(chat(OTHER)))
    num_answers, longest_s = 0, 0.0
    async with asyncio.timeout(HANG_S):
        while not hanging.done():
            began_s = time.monotonic()
            assert (await several.inference.Generate(chat(MODEL_ID), timeout=10)).output.text == TEXT
            num_answers, longest_s = num_answers + 1, max(longest_s, time.monotonic() - began_s)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await hanging
    assert code_of(refused.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert "chat template" in (refused.value.details() or "")
    assert num_answers
    assert longest_s < RENDER_S, "it waited for none of it"


async def test_a_chat_is_rendered_elsewhere_and_nothing_of_it_is_left(several: Cluster, tmp_path: pathlib.Path) -> None:
    await several.add("mixed", worker_id="second", model_id=OTHER, text=write_model(tmp_path, template=TEMPLATE))
    template: Any = several.router.catalogue.get(OTHER).text.template
    assert template.pid is None, "it begins with the first chat"
    assert (await several.inference.Generate(chat(OTHER), timeout=30)).output.text == TEXT
    pid = template.pid
    assert pid in children()
    served = several.router.catalogue.get(OTHER)
    several.router.catalogue._unused_since_s[OTHER] = 0.0
    several.router.catalogue._drop(served)
    await several.until(lambda: _is(pid not in children()))


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


async def _is(value: bool) -> bool:
    return value


def changed(folder: pathlib.Path, **parts: Any) -> pathlib.Path:
    """Returns a model whose tokenizer has other parts."""
    path = write_model(folder, template=None) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return folder


async def test_short_texts_are_not_tokenised_on_the_event_loop(several: Cluster, tmp_path: pathlib.Path) -> None:
    """A regular expression of the tokenizer may take any time for them; here it takes a second."""
    slow = {"type": "Split", "pattern": {"Regex": "(?:a|aa){1,17}$"}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    text = changed(tmp_path, pre_tokenizer={"type": "Sequence", "pretokenizers": [slow, bytes_]})
    await several.add("mixed", worker_id="second", model_id=OTHER, text=text)
    asked = inference_pb2.GenerateRequest(model=OTHER, text="a" * 500 + "!")
    hanging = asyncio.ensure_future(several.inference.Generate(asked))
    line = several.router.catalogue.get(OTHER).line
    await several.until(lambda: _is(line.num_texts > 0))
    assert (await several.inference.Generate(chat(MODEL_ID), timeout=10)).output.text == TEXT
    assert line.num_texts > 0, "it takes longer than the other"
    await asyncio.wait([hanging])


async def test_a_tokenizer_that_would_take_too_much_is_refused_with_the_reason(
    several: Cluster, tmp_path: pathlib.Path
) -> None:
    text = changed(tmp_path, normalizer={"type": "Prepend", "prepend": "ab " * (1 << 20)})
    worker = ScriptedWorker("mixed", [], model_id=OTHER, text=text)
    several.workers.append(worker)
    await worker.start()

    async def refused() -> bool:
        try:
            await worker.register(several.control_channel)
        except grpc.aio.AioRpcError as error:
            return "its normalizer makes texts 3.15e+06 times as long" in (error.details() or "")
        raise AssertionError("it was taken")

    await several.until(refused)
    assert (await several.inference.Generate(chat(MODEL_ID), timeout=10)).output.text == TEXT


async def test_attempts_that_fail_are_few_whatever_names_they_come_under(
    several: Cluster, tmp_path: pathlib.Path
) -> None:
    """Each of them may cost the router 64 MiB, and seconds of a processor."""
    (write_model(tmp_path) / "config.json").write_text("{}")
    liar = ScriptedWorker("mixed", [], text=tmp_path)
    several.workers.append(liar)
    await liar.start()
    codes = []
    for number in range(3 * MOST_FAILURES):
        liar.worker_id, liar.model_id, liar.incarnation = f"liar-{number}", f"model-{number}", number + 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await liar.register(several.control_channel)
        codes.append(code_of(refused.value))
    assert liar.num_texts_given <= 2 * MOST_FAILURES, "in less than two pauses"
    assert codes.count(grpc.StatusCode.UNAVAILABLE) >= MOST_FAILURES


async def test_a_worker_that_may_not_join_takes_no_name_away(model: str, tmp_path: pathlib.Path) -> None:
    """A worker of another model is forgotten for the sake of one that joins, and not of one that is refused."""
    cluster = Cluster(replace(CONFIG, model=model, max_models=2, max_workers=1))
    await cluster.start()
    lost = await cluster.add("mixed", worker_id="same")
    text = write_model(tmp_path, template=None)
    await cluster.add("mixed", worker_id="second", model_id=OTHER, text=text)
    lost.cut()
    own = cluster.router.catalogue.own.conductor
    await cluster.until(lambda: _is(not own.links))
    third = ScriptedWorker("mixed", [], worker_id="same", model_id=OTHER, text=text)
    cluster.workers.append(third)
    await third.start()
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await third.register(cluster.control_channel)
    assert code_of(refused.value) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert own.coordinator.worker_ids() == {"same"}
    await cluster.stop()
