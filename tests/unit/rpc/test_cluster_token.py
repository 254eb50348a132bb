"""Tests where the cluster token comes from, and which files are refused."""

from __future__ import annotations

import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from services.core import cluster_token as module
from services.core.cluster_token import cluster_token
from services.core.errors import ConfigError

TOKEN = "0123456789abcdef"


def private(path: Path, text: str = TOKEN) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_the_default_file_is_made_once_and_private(tmp_path: Path) -> None:
    environ = {"BATON_HOME": str(tmp_path / "not" / "there" / "yet")}
    token = cluster_token(environ=environ)
    file = tmp_path / "not" / "there" / "yet" / "cluster-token"
    assert file.read_text() == token + "\n"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert cluster_token(environ=environ) == token
    assert [path.name for path in file.parent.iterdir()] == ["cluster-token"], "no draft is left"


def test_it_is_private_from_its_first_moment_whatever_the_umask(tmp_path: Path) -> None:
    modes = []
    link = os.link

    def noted(source: Path, target: Path) -> None:
        modes.append(stat.S_IMODE(os.stat(source).st_mode))
        link(source, target)

    before = os.umask(0)
    try:
        with mock.patch.object(os, "link", noted):
            cluster_token(environ={"BATON_HOME": str(tmp_path)})
    finally:
        os.umask(before)
    assert modes == [0o600]


def test_all_who_start_together_get_the_same(tmp_path: Path) -> None:
    """Each finds no file, and makes one: the first that is linked is everybody's."""
    make, together = module._make, threading.Barrier(16)

    def made_together(file: Path, flag: str) -> None:
        together.wait(10.0)
        make(file, flag)

    with ThreadPoolExecutor(16) as threads, mock.patch.object(module, "_make", made_together):
        tokens = list(threads.map(lambda _: cluster_token(environ={"BATON_HOME": str(tmp_path)}), range(16)))
    assert len(set(tokens)) == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_named_file_comes_before_the_variable_and_that_before_the_default(tmp_path: Path) -> None:
    environ = {"BATON_CLUSTER_TOKEN": "of-the-variable-", "BATON_HOME": str(tmp_path)}
    assert cluster_token(str(private(tmp_path / "file", f"  {TOKEN}\n")), environ) == TOKEN
    assert cluster_token(environ=environ) == "of-the-variable-"
    assert not (tmp_path / "cluster-token").exists()


def test_who_makes_none_has_none_but_from_a_file_that_is_named(tmp_path: Path) -> None:
    environ = {"BATON_HOME": str(tmp_path / "home")}
    assert cluster_token(environ=environ, make=False) == ""
    with pytest.raises(ConfigError, match=r"^--cluster-token-file: there is no .*file; name the file"):
        cluster_token(str(tmp_path / "file"), environ, make=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "bad", ["", "short", "x" * 257, "with space 123456", "with\nnewline123456", "ünïcode-123456789"]
)
def test_what_is_no_token_is_refused_without_being_shown(tmp_path: Path, bad: str) -> None:
    with pytest.raises(ConfigError, match=r"^BATON_CLUSTER_TOKEN: a token has 16 to 256") as of_variable:
        cluster_token(environ={"BATON_CLUSTER_TOKEN": bad})
    with pytest.raises(ConfigError, match=r"^--cluster-token-file: .*file: a token has") as of_file:
        cluster_token(str(private(tmp_path / "file", bad)), {})
    for error in (of_variable, of_file):
        assert not bad or bad not in str(error.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o660, 0o602])
def test_a_file_that_others_may_open_is_refused(tmp_path: Path, mode: int) -> None:
    file = private(tmp_path / "file")
    file.chmod(mode)
    with pytest.raises(ConfigError, match=r"^--cluster-token-file: other users may open .*chmod 600"):
        cluster_token(str(file), {})


def test_another_users_file_is_refused(tmp_path: Path) -> None:
    """Whoever made it knows what is in it."""
    file = private(tmp_path / "file")
    with mock.patch.object(os, "getuid", return_value=file.stat().st_uid + 1):
        if file.stat().st_uid == 0:
            os.chown(file, 4711, -1)
        with pytest.raises(ConfigError, match=r"belongs to user \d+, who may know the token"):
            cluster_token(str(file), {})


def test_a_secret_on_a_read_only_mount_is_taken_as_it_is(tmp_path: Path) -> None:
    file = private(tmp_path / "file")
    file.chmod(0o444)
    mounted = mock.Mock(f_flag=os.ST_RDONLY)
    with mock.patch.object(os, "fstatvfs", return_value=mounted):
        assert cluster_token(str(file), {}) == TOKEN


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path, tmp_path / "fifo"):
        with pytest.raises(ConfigError, match="not a regular file"):
            cluster_token(str(path), {})


def test_a_file_that_cannot_be_made_says_what_to_do(tmp_path: Path) -> None:
    private(tmp_path / "file")
    with pytest.raises(ConfigError, match=r"^--cluster-token-file: .*or set BATON_CLUSTER_TOKEN$"):
        cluster_token(str(tmp_path / "file" / "below"), {})
