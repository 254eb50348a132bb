"""Lets tests say what the processes of `scripted_vllm` do. A control is a file; several processes look at it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path


class Controls:
    """Has these names: hold-load, hold-prefill, hold-decode (steps that do that stop before they do it), hold-gone
    (steps that would say that a sequence is gone), hold-output (the last output of a sequence), hold-save and
    hold-last-gone (of rank 1), refuse; and each once: fail-load, preempt. At the start: exit, broken, never-ready,
    share."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)

    def set(self, name: str) -> None:
        (self.folder / name).touch()

    def clear(self, name: str) -> None:
        (self.folder / name).unlink(missing_ok=True)

    def is_set(self, name: str) -> bool:
        return (self.folder / name).exists()

    def is_held(self, name: str) -> bool:
        """Returns whether something waits because of the control."""
        return self.is_set(f"{name}.held")

    @contextlib.contextmanager
    def held(self, name: str) -> Iterator[None]:
        self.set(name)
        try:
            yield
        finally:
            self.clear(name)

    def take(self, name: str) -> bool:
        """Returns whether the control is set, and clears it."""
        if not self.is_set(name):
            return False
        self.clear(name)
        return True

    def wait_while(self, name: str) -> None:
        if not self.is_set(name):
            return
        self.set(f"{name}.held")
        while self.is_set(name):
            time.sleep(0.002)
        self.clear(f"{name}.held")
