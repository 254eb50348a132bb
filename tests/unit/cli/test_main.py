"""Tests what all commands do about their standard streams: closed, full, gone, or of an encoding with few letters."""

from __future__ import annotations

import io
import os
import sys
import types
from collections.abc import Callable

import pytest
from tqdm import tqdm

from services.cli import main as command_line
from services.cli.cluster_output import PlainOutput

Says = Callable[[str], None]


@pytest.fixture
def says(monkeypatch: pytest.MonkeyPatch) -> Says:
    """Returns what decides what the command `say` prints."""
    module = types.ModuleType("say")
    monkeypatch.setitem(sys.modules, "say", module)
    monkeypatch.setitem(command_line.COMMANDS, "say", ("say", "prints"))

    def decide(text: str) -> None:
        def main(arguments: list[str], prog: str) -> int:
            print(text)
            return 0

        module.main = main  # type: ignore[attr-defined]

    return decide


@pytest.mark.parametrize("arguments", [["say"], ["--version"], ["--help"], ["models", "list", "--help"]])
@pytest.mark.parametrize("is_buffered", [False, True])
def test_a_full_disk_below_standard_output_is_one_line(
    arguments: list[str],
    is_buffered: bool,
    says: Says,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    says("an answer")
    with open("/dev/full", "wb", buffering=-1 if is_buffered else 0) as raw:
        full = io.TextIOWrapper(raw, write_through=not is_buffered)  # type: ignore[type-var]
        monkeypatch.setattr(sys, "stdout", full)
        assert command_line.main(arguments) == command_line.EXIT_FAILURE
        full.flush()  # as the interpreter does at its end
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("error: standard output: No space left on device")


@pytest.mark.parametrize("has_reader", [True, False])
def test_what_standard_error_cannot_take_ends_no_command(
    has_reader: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def download(arguments: list[str], prog: str) -> int:
        with tqdm(total=2, mininterval=0) as bar:
            bar.update(1)
        print("waiting for another", file=sys.stderr, flush=True)
        print("done")
        return 0

    monkeypatch.setitem(sys.modules, "say", types.SimpleNamespace(main=download))
    monkeypatch.setitem(command_line.COMMANDS, "say", ("say", "downloads"))
    reader, writer = os.pipe()
    os.close(reader)
    with open("/dev/full" if has_reader else writer, "w") as bad:
        monkeypatch.setattr(sys, "stderr", bad)
        monkeypatch.setattr(sys, "__stderr__", bad)
        assert command_line.main(["say"]) == 0
        assert command_line.main(["no-such"]) == command_line.EXIT_USAGE
        sys.stderr.flush()  # as the interpreter does at its end
    if has_reader:
        os.close(writer)
    assert capsys.readouterr().out == "done\n"


def test_a_reader_that_has_gone_ends_a_command_without_a_word(
    says: Says, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says("an answer")
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as gone:
        monkeypatch.setattr(sys, "stdout", gone)
        assert command_line.main(["say"]) == command_line.EXIT_FAILURE
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("name", ["stdin", "stdout", "stderr"])
def test_a_stream_that_the_caller_has_closed_is_an_empty_one(
    name: str, says: Says, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, None)
    says("an answer")
    assert command_line.main(["say"]) == 0
    assert command_line.main(["sya"]) == command_line.EXIT_USAGE
    getattr(sys, name).close()


def test_letters_that_the_terminal_lacks_are_escaped(says: Says, monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    says("café … 日")
    assert command_line.main(["say"]) == 0
    assert out.buffer.getvalue() == b"caf\xe9 \\u2026 \\u65e5\n"  # type: ignore[attr-defined]


def test_the_list_of_commands_fits_into_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["--help"]) == 0
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_a_cluster_runs_on_where_what_it_says_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        PlainOutput().event("decode-0 died (killed by SIGKILL); restarting in 0.5 s")
        PlainOutput().stopped("stopped")
