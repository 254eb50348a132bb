"""Runs a Redis-compatible server that tests may kill, stop and start again. Debian's `redis-server` or `valkey-server`
is enough; CI installs it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from benchmarks.ports import free_ports

SERVER = shutil.which("redis-server") or shutil.which("valkey-server")
WITHOUT = "needs redis-server or valkey-server"


class RedisServer:
    """Has a port of its own, and keeps nothing on the disk."""

    def __init__(self, folder: Path) -> None:
        [self.port] = free_ports(1)
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._folder = folder
        self.start()

    def start(self) -> None:
        """Starts it. It answers some time later."""
        assert SERVER is not None
        options = ["--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--dir", str(self._folder)]
        self.process = subprocess.Popen([SERVER, *options], stdout=subprocess.DEVNULL)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
