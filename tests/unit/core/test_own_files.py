"""Tests that no link in a folder of Baton's makes it write elsewhere, and that files with text are private."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.model_cache import new_entry
from services.cli.run_log import RunLog
from services.cli.sim_flags import write_named
from services.core.errors import ConfigError
from services.core.own_files import opened, write_whole
from services.engine.native.build import copy_library
from services.rpc.telemetry import TraceFileExporter
from services.sim.profile import WorkerProfile, write_profile
from services.worker.kept_verdicts import KeptVerdicts
from tests.support.full_disk import full_disk

KEPT = "what somebody else's file has"


def pull(folder: Path) -> None:
    with new_entry(folder / "org--model", "org/model", "here") as workspace:
        assert workspace is not None
        (workspace / "model").mkdir()


def keep_profile(folder: Path) -> None:
    write_profile(folder / "profile.json", WorkerProfile("made", 1.0, 1.0, 1.0))


def keep_kernels(folder: Path) -> None:
    (folder / "built").write_bytes(b"library")
    assert copy_library(folder / "built", folder / "kernels.so")


def keep_verdict(folder: Path) -> None:
    KeptVerdicts(folder / "w.verdicts").add(7)


PLACES: list[tuple[Callable[[Path], None], str]] = [
    (pull, ".org--model.lock"),
    (keep_profile, "profile.json"),
    (keep_kernels, "kernels.so"),
    (keep_verdict, "w.verdicts"),
    (keep_kernels, f"copying-{os.getpid()}-kernels.so"),
]


@pytest.mark.parametrize(
    ("write", "name"), PLACES, ids=lambda value: getattr(value, "__name__", value).replace(str(os.getpid()), "PID")
)
@pytest.mark.parametrize("exists", [True, False], ids=["file", "nothing"])
def test_a_link_leads_nowhere(tmp_path: Path, write: Callable[[Path], None], name: str, exists: bool) -> None:
    other, folder = tmp_path / "other", tmp_path / "home"
    folder.mkdir()
    if exists:
        other.write_text(KEPT)
    (folder / name).symlink_to(other)
    with contextlib.suppress(OSError):
        write(folder)
    assert other.exists() == exists
    assert not exists or other.read_text() == KEPT


def name_figures(folder: Path) -> None:
    write_named(folder / "figures.json", "{}\n", "--json")


@pytest.mark.parametrize("write", [keep_profile, keep_verdict, name_figures])
@pytest.mark.parametrize("exists", [True, False], ids=["file", "nothing"])
def test_a_full_disk_costs_no_file_and_leaves_none(tmp_path: Path, write: Callable[[Path], None], exists: bool) -> None:
    if exists:
        write(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with full_disk(), contextlib.suppress(OSError, ConfigError):
        write(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_what_is_named_is_written_into_a_link_or_a_pipe_that_is_there(tmp_path: Path) -> None:
    """Such as /dev/stdout."""
    target, link = tmp_path / "target", tmp_path / "link"
    link.symlink_to(target)
    for content in ("first", "second"):
        write_named(link, content, "--json")
        assert link.is_symlink()
        assert target.read_text() == content
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_named(tmp_path / "pipe", "figures", "--json")
        assert os.read(reader, 100) == b"figures"
    finally:
        os.close(reader)


def test_a_file_that_is_written_again_is_read_by_those_who_could(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    name_figures(tmp_path)
    figures.chmod(0o640)
    name_figures(tmp_path)
    assert stat.S_IMODE(figures.stat().st_mode) == 0o640


def test_a_log_that_is_set_aside_goes_where_no_link_leads(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text(KEPT)
    log = RunLog(tmp_path / "home")
    log.path.with_suffix(".log.1").symlink_to(other)
    log._turn()
    assert other.read_text() == KEPT


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_only_plain_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "it"
    {"link": lambda: path.symlink_to(tmp_path / "other"), "pipe": lambda: os.mkfifo(path), "folder": path.mkdir}[kind]()
    with pytest.raises(OSError, match=r"it"):
        opened(path, os.O_WRONLY | os.O_CREAT)


def test_what_has_text_is_its_users_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        TraceFileExporter(str(tmp_path / "trace.jsonl")).shutdown()
        write_whole(tmp_path / "whole", b"text")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()] == [0o600, 0o600]
