"""Tests a service's life in a process of its own: readiness, signals, and the end of its supervisor."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from services.core.lifecycle import Lifecycle
from tests.support import ROOT

pytestmark = pytest.mark.process

WAIT_S = 30.0

# Reports ready, says how it was stopped, and ends according to its first argument.
SERVICE = """
import asyncio, sys, threading
from services.core.lifecycle import Lifecycle, run

how, ready_fd, lifeline_fd = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
lifecycle = Lifecycle(ready_fd=ready_fd, lifeline_fd=lifeline_fd, drain_s=30.0, orphan_grace_s=0.1)
lifecycle.watch_lifeline()

async def serve():
    if how == "busy":                        # the loop never gets to hear of anything
        lifecycle.report_ready(port=1, metrics_port=2)
        while True:
            sum(range(10000))
    lifecycle.report_ready(port=1, metrics_port=2)
    await lifecycle.stopping.wait()
    print("stopping", lifecycle.drain_s, flush=True)
    if how == "stuck":
        await asyncio.Event().wait()

if how == "loading":
    lifecycle.report_ready(port=1, metrics_port=2)
    threading.Event().wait()
run(serve, lifecycle)
"""


class Service:
    def __init__(self, how: str) -> None:
        ready_read, ready_write = os.pipe()
        lifeline_read, self.lifeline = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-c", SERVICE, how, str(ready_write), str(lifeline_read)],
            pass_fds=(ready_write, lifeline_read),
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        os.close(ready_write)
        os.close(lifeline_read)
        with os.fdopen(ready_read) as pipe:
            self.report = json.loads(pipe.read())  # to the end of file: the service closes it after one line

    def cut_lifeline(self) -> None:
        os.close(self.lifeline)
        self.lifeline = -1

    def output(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        if self.lifeline >= 0:
            self.cut_lifeline()


@pytest.fixture
def service(request: pytest.FixtureRequest) -> Iterator[Service]:
    running = Service(request.param)
    yield running
    running.close()


def how(word: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("service", [word], indirect=True)


@how("good")
def test_reports_its_ports_and_pid(service: Service) -> None:
    assert service.report == {
        "port": 1,
        "metrics_port": 2,
        "http_port": 0,
        "control_port": 0,
        "pid": service.process.pid,
    }


@how("good")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_stops_it(service: Service, number: signal.Signals) -> None:
    service.process.send_signal(number)
    assert service.output() == "stopping 30.0"
    assert service.process.wait(WAIT_S) == 0


@how("stuck")
def test_second_signal_ends_it_at_once(service: Service) -> None:
    service.process.send_signal(signal.SIGINT)
    assert service.output() == "stopping 30.0"
    service.process.send_signal(signal.SIGINT)
    assert service.process.wait(WAIT_S) == 128 + signal.SIGINT


@how("good")
def test_orphan_stops_by_itself(service: Service) -> None:
    service.cut_lifeline()
    assert service.output() == "stopping 0.1"
    assert service.process.wait(WAIT_S) == 0


@pytest.mark.parametrize("service", ["stuck", "busy", "loading"], indirect=True)
def test_orphan_ends_whatever_it_is_doing(service: Service) -> None:
    service.cut_lifeline()
    assert service.process.wait(WAIT_S) == 1


async def test_by_hand_there_is_no_one_to_tell() -> None:
    lifecycle = Lifecycle()
    lifecycle.watch_lifeline()
    lifecycle.report_ready(port=1, metrics_port=2)
    lifecycle.stop("test")
    await asyncio.wait_for(lifecycle.stopping.wait(), WAIT_S)


def test_supervisor_that_stopped_listening_is_no_error() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    lifecycle = Lifecycle(ready_fd=write_fd)
    lifecycle.report_ready(port=1, metrics_port=2)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)
