"""Where models live on this machine: a name becomes a directory that the engine and the router can load.

Owns: the cache directory, its entries, and that each is complete or absent: an entry is made in a hidden directory
beside it and renamed, under a lock that dies with the process that holds it. Never: reads weights (a child process
converts GGUF, so that a supervisor does not carry torch), nor fetches the default model (model_pull.py).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping

from services.core.errors import ConfigError, UnknownModel

DEFAULT_MODEL = "smollm2-135m-instruct"
ENTRY_FILE = "baton.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]

Convert = Callable[[pathlib.Path, pathlib.Path], None]
"""Turns a GGUF file into a directory of safetensors, tokenizer and config that does not exist yet."""


@dataclasses.dataclass(frozen=True)
class ResolvedModel:
    """`model_id` is what clients call it, `path` a directory in the transformers layout."""

    model_id: str
    path: pathlib.Path


def models_dir(environ: Mapping[str, str] = os.environ) -> pathlib.Path:
    """`$BATON_HOME/models`, else `baton/models` in the XDG cache."""
    home, cache = environ.get("BATON_HOME", ""), environ.get("XDG_CACHE_HOME", "")
    if home:
        return pathlib.Path(home).expanduser().resolve() / "models"
    root = pathlib.Path(cache) if cache.startswith("/") else pathlib.Path("~/.cache").expanduser()
    return root / "baton" / "models"


def resolve_model(name: str) -> ResolvedModel:
    """The default model's name, a local directory, a GGUF file or a hub id; fetched or converted if need be.

    Raises UnknownModel with the reason, ConfigError when `name` cannot be any of these.
    """
    if name == DEFAULT_MODEL:
        from services.cli.model_pull import pull

        return pull()
    path = pathlib.Path(name).expanduser()
    if name and path.is_dir():
        return _local_directory(path.resolve())
    if path.is_file():
        return _gguf_file(path.resolve(), models_dir(), convert_gguf)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _hub_model(name)
    raise ConfigError(f"--model: {name!r} is no directory, no GGUF file, no hub id and not {DEFAULT_MODEL!r}")


def read_entry(path: pathlib.Path) -> ResolvedModel | None:
    """The finished cache entry at `path`, or None."""
    try:
        entry = json.loads((path / ENTRY_FILE).read_text())
    except FileNotFoundError:
        return None
    return ResolvedModel(entry["model_id"], path)


def list_models(root: pathlib.Path) -> list[ResolvedModel]:
    """Finished entries, by name."""
    found = (read_entry(path) for path in sorted(root.glob("*/")) if not path.name.startswith("."))
    return [entry for entry in found if entry is not None]


@contextlib.contextmanager
def new_entry(target: pathlib.Path, model_id: str, source: str) -> Iterator[pathlib.Path | None]:
    """Makes the cache entry `target`: yields an empty directory to work in, whose `model` subdirectory becomes the
    entry when the block ends without an error. Yields None if another process has made it meanwhile."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target.parent / f".{target.name}.lock", "w") as lock:
        _lock(lock.fileno(), model_id)
        if read_entry(target) is not None:
            yield None
            return
        workspace = target.parent / f".{target.name}.partial"
        shutil.rmtree(workspace, ignore_errors=True)  # of a process that was killed; we hold the lock
        workspace.mkdir()
        try:
            yield workspace
            entry = {"model_id": model_id, "source": source}
            (workspace / "model" / ENTRY_FILE).write_text(json.dumps(entry) + "\n")
            shutil.rmtree(target, ignore_errors=True)  # without an entry file it is no entry
            (workspace / "model").rename(target)
        finally:
            shutil.rmtree(workspace, ignore_errors=True)


def convert_gguf(gguf: pathlib.Path, out: pathlib.Path) -> None:
    """Converts in a child process, which shows its progress on stderr."""
    command = [sys.executable, "-m", "services.cli.convert", str(gguf), str(out)]
    process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, check=False)
    if process.returncode != 0:
        reason = process.stdout.strip() or f"exit status {process.returncode}"
        raise UnknownModel(f"conversion of {gguf.name} failed: {reason}")


def sha256(path: pathlib.Path) -> str:
    """Hex digest of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _local_directory(path: pathlib.Path) -> ResolvedModel:
    if not (path / "config.json").is_file():
        raise UnknownModel(f"{path} holds no model: config.json is missing")
    return read_entry(path) or ResolvedModel(path.name, path)


def _gguf_file(path: pathlib.Path, root: pathlib.Path, convert: Convert) -> ResolvedModel:
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UnknownModel(f"{path} is not a GGUF file")
    digest = sha256(path)
    target = root / f"gguf-{digest[:16]}"
    if read_entry(target) is None:
        print(f"converting {path.name}, once", file=sys.stderr)
        with new_entry(target, path.stem, f"GGUF sha256:{digest}") as workspace:
            if workspace is not None:
                convert(path, workspace / "model")
    return ResolvedModel(path.stem, target)


def _hub_model(name: str) -> ResolvedModel:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import snapshot_download

    try:
        path = pathlib.Path(snapshot_download(name, allow_patterns=_HUB_FILES, local_files_only=True))
        if is_complete(path):
            return ResolvedModel(name, path)
    except Exception:  # not in the hub's cache, in whichever way this version of the library says so
        path = None
    try:
        path = pathlib.Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnknownModel(f"{name!r} is not on this machine, and the hub did not give it: {reason}") from error
    if not is_complete(path):
        raise UnknownModel(f"{name!r} has no config.json with safetensors weights on the hub")
    return ResolvedModel(name, path)


def is_complete(path: pathlib.Path) -> bool:
    """Config and every shard are there; an interrupted download leaves some out."""
    if not (path / "config.json").is_file():
        return False
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return any(path.glob("*.safetensors"))
    shards = set(json.loads(index.read_text())["weight_map"].values())
    return all((path / shard).is_file() for shard in shards)


def _lock(fd: int, model_id: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print(f"waiting for another baton that prepares {model_id}", file=sys.stderr)
        fcntl.flock(fd, fcntl.LOCK_EX)
