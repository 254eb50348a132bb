"""Tests where Baton keeps its files for a user who has no home, as containers run processes."""

from __future__ import annotations

import pwd

import pytest

from services.cli import main as command_line
from services.core.errors import ConfigError
from services.core.home import baton_home, baton_state


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    def nobody(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "BATON_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME", "BATON_CLUSTER_TOKEN"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
def test_a_user_without_a_home_is_told_what_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    for folder in (baton_home, baton_state):
        with pytest.raises(ConfigError, match="set it to a folder"):
            folder()
        assert folder({"BATON_HOME": "/b"}).is_relative_to("/b")
        assert folder({"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "/c"}).is_relative_to("/c")
    assert command_line.main(["status"]) == command_line.EXIT_USAGE
    for line in capsys.readouterr().err.splitlines():
        assert "RuntimeError" not in line


@pytest.mark.usefixtures("homeless")
def test_an_error_of_the_system_is_told_there_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: list[str]) -> int:
        raise PermissionError(13, "Permission denied", "/etc/x")

    monkeypatch.setattr(command_line, "_dispatch", fails)
    assert command_line.main(["models"]) == command_line.EXIT_FAILURE
    assert capsys.readouterr().err == "baton models: error: [Errno 13] Permission denied: '/etc/x'\n"


@pytest.mark.parametrize(
    ("path", "is_home"), [("/h/.cache", True), ("/h/.cache/baton/models", True), ("/h/other", False), (None, False)]
)
def test_a_home_that_cannot_be_written_or_made_is_told_with_what_to_set(
    path: str | None, is_home: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: list[str]) -> int:
        raise OSError(30, "Read-only file system", path)

    monkeypatch.setenv("BATON_HOME", "/h/.cache/baton")
    monkeypatch.setattr(command_line, "_dispatch", fails)
    assert command_line.main(["models"]) == command_line.EXIT_FAILURE
    assert ("set BATON_HOME" in capsys.readouterr().err) == is_home
