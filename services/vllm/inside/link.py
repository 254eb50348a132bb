"""Connects a process of vLLM to its worker, and ends that process when the worker is gone."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from typing import Any

from services.vllm import messages
from services.vllm.keeper import die_with_parent
from services.vllm.messages import JsonMessage, Lines

_MOST_BYTES = 1 << 16


class Link:
    """Is a connection to the worker. `send` may be called on any thread."""

    def __init__(self, path: str, who: str, rank: int = 0) -> None:
        die_with_parent()
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._lock = threading.Lock()
        self._late = bytearray()
        self.send(messages.HELLO, who=who, rank=rank, pid=os.getpid())
        threading.Thread(target=self._beat, name="baton-beat", daemon=True).start()

    def send(self, kind: str, **fields: Any) -> None:
        """Sends a message. It waits while the worker reads nothing; where there is no worker the process ends."""
        try:
            with self._lock:
                late, self._late = self._late, bytearray()
                self._socket.sendall(late + _encode(kind, fields))
        except OSError:
            _end()

    def send_late(self, kind: str, **fields: Any) -> None:
        """Sends a message with the next one, at the latest with a beat: nobody waits for it, and to read it would take
        processor time from the step that runs."""
        with self._lock:
            self._late += _encode(kind, fields)

    def receive_with_descriptor(self) -> tuple[JsonMessage, int]:
        """Returns the worker's only message to a rank, and the descriptor that comes with it."""
        data, descriptors, _, _ = socket.recv_fds(self._socket, _MOST_BYTES, 1)
        if not data:
            _end()
        (message,) = Lines().feed(data)
        (descriptor,) = descriptors
        return message, descriptor

    def _beat(self) -> None:
        while True:  # until there is no worker: so a process that is sent nothing ends too
            time.sleep(messages.BEAT_S)
            self.send(messages.BEAT)

    @property
    def socket(self) -> socket.socket:
        return self._socket


def _encode(kind: str, fields: dict[str, Any]) -> bytes:
    return messages.encode({"kind": kind, **fields, "at": time.monotonic()})


def _end() -> None:
    """Ends this process at once: handlers of vLLM would wait for others that are gone too."""
    os.kill(os.getpid(), signal.SIGKILL)
