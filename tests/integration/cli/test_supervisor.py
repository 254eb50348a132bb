"""Tests the supervisor over real processes with nothing in them: order, restarts, and that nothing outlives it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator

import pytest

from services.cli.child import Child, Lifeline, describe_exit
from services.cli.supervisor import Backoff, Supervised
from services.core.errors import WorkerFailed
from services.core.start_progress import StartProgress, to_line
from tests.support import ROOT
from tests.support.processes import PYTHON_PATH, Supervisor

pytestmark = pytest.mark.process

HERE = ROOT / "tests" / "support"
ENVIRON = {**os.environ, "PYTHONPATH": PYTHON_PATH, "GRPC_VERBOSITY": "NONE"}
WAIT_S = 30.0


class FakeUp(Supervisor):
    """`fake_up.py` as a process."""

    def __init__(self, folder: pathlib.Path, behaviour: tuple[str, ...]) -> None:
        self.folder = folder
        for name in ("events", *behaviour):
            (folder / name).touch()
        super().__init__([sys.executable, str(HERE / "fake_up.py"), str(folder)], folder / "stderr", env=ENVIRON)

    def events(self) -> list[tuple[str, str]]:
        lines = (self.folder / "events").read_text().splitlines()
        return [(name, event) for name, event, _ in (line.split() for line in lines)]


@pytest.fixture
def start(tmp_path: pathlib.Path) -> Iterator[Callable[..., FakeUp]]:
    """Starts one; the arguments are files that tell the fakes what to do (see fake_service.py)."""
    started: list[FakeUp] = []

    def start_one(*behaviour: str) -> FakeUp:
        started.append(FakeUp(tmp_path, behaviour))
        return started[-1]

    yield start_one
    for up in started:
        up.process.kill()
        up.process.wait()
        up.process.stdout.close()
        await_gone([int(line.split()[2]) for line in (tmp_path / "events").read_text().splitlines()])


def await_gone(pids: list[int]) -> None:
    """Returns when none of the processes runs any more; fails after a while."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fd = os.pidfd_open(pid)
            try:
                assert select.select([fd], [], [], WAIT_S)[0], f"process {pid} is left behind"
            finally:
                os.close(fd)


def test_ready_then_drained_router_first(start: Callable[..., FakeUp]) -> None:
    up = start()
    up.read_until("^ready$")
    assert set(up.pids()) == {"router", "prefill-0", "decode-0"}
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(WAIT_S) == 0
    events = up.events()
    assert {name for name, event in events if event == "ended"} == {"router", "prefill-0", "decode-0"}
    assert events.index(("router", "ended")) < min(
        events.index((name, "stopping")) for name in ("prefill-0", "decode-0")
    )


def test_sigterm_while_starting_exits_0(start: Callable[..., FakeUp]) -> None:
    up = start()
    up.read_until("^router")
    up.process.send_signal(signal.SIGTERM)
    assert up.process.wait(WAIT_S) == 0


def test_killed_worker_is_restarted_and_said_so(start: Callable[..., FakeUp]) -> None:
    up = start()
    up.read_until("^ready$")
    before = up.pids()
    os.kill(before["decode-0"], signal.SIGKILL)
    assert "killed by SIGKILL" in up.read_until("^decode-0 died")
    up.read_until(r"^decode-0 .*pid")
    after = up.pids()
    assert after["decode-0"] != before["decode-0"]
    assert after["prefill-0"] == before["prefill-0"]


def test_killed_router_comes_back_on_its_port(start: Callable[..., FakeUp]) -> None:
    up = start()
    up.read_until("^ready$")
    target, pid = up.target(), up.pids()["router"]
    os.kill(pid, signal.SIGKILL)
    up.read_until("^router .*pid")
    assert up.target() == target
    assert up.pids()["router"] != pid


def test_kill_9_of_the_supervisor_leaves_nothing(start: Callable[..., FakeUp]) -> None:
    up = start("decode-0.stubborn")
    up.read_until("^ready$")
    up.process.kill()
    await_gone(list(up.pids().values()))


def test_second_signal_ends_at_once(start: Callable[..., FakeUp]) -> None:
    up = start("router.stubborn")
    up.read_until("^ready$")
    up.process.send_signal(signal.SIGINT)
    up.read_until("^stopping")
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(WAIT_S) == 130


def test_child_that_cannot_start_ends_the_cluster(start: Callable[..., FakeUp]) -> None:
    up = start("decode-0.fail")
    assert up.process.wait(WAIT_S) == 1
    assert "decode-0 could not start (exit status 3)" in up.log.read_text()


def script(body: str) -> list[str]:
    return [sys.executable, "-c", "import os, sys, signal\n" + body]


READY = 'os.write(int(sys.argv[2]), b\'{"port": 1, "metrics_port": 2, "pid": 3}\\n\')\n'


@pytest.fixture
def lifeline() -> Iterator[Lifeline]:
    line = Lifeline()
    yield line
    line.close()


def supervised(command: list[str], lifeline: Lifeline, lines: asyncio.Queue[str], **options: float) -> Supervised:
    backoff = Backoff(first_s=0.01, most_s=0.02, **options)  # type: ignore[arg-type]
    return Supervised(
        "fake",
        lambda: command,
        lifeline,
        lines.put_nowait,
        on_ready=lambda ready: lines.put_nowait("up"),
        backoff=backoff,
    )


