"""Tests that what clients write stands in no log and in no trace, unless the operator asks for it."""

from __future__ import annotations

import json
import signal
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny_model
from tests.support.processes import Up

SECRETS = ("the heron flies at four", "sesame, and a second one", "unfit and quite unreadable", "a system's secret")


def _post(url: str, body: dict[str, Any] | bytes) -> int:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(asked) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        error.close()
        return error.code


def _say_everything(up: Up) -> None:
    """Sends the secrets by every way in, fit and unfit, whole and streamed."""
    heron, sesame, unfit, system = SECRETS
    up.generate(heron)
    http = next(line.split()[1] for line in up.lines if line.startswith("http "))
    model = {"model": "tiny-llama", "max_tokens": 4}
    assert _post(f"{http}/completions", {**model, "prompt": sesame, "stream": True}) == 200
    chat = [{"role": "system", "content": system}, {"role": "user", "content": sesame}]
    _post(f"{http}/chat/completions", {**model, "messages": chat})  # the tiny model may have no template
    assert _post(f"{http}/completions", {**model, "prompt": unfit, "max_tokens": -1}) == 400
    assert _post(f"{http}/completions", {**model, "prompt": unfit * 1000}) == 400
    assert _post(f"{http}/completions", {**model, "prompt": [unfit]}) in (200, 400)
    assert _post(f"{http}/completions", f'{{"prompt": "{unfit}'.encode()) == 400
    assert _post(f"{http}/completions", {**model, "prompt": "x", unfit: unfit}) == 200


@dataclass(frozen=True)
class Written:
    """Keeps what a cluster wrote that was told no more than the form of its log."""

    log: str
    said: str
    trace: str
    request_id: str


def _written(temp: Path, form: str) -> Written:
    with Up(tiny_model("llama", temp), temp, BATON_LOG_LEVEL="info", BATON_LOG_FORMAT=form) as up:
        up.read_until("^ready$")
        request_id = up.generate()["request_id"]
        _say_everything(up)
        up.stop(signal.SIGINT)
    return Written(up.log.read_text(), "\n".join(up.lines), up.trace_file.read_text(), request_id)


@pytest.fixture(scope="module")
def as_json(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return _written(tmp_path_factory.mktemp("json"), "json")


def test_nothing_by_default(as_json: Written, tmp_path: Path) -> None:
    for written in (as_json, _written(tmp_path, "console")):
        everything = written.log + written.said + written.trace
        assert "request finished" in everything
        assert "baton.request" in everything
        for secret in SECRETS:
            assert secret not in everything


def test_prompts_when_asked_for_with_the_ids_they_belong_to(tmp_path: Path) -> None:
    settings = {"BATON_LOG_PROMPTS": "true", "BATON_LOG_FORMAT": "json"}
    with Up(tiny_model("llama", tmp_path), tmp_path, **settings) as up:
        up.read_until("^ready$")
        answer = up.generate(SECRETS[0])
        up.stop(signal.SIGINT)
    lines = _lines(up.log.read_text())
    (said,) = [line for line in lines if SECRETS[0] in line["message"]]
    assert said["service"] == "baton-router"
    assert said["request_id"] == answer["request_id"]
    assert SECRETS[0] not in up.trace_file.read_text(), "traces go further than logs"


def test_every_line_of_a_request_has_its_ids(as_json: Written) -> None:
    """The ids are written by all processes: with one search an operator has the whole story, and its trace."""
    story = [line for line in _lines(as_json.log) if line.get("request_id") == as_json.request_id]
    ours = [line["message"] for line in story if line["service"] == "baton-router"]
    assert (ours[0].partition(":")[0], ours[-1].partition(":")[0]) == ("request queued", "request finished")
    services = {line["service"] for line in story}
    assert services == {"baton-router", "baton-prefill", "baton-decode"}, as_json.log
    (trace_id,) = {line["trace_id"] for line in story}
    assert trace_id in as_json.trace


def _lines(log: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.splitlines() if line.startswith("{")]
