"""Tests `baton up` on a terminal, with real services over a tiny model: its start, its card, what is out of order, its
end. What is looked at is what a terminal shows, and not what was written to it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2_grpc
from tests.support.cluster import greedy_request
from tests.support.models import tiny_model
from tests.support.processes import BATON, baton, environment
from tests.support.terminal import Terminal

pytestmark = pytest.mark.process

READY = "Ctrl-C drains and stops"
STAGES = ("import", "load", "warm-up", "canaries")
"""Of a worker, and of these a short one may have passed between two looks."""
PARTS = ("model", "dtype", "router", "prefill-0", "decode-0", "handoffs")


def up(folder: Path, *flags: str, columns: int = 100, model: Path | None = None, **settings: str) -> Terminal:
    model = model or tiny_model("llama", folder)
    temp = folder / "temp"
    temp.mkdir()
    command = [*BATON, "up", "--model", str(model), "--port", "0", "--dtype", "float32", "--kv-blocks", "64"]
    about = {"TERM": "xterm-256color", "XDG_STATE_HOME": str(folder / "state"), "PYTHONIOENCODING": "utf-8"}
    return Terminal(
        [*command, "--split", "always", *flags], folder, environment(temp) | about | settings, columns=columns
    )


def logs(folder: Path) -> list[Path]:
    return sorted((folder / "state" / "baton" / "logs").glob("*"))


def card(terminal: Terminal) -> dict[str, str]:
    """Returns the card's rows, as they are when they are copied from the terminal."""
    _, _, rest = terminal.unwrapped().partition("Baton is ready: ")
    rows = re.findall(r"^  (console|HTTP|gRPC|control|log|try|chat|watch) +(.*?) *$", rest, re.M)
    return dict(rows)


def test_the_start_is_shown_then_where_everything_is_and_what_a_drain_waits_for(tmp_path: Path) -> None:
    with up(tmp_path) as terminal:
        terminal.read_until(READY)
        for worker in ("prefill-0", "decode-0"):
            rows = [row for text in terminal.seen for row in text.splitlines() if row.startswith(worker)]
            stages = [
                match[1] for row in rows if (match := re.search(r"━ (import|load|warm-up|canaries) [\d.]+ s: \S", row))
            ]
            assert {"import", "load"} <= set(stages) <= set(STAGES), rows[::10]
            assert list(dict.fromkeys(stages)) == [stage for stage in STAGES if stage in stages], "one after the other"
            assert re.search(r"✓ +[\d.]+ s start .*, import .*, load .*, warm-up .*, canaries [\d.]+ s$", rows[-1])
        assert [row.split()[0] for row in terminal.rows()[: len(PARTS)]] == list(PARTS), (
            "each once, with nothing between"
        )
        found = card(terminal)
        address = found["HTTP"].split()[0]
        assert found["console"] == f"{address.removesuffix('/v1')}/"
        status = baton(["status", "--target", found["control"].split()[0], "--json"], tmp_path)
        assert json.loads(status.stdout)["ready"], status.stderr
        if shutil.which("curl"):
            answer = subprocess.run(shlex.split(found["try"]), capture_output=True, timeout=60, check=True).stdout
            assert json.loads(answer)["choices"][0]["message"]["role"] == "assistant"
        for command, more in (("chat", []), ("watch", ["--once"])):
            name, *arguments = shlex.split(found[command])
            assert name == "baton"
            ran = baton([*arguments, *more], tmp_path)
            assert ran.returncode == 0, ran.stderr
        assert "prefill-0" in ran.stdout
        assert logs(tmp_path) == [Path(found["log"])]
        log = Path(found["log"]).read_text()
        assert all(f" INFO  {name} " in log for name in ("router", "prefill-0", "decode-0"))
        assert " INFO " not in terminal.text()
        assert logs(tmp_path)[0].stat().st_mode & 0o077 == 0, "others do not read it"

        with grpc.insecure_channel(found["gRPC"]) as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            events = iter(stub.GenerateStream(greedy_request(range(3, 20), 900), timeout=120))
            assert next(event for event in events if event.HasField("chunk"))
            terminal.press_ctrl_c()
            terminal.read_until(r"1 request runs still")
            assert any(event.HasField("completion") for event in events), "it was not cut off"
        assert terminal.wait() == 0
        end = terminal.text().partition(READY)[2]
        assert re.search(r"\nstopping \(SIGINT\): .*Ctrl-C once more stops at once\nstopped$", end), end
        assert not terminal.screen.cursor.hidden


