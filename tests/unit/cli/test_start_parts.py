"""Tests what the start's screen draws of what it hears, on terminals of several widths and abilities."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyte
import pytest
from rich.console import Console

from baton.v1 import control_pb2
from services.cli.child import Ready
from services.cli.cluster_output import is_screen_wanted
from services.cli.cluster_status import ClusterStatus
from services.cli.run_log import RunLog
from services.cli.start_screen import StartScreen
from services.core.start_progress import StartProgress, from_report, to_line

ROUTER = Ready(port=1, metrics_port=2, pid=3, http_port=4, control_port=5)
JOINING, UP = control_pb2.WORKER_STATE_JOINING, control_pb2.WORKER_STATE_READY


class Drawn:
    """Represents a screen on a terminal that is emulated."""

    def __init__(self, folder: Path, columns: int = 100, encoding: str = "utf-8", **about: Any) -> None:
        self._bytes = io.BytesIO()
        self._file = io.TextIOWrapper(self._bytes, encoding=encoding, newline="\r\n", write_through=True)
        console = Console(
            file=self._file, force_terminal=True, width=columns, height=40, highlight=False, legacy_windows=False
        )
        self.log = RunLog(folder)
        self.columns = columns
        self.now_s = 0.0
        self.screen = StartScreen(
            self.log,
            "token",
            **{"host": "127.0.0.1", "model_id": "tiny", **about},
            drain_s=30.0,
            console=console,
            now=lambda: self.now_s,
        )

    def echo_ctrl_c(self) -> None:
        """Does what a terminal does by itself when somebody presses it."""
        self._file.write("^C")

    def rows(self) -> list[str]:
        terminal = pyte.Screen(self.columns, 60)
        pyte.ByteStream(terminal).feed(self._bytes.getvalue())
        return [row.rstrip() for row in terminal.display if row.strip()]


@pytest.fixture
def drawn(tmp_path: Path) -> Iterator[Drawn]:
    made = Drawn(tmp_path)
    yield made
    made.screen.__exit__(None, None, None)


def refreshed(drawn: Drawn) -> list[str]:
    assert drawn.screen._live is not None
    drawn.screen._live.refresh()
    return drawn.rows()


def test_stages_follow_one_another_with_their_seconds(drawn: Drawn) -> None:
    screen = drawn.screen
    screen.begun("router")
    screen.serving("router", ROUTER)
    screen.begun("decode-0")
    assert refreshed(drawn)[1].split()[-3:] == ["start", "0.0", "s"]
    drawn.now_s = 1.5
    screen.progressed("decode-0", StartProgress("load", "weights", 1, 4))
    assert "━━━━ " in refreshed(drawn)[1]
    assert "load 0.0 s: weights" in drawn.rows()[1]
    drawn.now_s = 3.75
    screen.progressed("decode-0", StartProgress("load", "KV pool", 4, 4))
    assert "━" * 16 + " load 2.2 s: KV pool" in refreshed(drawn)[1]
    drawn.now_s = 5.0
    screen.serving("decode-0", Ready(6, 7, 8))
    assert "canaries 0.0 s: joins the router" in refreshed(drawn)[1]
    screen._take(ClusterStatus({"decode-0": (JOINING, "a canary is under way")}, 0, 2, 1))
    assert "canaries 0.0 s: a canary is under way" in refreshed(drawn)[1]
    assert "1 of 2 pairs proven" in drawn.rows()[2]
    assert not screen._proven.is_set()
    screen._take(ClusterStatus({"decode-0": (UP, "")}, 0, 2, 2))
    assert refreshed(drawn)[1].split("s ", 1)[1].strip() == "start 1.5, load 3.5, canaries 0.0 s"
    assert screen._proven.is_set()


async def test_the_card_comes_when_all_is_proven_and_names_what_there_is(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path, columns=120)
    drawn.screen.begun("router")
    drawn.screen.serving("router", ROUTER)
    drawn.screen.begun("decode-0")
    drawn.screen.serving("decode-0", Ready(6, 7, 8))
    saying = asyncio.create_task(drawn.screen.ready())
    await asyncio.sleep(0)
    assert not any("Baton is ready" in row for row in drawn.rows())
    drawn.screen._take(ClusterStatus({"decode-0": (UP, "")}, 0, 0, 0))
    await saying
    rows = drawn.rows()
    assert rows[2] == "Baton is ready: tiny"
    named = dict(row.split(maxsplit=1) for row in rows if row.startswith("  ") and "Ctrl-C" not in row)
    names = ["console", "HTTP", "gRPC", "control", "log", "try", "chat", "watch"]
    assert [name for name in named if name in names] == names
    assert named["console"] == "http://127.0.0.1:4/"
    assert named["gRPC"] == "127.0.0.1:1"
    assert named["chat"] == "baton chat --target 127.0.0.1:1"
    assert named["watch"] == "baton top --target 127.0.0.1:5"
    drawn.screen.__exit__(None, None, None)


def test_handoffs_are_done_when_all_workers_have_come(drawn: Drawn) -> None:
    """Until then more pairs may come than those that are proven."""
    names = ["prefill-0", "decode-0", "decode-1"]
    for name in names:
        drawn.screen.begun(name)
        drawn.screen.serving(name, Ready(6, 7, 8))
    for state, num_pairs, mark in ((JOINING, 1, False), (UP, 2, True)):
        workers = {**dict.fromkeys(names, (UP, "")), "decode-1": (state, "")}
        drawn.screen._take(ClusterStatus(workers, 0, num_pairs, num_pairs))
        row = next(row for row in refreshed(drawn) if row.startswith("handoffs"))
        assert f"{num_pairs} of {num_pairs} pairs proven" in row
        assert ("✓" in row) == mark


@pytest.mark.parametrize(
    ("about", "router", "lines"),
    [
        ({}, Ready(50051, 2, 3, 4, 50052), ["baton chat", "baton top"]),
        ({"host": "0.0.0.0"}, Ready(50051, 2, 3, 4, 50052), ["baton chat", "baton top"]),
        ({"host": "192.0.2.1"}, Ready(50051, 2, 3, 4, 50052), ["baton chat --target 192.0.2.1:50051", "baton top"]),
        (
            {"cluster_token_file": "/my run/token"},
            Ready(50051, 2, 3, 4, 5),
            ["baton chat", "baton top --target 127.0.0.1:5 --cluster-token-file '/my run/token'"],
        ),
    ],
)
async def test_the_card_has_command_lines_with_no_flag_that_is_not_needed(
    tmp_path: Path, about: dict[str, str], router: Ready, lines: list[str]
) -> None:
    drawn = Drawn(tmp_path, columns=120, **about)
    drawn.screen.begun("router")
    drawn.screen.serving("router", router)
    await drawn.screen.ready()
    rows = [row.split(maxsplit=1) for row in drawn.rows() if row.startswith("  ")]
    assert [rest for name, rest in rows if name in ("chat", "watch")] == lines
    drawn.screen.__exit__(None, None, None)


@pytest.mark.parametrize(
    ("about", "row"),
    [
        ({"has_console": False}, None),
        ({"console_token_file": "/run/token"}, "http://127.0.0.1:4/  (asks for the token in /run/token)"),
    ],
)
async def test_the_console_is_named_as_it_is_served(tmp_path: Path, about: dict[str, str], row: str | None) -> None:
    drawn = Drawn(tmp_path, columns=120, **about)
    drawn.screen.begun("router")
    drawn.screen.serving("router", ROUTER)
    await drawn.screen.ready()
    assert [each.split(maxsplit=1)[1] for each in drawn.rows() if each.startswith("  console")] == (
        [row] if row else []
    )
    drawn.screen.__exit__(None, None, None)


async def test_the_request_to_copy_has_the_key_of_the_environment(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path, columns=240, needs_key=True)
    drawn.screen.begun("router")
    drawn.screen.serving("router", ROUTER)
    await drawn.screen.ready()
    text = "\n".join(drawn.rows())
    assert """/v1/chat/completions -H "authorization: Bearer $BATON_API_KEY" -H 'content-type""" in text
    drawn.screen.__exit__(None, None, None)


