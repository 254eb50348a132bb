"""Keeps what timings on this host have found, in files: each is made once, by one process at a time.

So workers of one host that start side by side, or one after the other, go by the same figures, and only the first takes
the time. Owns: the files, their locks, and what identifies the host. Never: what is timed, or what is made of it. The
module does not import torch.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from services.core.own_files import FOR_ALL, opened, write_whole

logger = logging.getLogger(__name__)

T = TypeVar("T")

_LOOK_EVERY_S = 0.1
_MOST_BYTES = 1 << 20
"""Bytes of a file that are read. Findings have a few thousand."""
_SENSELESS = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
"""What JSON of any content raises, where it is parsed or taken for a finding."""
_VARIABLES = (
    "BATON_CPU_ISA",
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
)
"""Variables that keep torch and its libraries from using instructions that the CPU has."""
_CPU_FIELDS = ("model name", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")
_NATIVE = Path(__file__).parents[1] / "native"


def once_per_host(
    entry: Path,
    read: Callable[[Any], T | None],
    find: Callable[[], Mapping[str, object]],
    *,
    limit_s: float,
    what: str,
    level: int = logging.WARNING,
) -> T:
    """Returns what `read` makes of the content of `entry`, a JSON file; without one, of what `find` returns.

    The latter is written into the file, if it can be. `read` returns None for what is out of date, and raises one of
    `_SENSELESS` for what makes no sense; neither may be so of what `find` returns. A process waits
    for others that find the same for `limit_s` seconds. `what` names the finding in the log, and `level` is that of the
    line which says that it cannot be kept.
    """
    if (found := _read(entry, read, what, logging.DEBUG)) is not None:
        return found
    with _only_one(entry, limit_s, what, level) as may_write:
        if (found := _read(entry, read, what, logging.WARNING)) is not None:  # another process has found it meanwhile
            return found
        content = find()
        if may_write:
            _write(entry, content, what, level)
    found = read(content)
    assert found is not None
    return found


def digest_of(subject: Mapping[str, object]) -> str:
    """Returns 16 hex digits that stand for all that a finding depends on."""
    return hashlib.sha256(json.dumps(subject, sort_keys=True).encode()).hexdigest()[:16]


def host() -> dict[str, object]:
    """Returns what the speed of a computation depends on: this CPU as torch may use it, torch, and Baton's kernels."""
    kernels = sorted(_NATIVE.glob("kernels-*.so"))
    torch = ""  # an installation without metadata is possible
    with contextlib.suppress(metadata.PackageNotFoundError):
        torch = metadata.version("torch")
    return {
        "cpu": cpu_fields(),
        "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
        "torch": torch,
        "kernels": [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in kernels],
    }


def cpu_fields(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Returns the name and the instruction sets of the first processor."""
    try:
        first = cpuinfo.read_text().partition("\n\n")[0]
    except OSError:
        return {"machine": platform.machine(), "processor": platform.processor()}
    fields = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in fields if name.strip() in _CPU_FIELDS}


def _read(entry: Path, read: Callable[[Any], T | None], what: str, level: int) -> T | None:
    """Returns None if there is nothing, or what is there is out of date or makes no sense; the last is logged."""
    try:
        with open(opened(entry, os.O_RDONLY), "rb") as file:
            content = file.read(_MOST_BYTES)
    except OSError:
        return None
    try:
        return read(json.loads(content))
    except _SENSELESS as error:
        logger.log(level, "%s does not tell %s (%s): timing again", entry, what, error)
        return None


@contextlib.contextmanager
def _only_one(entry: Path, limit_s: float, what: str, level: int) -> Iterator[bool]:
    """Waits until no other process makes the same entry. Yields whether it can be kept."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        lock = open(opened(entry.with_suffix(".lock"), os.O_WRONLY | os.O_CREAT, FOR_ALL), "wb")  # noqa: SIM115 closed below
    except OSError as error:
        logger.log(level, "%s cannot be kept: %s", what, error)
        yield False
        return
    with lock:  # the lock is released with the descriptor, and so with the process
        give_up_s = time.monotonic() + limit_s
        while not _locked(lock.fileno(), what):
            if time.monotonic() > give_up_s:
                logger.warning("another process makes %s and does not end: finding out beside it", entry)
                break
            time.sleep(_LOOK_EVERY_S)
        yield True


def _locked(fd: int, what: str) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks
        logger.info("no lock around %s: %s", what, error)
    return True


def _write(entry: Path, content: Mapping[str, object], what: str, level: int) -> None:
    """Writes the content whole or not at all, since readers take no lock."""
    try:
        write_whole(entry, json.dumps(content, indent=1).encode() + b"\n", FOR_ALL)
    except OSError as error:
        logger.log(level, "%s cannot be kept: %s", what, error)
