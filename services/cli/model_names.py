"""Resolves what `--model` may name: the default model, a local directory, a GGUF file or a hub id.

Owns: which of these a name is, and how it becomes a directory. Never: the cache's rules (`model_cache`), or where the
default model comes from (`model_pull`).
"""

from __future__ import annotations

import json
import os
import pathlib
import re

from services.cli.model_cache import (
    Convert,
    ResolvedModel,
    convert_gguf,
    models_dir,
    new_entry,
    read_entry,
    sha256,
)
from services.cli.model_pull import pull
from services.core.errors import ConfigError, UnknownModel
from services.core.printable import printable
from services.core.process_config import DEFAULT_MODEL

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_HUB_FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def resolve_model(name: str) -> ResolvedModel:
    """Returns the model that `name` means, fetched or converted if need be.

    `name` is the default model's name, a local directory, a GGUF file or a hub id. Raises UnknownModel with the reason,
    ConfigError if `name` cannot be any of these.
    """
    if name == DEFAULT_MODEL:
        return pull()
    path = pathlib.Path(name).expanduser()
    if name and path.is_dir():
        return _local_directory(path.resolve())
    if path.is_file():
        return _gguf_file(path.resolve(), models_dir(), convert_gguf)
    if _HUB_ID.fullmatch(name) and not name.endswith(".gguf"):
        return _hub_model(name)
    raise ConfigError(f"--model: {name!r} is no directory, no GGUF file, no hub id and not {DEFAULT_MODEL!r}")


def _local_directory(path: pathlib.Path) -> ResolvedModel:
    if not (path / "config.json").is_file():
        raise UnknownModel(f"{path} holds no model: config.json is missing")
    return read_entry(path) or ResolvedModel(path.name, path)


def _gguf_file(path: pathlib.Path, root: pathlib.Path, convert: Convert) -> ResolvedModel:
    with open(path, "rb") as file:
        if file.read(4) != b"GGUF":
            raise UnknownModel(f"{path} is not a GGUF file")
    digest = sha256(path)
    target = root / f"gguf-{digest[:16]}-as-it-is"  # entries of earlier releases lack the quantised weights
    if read_entry(target) is None:
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
    except Exception:  # not in the hub's cache; each version of the library raises another error
        path = None
    try:
        path = pathlib.Path(snapshot_download(name, allow_patterns=_HUB_FILES))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UnknownModel(
            f"{name!r} is not on this machine, and the hub, which takes a network, did not give it: {reason}; "
            f"`baton models list` shows what is here, --model PATH takes a directory or GGUF file, and {DEFAULT_MODEL} "
            "is fetched by its name"
        ) from error
    if not is_complete(path):
        raise UnknownModel(f"{name!r} has no config.json with safetensors weights on the hub")
    return ResolvedModel(name, path)


def is_complete(path: pathlib.Path) -> bool:
    """Returns whether config and every shard are there; an interrupted download leaves some out."""
    return (path / "config.json").is_file() and not _missing_weights(path)


def demand_weights(model: ResolvedModel) -> None:
    """Raises UnknownModel if a file of weights is missing, which a worker would notice only after it has loaded torch.

    Routers need no weights, so only workers call it.
    """
    if missing := _missing_weights(model.path):
        raise UnknownModel(f"{model.path} lacks weights: there is no {missing}, and no other format is loaded")


def _missing_weights(path: pathlib.Path) -> str:
    """Returns the name of a weights file that is missing, or an empty string if all are there."""
    index = path / "model.safetensors.index.json"
    if not index.is_file():
        return "" if any(path.glob("*.safetensors")) else "*.safetensors"
    try:
        shards = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        return next((printable(shard) for shard in shards if not (path / shard).is_file()), "")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"list of shards in {index.name}"