async def test_without_http_there_is_no_console(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path, host="0.0.0.0")
    drawn.screen.begun("router")
    drawn.screen.serving("router", Ready(1, 2, 3, 0, 5))
    await drawn.screen.ready()
    text = "\n".join(drawn.rows())
    assert "http:" not in text
    assert "console" not in text
    assert "baton generate --target 127.0.0.1:1 " in text
    drawn.screen.__exit__(None, None, None)


@pytest.mark.parametrize("columns", [24, 64, 100])
def test_an_echoed_ctrl_c_leaves_no_row_twice(tmp_path: Path, columns: int) -> None:
    drawn = Drawn(tmp_path, columns)
    drawn.screen.done("model", "tiny  (/a/long/path" + "/and/on" * 40 + ")", 1.0)
    drawn.screen.begun("decode-0")
    drawn.screen.progressed("decode-0", StartProgress("load", "w" * 300, 1, 2))
    refreshed(drawn)
    drawn.echo_ctrl_c()
    assert [row.split()[0] for row in refreshed(drawn)] == ["model", "decode-0"]
    drawn.echo_ctrl_c()
    drawn.screen.stopping("SIGINT")
    drawn.screen.stopped("stopped")
    assert [row.split()[0] for row in drawn.rows() if row[0] in "md"] == ["model", "decode-0"]
    drawn.screen.__exit__(None, None, None)


