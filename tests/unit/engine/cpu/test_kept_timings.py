"""Findings are kept in a folder to which others may write: nothing there stops a process or harms another file."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.engine.cpu import kept_timings
from services.engine.cpu.kept_timings import once_per_host

LIMIT_S = 0.3


def found(entry: Path, answer: int = 7) -> int:
    """Returns what is kept, or `answer`."""

    def read(content: Any) -> int | None:
        return int(content["n"] * 1.0) if content["n"] >= 0 else None

    def find() -> Mapping[str, object]:
        return {"n": answer}

    return once_per_host(entry, read, find, limit_s=LIMIT_S, what="a number")


@pytest.fixture
def entry(tmp_path: Path) -> Path:
    return tmp_path / "kernels" / "number.json"


def test_it_is_found_once(entry: Path) -> None:
    assert found(entry) == 7
    assert found(entry, 8) == 7
    assert sorted(path.name for path in entry.parent.iterdir()) == ["number.json", "number.lock"]


SENSELESS = {
    "nothing": "",
    "half": '{"n": ',
    "no object": "[]",
    "a text": '"n"',
    "null": "null",
    "another name": '{"m": 1}',
    "another type": '{"n": []}',
    "deep": "[" * 200_000,
    "a deep object": '{"n":' * 200_000,
    "a number that no float has": '{"n": 1' + "0" * 400 + "}",
    "infinity": '{"n": Infinity}',
    "more digits than are read": '{"n": ' + "1" * 10_000 + "}",
    "more than is read": '{"n": 1}' + " " * (1 << 21) + "x",
}


@pytest.mark.parametrize("name", SENSELESS)
def test_what_makes_no_sense_is_found_again(entry: Path, name: str) -> None:
    entry.parent.mkdir()
    entry.write_text(SENSELESS[name])
    assert found(entry) in (1, 7)
    if name != "more than is read":
        assert json.loads(entry.read_text()) == {"n": 7}


def test_no_text_at_all(entry: Path) -> None:
    entry.parent.mkdir()
    entry.write_bytes(b"\xff\xfe\x00")
    assert found(entry) == 7


@pytest.mark.parametrize("suffix", [".json", ".lock"])
@pytest.mark.parametrize("kind", ["pipe", "folder", "link", "device"])
def test_what_is_no_plain_file_stops_nobody(entry: Path, tmp_path: Path, suffix: str, kind: str) -> None:
    """A pipe would be waited for, a device read for ever, and what a link stands for would be emptied."""
    entry.parent.mkdir()
    victim = tmp_path / "victim"
    victim.write_text("precious")
    place = entry.with_suffix(suffix)
    if kind == "pipe":
        os.mkfifo(place)
    elif kind == "folder":
        place.mkdir()
    else:
        place.symlink_to(victim if kind == "link" else "/dev/zero")
    assert found(entry) == 7
    assert victim.read_text() == "precious"
    assert not list(entry.parent.glob("*.partial"))


def test_a_lock_that_is_never_released_is_waited_for_so_long(entry: Path) -> None:
    entry.parent.mkdir()
    with open(entry.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started_s = time.monotonic()
        assert found(entry) == 7
        assert time.monotonic() - started_s >= LIMIT_S
    assert found(entry, 8) == 7


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "kernels").write_text("a file")
    assert found(tmp_path / "kernels" / "number.json") == 7


def test_a_full_disk_leaves_nothing(entry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(path: Path, target: Path) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(kept_timings.Path, "replace", no_space)
    assert found(entry) == 7
    assert [path.name for path in entry.parent.iterdir()] == ["number.lock"]
