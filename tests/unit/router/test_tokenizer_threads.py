"""Tests that the threads that tokenise long texts follow the cores of the process, unless the flag says how many there
are."""

from __future__ import annotations

import argparse
import os

import pytest

from services.core.config import add_arguments, load
from services.router.main import RouterConfig, tokenizer_threads


def _threads(monkeypatch: pytest.MonkeyPatch, num_cores: int, *flags: str) -> int:
    """Returns the number on a machine of 128 cores of which the process may use `num_cores`."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(num_cores)))
    monkeypatch.setattr(os, "cpu_count", lambda: 128)
    parser = argparse.ArgumentParser()
    add_arguments(parser, RouterConfig)
    return tokenizer_threads(load(RouterConfig, parser.parse_args(["--model", "m", *flags]), {}))


@pytest.mark.parametrize(("num_cores", "num_threads"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (96, 48)])
def test_they_are_half_of_the_cores_that_the_process_may_use(
    monkeypatch: pytest.MonkeyPatch, num_cores: int, num_threads: int
) -> None:
    """There is at least one, and on more than one core they are never all: the event loop needs one."""
    assert _threads(monkeypatch, num_cores) == num_threads