def test_warnings_are_shown_and_many_are_counted(drawn: Drawn) -> None:
    line = "12:00:00.000 {} decode-0 services.x: it \x1b[31mhappened {}\n"
    for number in range(12):
        os.write(drawn.log.fd, line.format("WARNING", number).encode())
    os.write(drawn.log.fd, line.format("INFO ", "quietly").encode())
    drawn.screen._show_news()
    rows = drawn.rows()
    assert rows[0] == "WARNING decode-0 services.x: it \\x1b[31mhappened 0"
    assert len([row for row in rows if row.startswith("WARNING")]) == 10
    assert rows[10].startswith("and 2 more in ")
    assert "quietly" not in "".join(rows)


def test_while_it_drains_only_errors_are_shown(drawn: Drawn) -> None:
    drawn.screen.begun("router")
    drawn.screen.serving("router", ROUTER)
    drawn.screen.stopping("SIGINT")
    os.write(drawn.log.fd, b"12:00:00.000 WARNING decode-0 a: router lost\n12:00:00.000 ERROR decode-0 a: broken\n")
    drawn.screen._take(ClusterStatus({}, 3, 0, 0))
    drawn.now_s += 4.0
    drawn.screen._take(ClusterStatus({}, 3, 0, 0))
    assert any(row.endswith("3 requests run still: 4 s of at most 30") for row in refreshed(drawn))
    drawn.screen._take(None)
    assert any(row.endswith("ending the processes") for row in refreshed(drawn))
    drawn.screen._show_news()
    drawn.screen.stopped("stopped")
    rows = drawn.rows()
    assert not any("lost" in row for row in rows)
    assert rows[-2:] == ["ERROR decode-0 a: broken", "stopped"]


def test_a_terminal_that_has_gone_stops_nothing(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path)

    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    drawn.screen._console.print = fail
    drawn.screen.event("decode-0 died")
    drawn.screen.event("decode-0 died again")
    drawn.screen.__exit__(None, None, None)


def test_a_terminal_without_unicode(tmp_path: Path) -> None:
    drawn = Drawn(tmp_path, encoding="ascii")
    drawn.screen.begun("router")
    refreshed(drawn)
    drawn.screen.serving("router", ROUTER)
    drawn.screen.begun("decode-0")
    drawn.screen.ended("decode-0")
    rows = refreshed(drawn)
    assert rows[-2].split()[:2] == ["router", "ok"]
    assert rows[-1].split()[:2] == ["decode-0", "!!"]
    drawn.screen.__exit__(None, None, None)


@pytest.mark.parametrize("columns", [24, 40, 63, 64, 100, 200])
def test_no_row_is_wider_than_the_terminal(tmp_path: Path, columns: int) -> None:
    drawn = Drawn(tmp_path, columns)
    drawn.screen.done("model", "a-model (/a/very/long/path" + "/and/on" * 40 + ")", 1.0)
    drawn.screen.begun("a-worker-with-a-name-that-goes-on-0")
    drawn.screen.progressed("a-worker-with-a-name-that-goes-on-0", StartProgress("load", "w" * 300, 1, 2))
    assert [row[0] for row in refreshed(drawn)] == ["m", "a"], "two parts are two rows"
    drawn.screen.__exit__(None, None, None)


def test_hostile_names_do_not_reach_the_terminal(drawn: Drawn) -> None:
    drawn.screen.begun("w\x1b]0;up\x07")
    drawn.screen.progressed("w\x1b]0;up\x07", StartProgress("[red]load[/]", "\x1b[2J\u202e", 0, 0))
    (row,) = refreshed(drawn)
    assert row.startswith("w\\x1b]0;up\\x07 ")
    assert "[red]load[/] 0.0 s: \\x1b[2J\\u202e" in row


def test_a_screen_is_for_terminals_and_for_whoever_asks_for_no_log() -> None:
    assert not is_screen_wanted(None, {"TERM": "xterm"}), "pytest has no terminal"
    assert not is_screen_wanted("info", {"TERM": "xterm"})


def test_progress_crosses_a_pipe() -> None:
    progress = StartProgress("load", "weights", 2, 5)
    assert from_report(json.loads(to_line(progress))) == progress
    assert from_report({"port": 1}) is None
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_report({"progress": {"stage": "load"}})
