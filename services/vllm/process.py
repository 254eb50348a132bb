"""Runs vLLM's processes for a worker, and passes messages between them and the engine's adapter.

Owns: the keeper, the private socket with its connections, and the judgement that a process of vLLM has ended or stands
still. Never: what the messages mean, which is `engine`'s. One thread reads and writes all connections; it is the thread
on which the adapter reports events.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from services.vllm import messages
from services.vllm.keeper import remove_unused, shared_memory_below
from services.vllm.messages import JsonMessage, Lines

logger = logging.getLogger(__name__)

SILENT_S = 3.0
"""How long nothing is read from a process of vLLM before it counts as standing still, in seconds."""
STOPPED_S = 1.0
"""The same for one that is stopped, which goes on only where somebody continues it."""
_LOADING_SILENT_S = 120.0
"""The same while it loads: imports and compilers keep the interpreter's lock."""
_PIECE_BYTES = 1 << 18
_STOP_S = 5.0
_STDERR = 2
_CAUSE_S = 0.1
"""About how many seconds a child is ended before the last socket of the parent whose end was the cause is closed."""
_PARENT_BYTES = 50
"""The longest path of a folder below which vLLM can make its sockets: the kernel allows 107 bytes, their names have 37,
and that of the folder between has 20."""


@dataclass(eq=False)
class VllmProcess:
    """Is one process of vLLM. `who` is empty until it has said HELLO."""

    connection: socket.socket
    who: str = ""
    rank: int = 0
    pid: int = 0
    heard_s: float = 0.0
    lines: Lines = field(default_factory=Lines)
    queued: list[JsonMessage] = field(default_factory=list)
    """Messages that are not encoded yet."""
    unsent: bytearray = field(default_factory=bytearray)

    def __str__(self) -> str:
        what = {messages.FRONT: "engine process", messages.CORE: "scheduler", messages.RANK: f"rank {self.rank}"}
        return f"vLLM's {what.get(self.who, 'unnamed process')} (pid {self.pid})"


Received: TypeAlias = Sequence[tuple[VllmProcess, JsonMessage]]
"""What one look at the connections has brought, in the order in which it was sent: nothing comes before its cause."""


def path_to_baton(folder: str) -> str:
    """Makes a folder in this one that has Baton's code and no other package, and returns its path: beside Baton may lie
    packages, such as transformers, that vLLM has in other versions."""
    path = Path(folder) / "path"
    path.mkdir()
    (path / "services").symlink_to(Path(__file__).resolve().parents[1])
    return str(path)


