"""Tests verdicts that are kept beside a disk tier."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.worker.kept_verdicts import KeptVerdicts


def test_what_was_heard_outlives_the_process(tmp_path: Path) -> None:
    path = tmp_path / "w.verdicts"
    first = KeptVerdicts(path)
    assert (first.epoch, path.exists()) == ("", False), "nothing is written where nothing is wrong"
    first.merge({7: 1})
    first.add(8)
    again = KeptVerdicts(path)
    assert again.num_of == first.num_of == {7: 1, 8: 1}
    assert again.epoch == first.epoch != ""


def test_a_file_that_cannot_be_read_stands_for_any_verdicts(tmp_path: Path) -> None:
    """Nobody knows which epoch what is on the disk is named in: so it is found by none."""
    path = tmp_path / "w.verdicts"
    for damaged in ("", "[]", "{half", '{"x": 1}', '{"7": null}', '{"7": 0.5}'):
        path.write_text(damaged)
        assert KeptVerdicts(path).epoch != ""


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_what_another_user_may_have_put_there_is_not_read(tmp_path: Path, kind: str) -> None:
    """The folder is given by an operator, and need not be Baton's alone: a pipe must not keep the worker waiting."""
    path, other = tmp_path / "w.verdicts", tmp_path / "other"
    other.write_text('{"7": 1}')
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(other)
    assert 7 not in KeptVerdicts(path).num_of


def test_a_folder_that_cannot_be_written_costs_nothing_but_the_memory(tmp_path: Path) -> None:
    verdicts = KeptVerdicts(tmp_path / "missing" / "w.verdicts")
    assert verdicts.merge({7: 1}) == [7]
    assert verdicts.epoch != ""
