"""Keeps the models fetched or converted on this machine, each as a directory that the engine and the router can load.

Owns: the cache directory, its entries, and that each is complete or absent: an entry is made in a hidden directory
beside it and renamed, under a lock that is released when the process that holds it ends. Never: reads weights (a child
process converts GGUF, so that a supervisor does not load torch), nor decides what a name means (`model_names`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from services.cli.child import Lifeline
from services.cli.waiting import waiting
from services.cli.worker_packages import demand_torch
from services.core.errors import UnknownModel
from services.core.home import baton_home
from services.core.own_files import FOR_ALL, opened

ENTRY_FILE = "baton.json"

Convert = Callable[[pathlib.Path, pathlib.Path], None]
"""Turns a GGUF file into a directory of safetensors, tokenizer and config that does not exist yet."""


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """Names a model on disk: `model_id` is its name for clients, `path` a directory in the transformers layout."""

    model_id: str
    path: pathlib.Path


def models_dir(environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """Returns `$BATON_HOME/models`, or `baton/models` in the XDG cache if that is not set."""
    return baton_home(environ) / "models"


def read_entry(path: pathlib.Path) -> ResolvedModel | None:
    """Returns the finished cache entry at `path`; None if there is none, or if it is damaged: it is then made again."""
    try:
        entry = json.loads((path / ENTRY_FILE).read_text())
        whole = all((path / name).stat().st_size == size for name, size in entry.get("files", {}).items())
        return ResolvedModel(str(entry["model_id"]), path) if whole else None
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return None


def list_models(root: pathlib.Path) -> list[ResolvedModel]:
    """Returns the finished entries, sorted by name."""
    found = (read_entry(path) for path in sorted(root.glob("*/")) if not path.name.startswith("."))
    return [entry for entry in found if entry is not None]


@contextlib.contextmanager
def new_entry(target: pathlib.Path, model_id: str, source: str) -> Iterator[pathlib.Path | None]:
    """Makes the cache entry `target`: yields an empty directory to work in, or None if another process made it.

    The directory's `model` subdirectory becomes the entry when the block ends without an error.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(opened(target.parent / f".{target.name}.lock", os.O_WRONLY | os.O_CREAT, FOR_ALL), "wb") as lock:
        _lock(lock.fileno(), model_id)
        if read_entry(target) is not None:
            yield None
            return
        workspace = target.parent / f".{target.name}.partial"
        shutil.rmtree(workspace, ignore_errors=True)  # left by a process that was killed; this one holds the lock
        workspace.mkdir()
        try:
            yield workspace
            files = {file.name: file.stat().st_size for file in (workspace / "model").iterdir()}
            entry = {"model_id": model_id, "source": source, "files": files}
            (workspace / "model" / ENTRY_FILE).write_text(json.dumps(entry) + "\n")
            shutil.rmtree(target, ignore_errors=True)  # without an entry file it is no entry
            (workspace / "model").rename(target)
        except (OSError, UnknownModel) as error:
            if os.strerror(errno.ENOSPC) in str(error):
                full = f"{target.parent} is full; BATON_HOME names a folder on another disk"
                raise UnknownModel(f"{error}: {full}") from error
            raise
        finally:
            shutil.rmtree(workspace, ignore_errors=True)


def convert_gguf(gguf: pathlib.Path, out: pathlib.Path) -> None:
    """Converts in a child process, and keeps the quantised weights beside those in 16 bits. Raises UnknownModel with
    the reason."""
    demand_torch("converting a GGUF file")
    lifeline = Lifeline()
    command = [sys.executable, "-m", "services.cli.convert", str(gguf), str(out), str(lifeline.read_fd)]
    try:
        with waiting("converting the model, once"):
            process = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                pass_fds=(lifeline.read_fd,),
                check=False,
                env={**os.environ, "TQDM_DISABLE": "1"},  # its bars are of parts, with silence between them
            )
    finally:
        lifeline.close()
    if process.returncode != 0:
        reason = process.stdout.strip() or f"exit status {process.returncode}"
        raise UnknownModel(f"conversion of {gguf.name} failed: {reason}")


def sha256(path: pathlib.Path) -> str:
    """Returns the hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _lock(fd: int, model_id: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another baton that prepares {model_id}", file=sys.stderr)
        fcntl.flock(fd, fcntl.LOCK_EX)