class EngineProcess:
    """Starts vLLM's processes at once. `run` is called once, on a thread that belongs to it from then on."""

    def __init__(self, python: Path, arguments: JsonMessage, environment: Mapping[str, str]) -> None:
        """`arguments` are those of `services.vllm.inside.main`."""
        self.folder = _private_folder()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(f"{self.folder}/worker")
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._wake_read, self._wake_write = socket.socketpair()
        for end in (self._wake_read, self._wake_write):
            end.setblocking(False)
        self._lock = threading.Lock()
        """Guards what is queued. It is held for moments."""
        self.peers: list[VllmProcess] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._stopping = False
        self._early: list[tuple[VllmProcess, JsonMessage]] = []
        """Messages that were read before others which may be their cause."""
        self._looked_s = self._keeper_ran_s = time.monotonic()
        self._why_broken = ""
        self._ended: list[VllmProcess] = []
        self._shared: set[str] = set()
        """Files in /dev/shm that vLLM's processes have."""
        self._is_over = False
        self._silent_s = _LOADING_SILENT_S
        self._keeper = subprocess.Popen(
            [
                *(sys.executable, "-m", "services.vllm.keeper", self.folder),
                *(str(python), "-m", "services.vllm.inside.main", f"{self.folder}/worker", json.dumps(arguments)),
            ],
            stdin=subprocess.PIPE,
            bufsize=0,
            stdout=_STDERR,
            # A Ctrl-C in the terminal is for the worker, which drains. Not a session of their own: the kernel may share
            # the processor out by sessions, and the worker would wait seconds where others of its session compute.
            process_group=0,
            env={
                **environment,
                "PYTHONPATH": path_to_baton(self.folder),
                "PYTHONSAFEPATH": "1",  # else a folder named vllm where the worker was started would be taken
                "PYTHONWARNINGS": "ignore:resource_tracker:UserWarning",  # it tells of what it removes at every end
                "VLLM_RPC_BASE_PATH": self.folder,
                "TMPDIR": self.folder,
            },
        )

    @property
    def keeper_pid(self) -> int:
        return self._keeper.pid

    def wake(self) -> None:
        """Has `run` look again, also where nothing arrives. Any thread may call it."""
        with self._lock, contextlib.suppress(OSError):  # it is about to look anyway
            if not self._is_over:
                self._wake_write.send(b"x")

    def send(self, peer: VllmProcess, message: JsonMessage) -> None:
        """Queues a message, which does not change any more. Any thread may call it; it never waits."""
        with self._lock:
            peer.queued.append(message)
        self.wake()

    def send_descriptor(self, peer: VllmProcess, message: JsonMessage, fd: int) -> None:
        """Sends a message with a descriptor, before anything else is sent to the peer. On the thread of `run` alone."""
        assert not peer.queued, "it is the first message"
        socket.send_fds(peer.connection, [messages.encode(message)], [fd])

    def run(self, absorb: Callable[[Received], None]) -> str:
        """Reads and writes until `stop`, or until a process of vLLM has ended or stands still. Returns why it ended; ""
        after `stop`. `absorb` is called with what has arrived, and after every `wake`.
        """
        try:
            while not self._stopping:
                absorb(self._look())
                if why := self._what_is_wrong():
                    return why
            return ""
        except Exception as error:
            logger.exception("the connection to vLLM has a defect")
            return f"the connection to vLLM has a defect: {error!r}"

    def loaded(self) -> None:
        """Notes that vLLM has loaded its model: from now on none of its processes is silent for long."""
        self._shared = shared_memory_below(self.keeper_pid)
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended, as `run` sees or has seen
            self._keeper.stdin.write(b"x")
        self._silent_s = SILENT_S

    def stop(self) -> None:
        """Has `run` end. Any thread may call it."""
        self._stopping = True
        self.wake()

    def end(self) -> None:
        """Ends all of vLLM, and returns when nothing of it is left."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        self._keeper.send_signal(signal.SIGCONT)  # a stopped one does not notice
        try:
            self._keeper.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            logger.error("vLLM's processes could not be ended within %g s", _STOP_S)
            self._keeper.kill()
            self._keeper.wait()
        for peer in self.peers:
            peer.connection.close()
        self._listener.close()
        self._selector.close()
        with self._lock:
            self._is_over = True
            self._wake_read.close()
            self._wake_write.close()
        if self._keeper.returncode < 0:  # the kernel ends vLLM's processes then, one after the other
            until_s = time.monotonic() + _STOP_S
            while remove_unused(self._shared) and time.monotonic() < until_s:
                time.sleep(0.01)
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- on the thread of `run` ----------------------------------------------------------------------------------------

    def _look(self) -> list[tuple[VllmProcess, JsonMessage]]:
        self._write()
        ready = self._selector.select(0.0 if self._early else messages.BEAT_S)
        # What is sent from here on can be read before its cause, which another connection brings: it waits for the next
        # look. What was sent before is read from all, also from one that brought nothing a moment ago.
        until_s = time.monotonic()
        keys = {key.fileobj for key, _ in ready}
        if self._wake_read in keys:
            self._wake_read.recv(4096)
        if any(peer.connection in keys for peer in self.peers):
            self._early += [(peer, message) for peer in self.peers for message in self._read(peer)]
        if self._ended:  # the one above it, whose end was the cause, can be a moment longer in ending
            time.sleep(_CAUSE_S)
            self._early += [(peer, message) for peer in self.peers for message in self._read(peer)]
        if self._listener in keys:
            self._accept()
        self._early.sort(key=_sent_s)
        end = bisect_right(self._early, until_s, key=_sent_s)
        arrived, self._early = self._early[:end], self._early[end:]
        return arrived

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return  # it is gone already
        connection.setblocking(False)
        self.peers.append(VllmProcess(connection, heard_s=time.monotonic()))
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, peer: VllmProcess) -> list[JsonMessage]:
        """Returns what a process of vLLM has sent."""
        arrived: list[JsonMessage] = []
        while True:
            try:
                data = peer.connection.recv(_PIECE_BYTES)
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self._has_ended(peer)
                break
            peer.heard_s = time.monotonic()
            for message in peer.lines.feed(data):
                match message["kind"]:
                    case messages.HELLO:
                        peer.who, peer.rank, peer.pid = message["who"], message["rank"], message["pid"]
                    case messages.BROKEN:
                        self._why_broken = f"{peer}: {message['error']}"
                    case messages.BEAT:
                        pass
                    case _:
                        arrived.append(message)
            if len(data) < _PIECE_BYTES:
                break
        return arrived

    def _has_ended(self, peer: VllmProcess) -> None:
        if peer not in self._ended:
            self._ended.append(peer)

    def _write(self) -> None:
        for peer in self.peers:
            with self._lock:
                queued, peer.queued = peer.queued, []
            for message in queued:  # here: a long prompt takes milliseconds, for which callers hold locks of theirs
                peer.unsent += messages.encode(message)
            while piece := bytes(peer.unsent[:_PIECE_BYTES]):
                try:
                    num_sent = peer.connection.send(piece)
                except BlockingIOError:
                    break
                except OSError:
                    self._has_ended(peer)
                    break
                del peer.unsent[:num_sent]
            wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if piece else 0)
            if self._selector.get_key(peer.connection).events != wanted:
                self._selector.modify(peer.connection, wanted)

    def _what_is_wrong(self) -> str:
        """Returns why vLLM cannot go on, or ""."""
        now, self._looked_s, before_s = time.monotonic(), time.monotonic(), self._looked_s
        status = self._keeper.poll()
        if self._why_broken:
            return self._why_broken
        if status is not None and status < 0:
            return f"vLLM's keeper (pid {self.keeper_pid}) was ended by signal {-status}"
        if self._ended:  # the kernel ends those below it at once: the first cause is the one above
            above = {messages.FRONT: 0, messages.CORE: 1}
            return f"{min(self._ended, key=lambda peer: above.get(peer.who, 2))} has ended; its output says why"
        if status is not None:
            return "vLLM has ended; its output says why"
        if now - before_s > STOPPED_S:  # this process was the one that stood still
            self._keeper_ran_s = now
            for peer in self.peers:
                peer.heard_s = now
        if now - self._keeper_ran_s > messages.BEAT_S and not _is_stopped(self.keeper_pid):
            self._keeper_ran_s = now
        for peer in self.peers:
            silent_s = now - peer.heard_s
            if silent_s > STOPPED_S and _is_stopped(peer.pid):
                return f"{peer} stands still: it was stopped"
            if silent_s > self._silent_s:
                return f"{peer} stands still: nothing was heard of it for {self._silent_s:g} s"
        if now - self._keeper_ran_s > STOPPED_S:
            return f"vLLM's keeper (pid {self.keeper_pid}) stands still: it was stopped"
        return ""


def _private_folder() -> str:
    """Makes a folder that nobody else may enter: among temporary files, or, where sockets there would have too long a
    path, in /tmp."""
    parent = tempfile.gettempdir()
    if len(os.fsencode(parent)) > _PARENT_BYTES:
        parent = "/tmp"
    return tempfile.mkdtemp(prefix="baton-vllm-", dir=parent)  # mode 0700: nobody else connects


def _sent_s(received: tuple[VllmProcess, JsonMessage]) -> float:
    return float(received[1]["at"])


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1] == b"T"
    except OSError:
        return False