def test_a_narrow_terminal_a_killed_worker_and_a_second_ctrl_c(tmp_path: Path) -> None:
    with up(tmp_path, columns=50) as terminal:
        terminal.read_until(READY)
        for text in terminal.seen:
            drawn = [row.split()[0] for row in text.partition("Baton is ready")[0].splitlines() if row]
            assert drawn == list(PARTS[: len(drawn)]), "no row is cut into two, or left behind"
        assert Path(card(terminal)["log"]) == logs(tmp_path)[0]
        terminal.child("decode").kill()
        terminal.read_until(
            r"decode-0 has ended; its last lines:\n(  \S.*\n)+decode-0 died \(killed by SIGKILL\); restarting"
        )
        terminal.read_until(r"decode-0 serves again  pid \d+")
        terminal.child("router").send_signal(signal.SIGSTOP)  # it does not drain, so that there is time for a second
        terminal.press_ctrl_c()
        terminal.read_until(r"stopping \(SIGINT\)")
        terminal.press_ctrl_c()
        assert terminal.wait() == 130
        assert terminal.rows()[-1] == "stopped at once"
        assert not terminal.screen.cursor.hidden


def test_ctrl_c_in_the_middle_of_the_start_leaves_each_row_once(tmp_path: Path) -> None:
    with up(tmp_path) as terminal:
        terminal.read_until(r"(?m)^decode-0 .* (import|load) ")
        terminal.press_ctrl_c()
        assert terminal.wait() in (0, 130)
        rows = [row.split()[0] for row in terminal.rows() if row.split()]
        assert [name for name in rows if name in PARTS] == [name for name in PARTS if name in rows]
        assert {"model", "decode-0"} <= set(rows)


def test_a_model_that_cannot_be_loaded(tmp_path: Path) -> None:
    model = tiny_model("llama", tmp_path)
    (weights,) = model.glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:2000])
    with up(tmp_path, model=model) as terminal:
        assert terminal.wait(120.0) == 1
        text = terminal.unwrapped()
        assert re.search(
            r"(prefill|decode)-0 has ended; its last lines:\n(  .*\n)*  baton (prefill|decode): error: .*damaged", text
        )
        assert re.search(r"✗ .*failed in load$", terminal.text(), re.M)
        assert f"all that the processes wrote: {logs(tmp_path)[0]}" in text
        assert re.search(
            r"baton up: error: (prefill|decode)-0 could not start \(exit status 1\); its message is above$",
            text.strip(),
        )
        assert not terminal.screen.cursor.hidden


def test_what_fails_before_anything_is_drawn_is_one_line(tmp_path: Path) -> None:
    with up(tmp_path, model=tmp_path) as terminal:
        assert terminal.wait() == 1
        assert terminal.unwrapped().strip() == f"baton up: error: {tmp_path} holds no model: config.json is missing"
        assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("flags", "settings"), [(("--log-level", "info"), {}), ((), {"BATON_LOG_LEVEL": "info"}), ((), {"TERM": "dumb"})]
)
def test_whoever_asks_for_logs_gets_lines(tmp_path: Path, flags: tuple[str, ...], settings: dict[str, str]) -> None:
    with up(tmp_path, *flags, columns=200, **settings) as terminal:
        terminal.read_until(r" INFO  router ")
        terminal.read_until(r"(?m)^router +127\.0\.0\.1:\d+ +metrics http")
        terminal.press_ctrl_c()
        assert terminal.wait() == 0
        assert re.search(r"(?m)^(\^C)?stopping \(SIGINT\); once more to stop at once$", terminal.text())
        assert not (tmp_path / "state").exists()


def test_a_taken_port_is_said_before_anything_is_drawn(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with up(tmp_path, "--port", str(port)) as terminal:
            assert terminal.wait() == 2
            assert re.fullmatch(
                rf"baton up: error: --port: cannot listen on 127.0.0.1:{port}: .*", terminal.unwrapped().strip()
            )
    assert not (tmp_path / "state").exists()
