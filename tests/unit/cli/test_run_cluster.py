"""Tests the cluster that `baton run` starts, with a program in the place of `baton up`."""

from __future__ import annotations

import contextlib
import subprocess
import sys

import psutil
import pytest

from services.cli import run
from services.core.errors import BatonError
from tests.support import ROOT
from tests.support.patience import HANG_S

pytestmark = pytest.mark.process

SERVES = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print("model  tiny"), print("router       127.0.0.1:5  pid 9"), print("ready", flush=True)
signal.pause()
"""


@pytest.fixture(autouse=True)
def no_download(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "resolve_model", lambda model: None)


@pytest.mark.parametrize("failure", [None, BatonError("no answer"), SystemExit(1)])
def test_it_is_ended_in_order_whatever_happens(failure: BaseException | None) -> None:
    expected = contextlib.nullcontext() if failure is None else pytest.raises(type(failure))
    with expected, run.cluster("tiny", stay=False, program=(sys.executable, "-S", "-c", SERVES)) as (up, target):
        assert target == "127.0.0.1:5"
        assert up.poll() is None
        if failure is not None:
            raise failure
    assert up.returncode == 7


def test_one_that_ends_before_it_is_ready_is_told() -> None:
    program = (sys.executable, "-S", "-c", "print('router 127.0.0.1:5')")
    with pytest.raises(BatonError, match="the cluster has ended before it was ready"):
        with run.cluster("tiny", stay=True, program=program):
            pytest.fail("it is not there")


def test_it_ends_with_whoever_has_started_it_also_if_that_is_killed() -> None:
    program = (
        "import os, sys; fd = int(sys.argv[sys.argv.index('--lifeline-fd') + 1]); "
        "print('router', os.getpid()); print('ready', flush=True); os.read(fd, 1)"
    )
    starts = (
        "import sys, time; from services.cli import run; run.resolve_model = lambda model: None\n"
        f"with run.cluster('tiny', stay=False, program=(sys.executable, '-S', '-c', {program!r})) as (_, pid):\n"
        "    print(pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", starts], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        cluster = psutil.Process(int(process.stdout.readline()))
        process.kill()
    cluster.wait(HANG_S)