async def test_restarted_as_often_as_it_dies_once_it_has_been_ready(lifeline: Lifeline) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    place = supervised(script(READY + "sys.exit(7)"), lifeline, lines, num_starts=2)
    keeping = asyncio.create_task(place.keep())
    for _ in range(4):
        assert await lines.get() == "up"
        assert (await lines.get()).startswith("fake died (exit status 7)")
    await place.stop(1.0)
    await keeping


async def test_one_that_left_in_order_is_started_again_at_once_and_is_no_failure(lifeline: Lifeline) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    patient = Backoff(first_s=1e6, most_s=1e6)
    place = Supervised(
        "fake",
        lambda: script(READY + "sys.exit(0)"),
        lifeline,
        lines.put_nowait,
        on_ready=lambda ready: lines.put_nowait("up"),
        backoff=patient,
    )
    keeping = asyncio.create_task(place.keep())
    for _ in range(3):
        assert await lines.get() == "up"
        assert re.fullmatch(r"fake has left \(drained after \d+ s\); starting it again", await lines.get())
    await place.stop(1.0)
    await keeping


async def test_gives_up_on_a_child_that_dies_whenever_it_starts(lifeline: Lifeline) -> None:
    place = supervised(script("os.kill(os.getpid(), signal.SIGKILL)"), lifeline, asyncio.Queue(), num_starts=3)
    with pytest.raises(WorkerFailed, match="died 3 times while starting"):
        await place.keep()


async def test_cancelled_it_kills_the_child(lifeline: Lifeline) -> None:
    lines: asyncio.Queue[str] = asyncio.Queue()
    place = supervised(script("signal.signal(15, signal.SIG_IGN)\n" + READY + "signal.pause()"), lifeline, lines)
    keeping = asyncio.create_task(place.keep())
    assert await lines.get() == "up"
    keeping.cancel()
    with pytest.raises(asyncio.CancelledError):
        await keeping


async def test_child_that_closes_the_pipe_in_silence_is_killed(lifeline: Lifeline) -> None:
    place = supervised(script("os.close(int(sys.argv[2])); signal.pause()"), lifeline, asyncio.Queue(), num_starts=1)
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        await place.keep()


async def test_progress_comes_before_ready_and_the_output_goes_where_it_should(
    lifeline: Lifeline, tmp_path: pathlib.Path
) -> None:
    told: list[StartProgress] = []
    first, second = StartProgress("load", "weights", 0, 2), StartProgress("warm-up")
    body = f"for line in {[to_line(first), to_line(second)]!r}: os.write(int(sys.argv[2]), line)\n"
    body += "print('to stdout', flush=True); print('to stderr', file=sys.stderr)\n"
    log_fd = os.open(tmp_path / "log", os.O_WRONLY | os.O_CREAT)
    child = Child("fake", script(body + READY), lifeline, log_fd)
    os.close(log_fd)
    assert (await child.ready(told.append)).metrics_port == 2
    assert await child.wait() == 0
    assert told == [first, second]
    assert (tmp_path / "log").read_text() == "to stdout\nto stderr\n"


async def test_what_a_place_goes_through_is_told_in_order(lifeline: Lifeline) -> None:
    told: asyncio.Queue[str] = asyncio.Queue()
    place = Supervised(
        "fake",
        lambda: script(f"os.write(int(sys.argv[2]), {to_line(StartProgress('load'))!r})\n" + READY + "sys.exit(7)"),
        lifeline,
        told.put_nowait,
        on_ready=lambda ready: told.put_nowait("ready"),
        backoff=Backoff(first_s=0.01, most_s=0.02),
        on_start=lambda: told.put_nowait("start"),
        on_progress=lambda progress: told.put_nowait(progress.stage),
        on_end=lambda: told.put_nowait("end"),
    )
    keeping = asyncio.create_task(place.keep())
    for _ in range(2):
        heard = [await told.get() for _ in range(5)]
        assert heard[:4] == ["start", "load", "ready", "end"]
        assert heard[4].startswith("fake died (exit status 7)")
    await place.stop(1.0)
    await keeping


@pytest.mark.parametrize("line", ["[]", "{}", "7", "not JSON", '{"progress": {}}', '{"progress": 1}'])
async def test_nonsense_on_the_pipe_is_not_ready(lifeline: Lifeline, line: str) -> None:
    child = Child("fake", script(f"os.write(int(sys.argv[2]), {line.encode()!r} + b'\\n')"), lifeline)
    assert await child.ready() is None
    assert await child.wait() == 0


async def test_deaf_child_is_killed_after_the_grace(lifeline: Lifeline) -> None:
    child = Child("fake", script("signal.signal(15, signal.SIG_IGN)\n" + READY + "signal.pause()"), lifeline)
    assert (await child.ready()).metrics_port == 2
    await child.end(0.05)
    assert await child.wait() == -signal.SIGKILL


@pytest.mark.parametrize(
    ("status", "words"),
    [(0, "exit status 0"), (2, "exit status 2"), (-9, "killed by SIGKILL"), (-40, "killed by signal 40")],
)
def test_describe_exit(status: int, words: str) -> None:
    assert describe_exit(status) == words


def test_backoff_doubles_to_its_limit() -> None:
    backoff = Backoff(first_s=0.5, most_s=4.0)
    assert [backoff.delay_s(n) for n in (1, 2, 3, 4, 5, 1000)] == [0.5, 1.0, 2.0, 4.0, 4.0, 4.0]
