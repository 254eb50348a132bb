"""Wraps what Baton uses of NIXL: agents, memory registered with them, and reads of other agents' memory.

No other file knows NIXL. Its bindings are called directly, since NIXL's Python layer above them has its progress thread
spin. Of a read that failed, or that was let go of before its end, NIXL cannot say that nothing is written any more:
releasing it only asks for a cancellation, and what is under way still arrives. The end of the agent does say so.

Owns: how NIXL and UCX are set up. Never: blocks, leases, what is read.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from services.core.errors import TransferFailed
from services.kv.regions import Region
from services.kvtransfer.transports import TransportUnavailable

_PACKAGES = ("nixl_cu13", "nixl_cu12")
"""One build of NIXL for each version of CUDA. Either works where there is no GPU."""
_BACKEND = "UCX"
_PROGRESS_US = 10_000
"""The longest that a serving agent's thread sleeps when its sockets have nothing: UCX does not wake it by each.
(At 0, which NIXL's Python layer sets, it spins; this takes 0.5 % of a core.)"""
_POLL_S = 0.0002
"""How long a reader sleeps between two looks at a read that is under way."""
_SLICE_S = 0.5
"""What a look counts for at the most: a process that was stopped finds one slice used up, not its patience."""
_ENVIRONMENT = {
    # A failed read is told by its error. UCX would print to standard output what it lost with an agent.
    "UCX_LOG_LEVEL": "error",
    "NIXL_LOG_LEVEL": "FATAL",
    # UCX would take SIGHUP, and the signals of crashes, for itself.
    "UCX_DEBUG_SIGNO": "",
    "UCX_ERROR_SIGNALS": "",
}
_RDMA_DEVICES = "/sys/class/infiniband"


class NixlUnavailable(TransportUnavailable):
    """Says why NIXL cannot be used in this process, or for a source."""


def is_installed() -> bool:
    return any(importlib.util.find_spec(package) is not None for package in _PACKAGES)


def has_rdma_device() -> bool:
    """Returns whether UCX has more to go by here than shared memory and TCP."""
    try:
        return bool(os.listdir(_RDMA_DEVICES))
    except OSError:
        return False


def ucx_settings(*, on_this_host: bool, asked_for: bool) -> dict[str, str]:
    """Returns the settings of UCX for workers that all are `on_this_host`, or not.

    Unless NIXL is `asked_for`, UCX must not open a TCP port to other hosts: who reaches it is asked nothing, and can
    read and write this process's memory.
    """
    if on_this_host or (not asked_for and not has_rdma_device()):
        return {"NET_DEVICES": "lo"}
    return {} if asked_for else {"TLS": "^tcp"}


def bindings() -> Any:
    """Returns NIXL's bindings, loaded on first use. Raises NixlUnavailable."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)  # UCX reads them when it is loaded
    installed = [package for package in _PACKAGES if importlib.util.find_spec(package) is not None]
    if not installed:
        raise NixlUnavailable("is not installed (pip install 'baton-serving[nixl]')")
    try:
        return importlib.import_module(f"{installed[0]}._bindings")
    except ImportError as error:
        raise NixlUnavailable(f"cannot be loaded: {error}") from error


class NixlAgent:
    """Is one agent of NIXL, with a backend for UCX. Threads may share it; one of them is in NIXL at a time.

    With `serves`, others read from it, which a thread of NIXL's own sees to; without, it only reads. `ucx` has settings
    of UCX, by their names without the prefix UCX_; the environment goes before. Raises NixlUnavailable if NIXL does not
    work here.
    """

    def __init__(self, name: str, *, serves: bool, ucx: Mapping[str, str]) -> None:
        self._nixl = bindings()
        self._lock = threading.Lock()
        self.closed = False
        self.num_reads = 0
        """Reads under way."""
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = serves
        config.pthrDelay = _PROGRESS_US
        config.useListenThread = False
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_NONE
        try:
            self._agent = self._nixl.nixlAgent(name, config)
            settings = ",".join(f"{key}={value}" for key, value in ucx.items() if f"UCX_{key}" not in os.environ)
            self._agent.createBackend(_BACKEND, {"engine_config": settings} if settings else {})
        except Exception as error:  # each of NIXL's errors is a class of its own
            raise NixlUnavailable(f"does not work on this machine: {error}") from error

    def register(self, region: Region) -> None:
        """Registers memory, which must stay in place until the agent is closed. Raises NixlUnavailable."""
        kind, device = self._kind(region)
        described = self._nixl.nixlRegDList(kind, [(region.address, region.length, device, "")])
        try:
            with self._lock:
                self._agent.registerMem(described, [])
        except Exception as error:
            raise NixlUnavailable(f"cannot register memory of {region.device}: {error}") from error

    @property
    def metadata(self) -> bytes:
        """Returns what another agent must know to read what is registered here."""
        with self._lock:
            return bytes(self._agent.getLocalMD())

    def meet(self, metadata: bytes) -> str:
        """Returns the name of the agent that has this metadata, which can then be read from. Raises TransferFailed.

        The metadata must come from an agent of NIXL's: what has been altered can crash the process.
        """
        try:
            with self._lock:
                return str(self._agent.loadRemoteMD(metadata), "utf-8")
        except Exception as error:
            raise TransferFailed(f"the source's NIXL agent cannot be reached: {error}") from error

    def read(
        self, peer: str, targets: Sequence[Region], sources: Sequence[Region], patience: Callable[[], float]
    ) -> None:
        """Reads each of `sources`, memory of the peer's, into one of `targets`, which are registered here.

        When it returns, or raises TransferFailed, nothing writes the targets any more. Therefore a read that fails, or
        does not end within `patience()` seconds, ends the agent, and with it all that it reads.
        """
        with self._lock:
            self.num_reads += 1
        try:
            self._read(peer, targets, sources, patience)
        finally:
            with self._lock:
                self.num_reads -= 1

    def _read(
        self, peer: str, targets: Sequence[Region], sources: Sequence[Region], patience: Callable[[], float]
    ) -> None:
        request, waited_s, looked_s = None, 0.0, time.monotonic()
        try:
            with self._lock:
                self._require_open()
                request = self._agent.createXferReq(
                    self._nixl.NIXL_READ, self._list(targets), self._list(sources), peer, "", []
                )
                status = self._agent.postXferReq(request, "")
            while status == self._nixl.NIXL_IN_PROG:
                if waited_s >= patience():
                    raise TransferFailed("the source does not give what is read from it")
                time.sleep(_POLL_S)
                with self._lock:
                    self._require_open()
                    status = self._agent.getXferStatus(request)
                now = time.monotonic()
                waited_s, looked_s = waited_s + min(now - looked_s, _SLICE_S) / self.num_reads, now
            if status != self._nixl.NIXL_SUCCESS:
                raise TransferFailed(f"the read failed: {status.name}")
            with self._lock:
                self._require_open()
                self._agent.releaseXferReq(request)
        except TransferFailed:
            self.close()
            raise
        except Exception as error:
            self.close()
            raise TransferFailed(f"the read failed: {error}") from error

    def close(self) -> None:
        """Ends the agent. Then nothing reads or writes by it any more, also if a read had not ended."""
        with self._lock:
            self.closed = True
            self._agent = None

    def _require_open(self) -> None:
        if self.closed:
            raise TransferFailed("another read from this source has failed, and ended its agent")

    def _list(self, regions: Sequence[Region]) -> Any:
        kind, device = self._kind(regions[0])
        return self._nixl.nixlXferDList(kind, [(region.address, region.length, device) for region in regions])

    def _kind(self, region: Region) -> tuple[Any, int]:
        """Returns NIXL's kind of memory, and the number of the device that has it."""
        device, _, number = region.device.partition(":")
        if device == "cpu":
            return self._nixl.DRAM_SEG, 0
        if device == "cuda":
            return self._nixl.VRAM_SEG, int(number or 0)
        raise NixlUnavailable(f"cannot register memory of {region.device}")
