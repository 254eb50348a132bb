"""Tests which result file `make proof` goes on with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests import proof


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(proof, "RESULTS", tmp_path)
    return tmp_path


def begun(commit: str) -> Path:
    path = proof.result_file(commit)
    assert not path.exists()
    path.write_text(json.dumps({"machine": {"baton_commit": commit}, "parts": {}}))
    return path


def test_a_commit_goes_on_with_its_own_file() -> None:
    path = begun("one")
    assert proof.result_file("one") == path


def test_another_commit_of_the_same_day_has_another_file() -> None:
    paths = {commit: begun(commit) for commit in ("one", "two", "three")}
    assert len(set(paths.values())) == 3
    assert {commit: proof.result_file(commit) for commit in paths} == paths
