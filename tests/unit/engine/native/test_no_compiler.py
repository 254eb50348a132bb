"""Baton says what is lost on a machine without a C compiler, and what to do about it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from services.engine.cpu.fast_paths import use_fast_paths
from services.engine.native import bindings, build

WORDS = ("slower", "bfloat16", "--quantization", "install gcc", "services.engine.native.build --fetch-compiler")
"""What is lost, and what to do."""


def test_the_build_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """It is no failure: an installation goes on."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main([]) == 0
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
        use_fast_paths(nn.Sequential(nn.Linear(4, 4, device="meta"), nn.RMSNorm(4, device="meta")), torch.float32)
        assert not caplog.records
        use_fast_paths(nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4)), torch.float32)
        assert sum(record.levelno == logging.WARNING for record in caplog.records) == 1
    finally:
        bindings.kernels.cache_clear()


def test_a_compiler_is_fetched_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its folder is on the path while it compiles, and deleted afterwards; without a network it says what is lost."""
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build.importlib.util, "find_spec", lambda name: None)
    folders = []
    for status in (0, 1):
        commands: list[list[str]] = []

        def run(command: list[str], status: int = status, commands: list = commands, **_: object) -> SimpleNamespace:
            commands.append(command)
            return SimpleNamespace(returncode=status)

        monkeypatch.setattr(build.subprocess, "run", run)
        with build._compiler(build._installed(), fetch=True) as compiler:
            (pip,) = commands
            assert pip[1:4] == ["-m", "pip", "install"]
            folders.append(Path(pip[pip.index("--target") + 1]))
            assert folders[-1].is_dir()
            if status:
                assert compiler is None
            else:
                assert compiler is not None
                assert compiler.environment["PYTHONPATH"] == str(folders[-1])
                assert "ziglang" in compiler.command
                assert any(each.endswith(f"-linux-gnu.{build.OLDEST_GLIBC}") for each in compiler.command)
        assert not folders[-1].exists()
    said = capsys.readouterr().out
    assert all(word in said for word in WORDS), said


@pytest.mark.parametrize(("command", "flag"), [("gcc", "-march=x86-64-v3"), ("ziglang", "-march=x86_64_v3")])
def test_zig_has_its_own_names_for_processors(monkeypatch: pytest.MonkeyPatch, command: str, flag: str) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> SimpleNamespace:
        ran.append(command)
        return SimpleNamespace(returncode=1, stderr="why")

    monkeypatch.setattr(build.subprocess, "run", run)
    error = build.Compiler((command, "cc")).run(["-march=x86-64-v3", "x86-64-v3.c"])
    assert ran == [[command, "cc", flag, "x86-64-v3.c"]]
    assert error == f"{command} cc {flag} x86-64-v3.c failed\nwhy"
