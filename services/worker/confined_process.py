"""Runs a module in a child process that is bounded in time and memory, and asks it questions.

Owns: the process, from its start to its end, and the time and size of an answer. Never: what is asked, or what the
answer means. The child bounds its own memory (`confinement`), and ends when this process does, however that happens.
"""

from __future__ import annotations

import json
import os
import pathlib
import selectors
import signal
import subprocess
import sys
import time
from typing import Any

from services.worker.confinement import LENGTH

_PIECE_BYTES = 1 << 18
_INHERITED = ("HOME", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "PYTHONHOME", "PYTHONPATH", "TZ", "VIRTUAL_ENV")
"""The names of the environment that a child is given: what it needs to start, and no secret."""


_FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGKILL, signal.SIGTERM)
"""Signals that no limit of the child and no defect in it sends: a person or the host has ended it."""
_IDLE_SHARE = 0.05
"""A child that had less of a processor than this has not done what it was asked."""


class ConfinedFailure(Exception):
    """The child gave no answer, and has ended. The message says why, as what the child did: "took more than 5 s"."""


class ConfinedLoss(ConfinedFailure):
    """The child was ended from outside, or had hardly any processor time. It may answer the same question another
    time."""


class ConfinedProcess:
    """Asks one child process, which runs `services.worker.confinement.serve`. One thread at a time may use it;
    `kill` alone may be called by others, and ends what waits for an answer."""

    def __init__(self, module: str, *arguments: str) -> None:
        """Starts `python -m module`, with the arguments."""
        # With the inheritable descriptors 0 to 2 alone, and without a fork in which gRPC's threads were missing.
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        for pipe in (self._stdin, self._stdout):
            os.set_blocking(pipe.fileno(), False)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def has_ended(self) -> bool:
        return self._process.poll() is not None

    def ask(self, question: Any, *, within_s: float, most_bytes: int) -> Any:
        """Returns the answer, which has at most `most_bytes`.

        Raises ConfinedFailure, and ends the process, if there is none within `within_s` seconds.
        """
        content = json.dumps(question, ensure_ascii=False).encode()
        used_s = self._processor_s()
        try:
            return json.loads(self._exchange(LENGTH.pack(len(content)) + content, within_s, most_bytes))
        except TimeoutError:
            is_idle = self._processor_s() - used_s < _IDLE_SHARE * within_s
            failure = (ConfinedLoss if is_idle else ConfinedFailure)(f"took more than {within_s:g} s")
        except ConfinedFailure as error:
            failure = error
        except OSError:
            self.end()  # it has ended or is about to
            failure = self._failure()
        except ValueError:
            failure = ConfinedFailure("gave an answer that is no JSON")
        self.end()
        raise failure from None

    def kill(self) -> None:
        """Sends SIGKILL. Has no effect on a process that has ended. Whoever uses the process must still call `end`."""
        self._process.kill()

    def end(self) -> None:
        """Kills the process and returns when nothing of it is left. Calling it again has no effect."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._stdin, self._stdout):
            pipe.close()

    def _failure(self) -> ConfinedFailure:
        status = self._process.wait()
        if status == -signal.SIGXCPU:
            return ConfinedFailure("took too much processor time")
        if -status in _FROM_OUTSIDE:
            return ConfinedLoss(f"was ended by signal {-status}")
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        return ConfinedFailure(f"ended its process {how}, perhaps for want of memory")

    def _processor_s(self) -> float:
        """Returns the seconds of processor time that the process has used; 0 if it has ended."""
        try:
            fields = pathlib.Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return 0.0
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _exchange(self, question: bytes, within_s: float, most_bytes: int) -> bytes:
        """Raises TimeoutError, ConfinedFailure or OSError."""
        rest, answer = memoryview(question), bytearray()
        until_s = time.monotonic() + within_s
        with selectors.DefaultSelector() as selector:
            selector.register(self._stdin, selectors.EVENT_WRITE)
            selector.register(self._stdout, selectors.EVENT_READ)
            while (remaining_s := until_s - time.monotonic()) > 0:
                for key, _ in selector.select(remaining_s):
                    if key.fileobj is self._stdin:
                        rest = rest[os.write(self._stdin.fileno(), rest[:_PIECE_BYTES]) :]
                        if not rest:
                            selector.unregister(self._stdin)
                        continue
                    if not (piece := os.read(self._stdout.fileno(), _PIECE_BYTES)):
                        raise self._failure()
                    answer += piece
                    if len(answer) >= LENGTH.size and _is_whole(answer, most_bytes):
                        return bytes(answer[LENGTH.size :])
        raise TimeoutError


def _is_whole(answer: bytearray, most_bytes: int) -> bool:
    num_bytes: int = LENGTH.unpack_from(answer)[0]
    if num_bytes > most_bytes:
        raise ConfinedFailure(f"made more than {most_bytes} bytes")
    return len(answer) >= LENGTH.size + num_bytes
