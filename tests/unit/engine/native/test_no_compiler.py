"""Baton says what is lost on a machine without a C compiler, and what to do about it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from services.engine.cpu.fast_paths import use_fast_paths
from services.engine.native import bindings, build

WORDS = ("slower", "bfloat16", "--quantization", "install gcc", "python -m services.engine.native.build")
"""What is lost, and what to do."""


def test_the_build_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is no failure: an installation goes on."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main() == 0
    said = capsys.readouterr().out
    assert "no C compiler" in said
    assert all(word in said for word in WORDS), said


def test_a_worker_warns_of_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """It goes on without the kernels."""
    nowhere = [SimpleNamespace(name="generic", shared_object=tmp_path / "kernels-generic.so")]
    monkeypatch.setattr(bindings, "usable", lambda: nowhere)
    assert bindings.kernels.__wrapped__() is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert all(word in record.getMessage() for word in WORDS), record.getMessage()


def test_a_worker_warns_if_none_can_be_loaded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """They may be those of another kind of machine: each is named, then what follows from it."""
    stale = tmp_path / "kernels-generic.so"
    stale.write_bytes(b"no library")
    monkeypatch.setattr(bindings, "usable", lambda: [SimpleNamespace(name="generic", shared_object=stale)])
    assert bindings.kernels.__wrapped__() is None
    loading, lost = caplog.records
    assert "generic cannot be loaded" in loading.getMessage()
    assert all(word in lost.getMessage() for word in WORDS), lost.getMessage()


def test_nothing_is_said_of_a_model_on_another_device(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It loses nothing."""
    monkeypatch.setattr(bindings, "usable", list)
    bindings.kernels.cache_clear()
    try:
        use_fast_paths(nn.Sequential(nn.Linear(4, 4, device="meta"), nn.RMSNorm(4, device="meta")))
        assert not caplog.records
        use_fast_paths(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)))
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
    finally:
        bindings.kernels.cache_clear()
