"""Reads the headers of a checkpoint's safetensors files: which tensors there are, in which file, of which shapes.

Owns: which files of a directory are read, those that transformers reads, and that no two of them have a tensor of one
name. Never: the tensors themselves.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open

from services.core.errors import UnsupportedModel
from services.core.printable import printable


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """Locates a tensor in the checkpoint's files, with its type and shape from the header."""

    file: Path
    dtype: str
    """The type's name in safetensors: "I32", "F16"."""
    shape: tuple[int, ...]


def tensor_headers(directory: Path) -> dict[str, TensorHeader]:
    """Returns the headers of all tensors by their names.

    Raises UnsupportedModel if two files have a tensor of one name: transformers would take that of the last file,
    whatever the index says; if the index makes no sense or names files that are not beside it; and if something is no
    plain file, since a pipe would never end. Raises SafetensorError if a file is damaged, and OSError
    if one is missing.
    """
    found: dict[str, TensorHeader] = {}
    for path in _files(directory):
        if path.exists() and not path.is_file():
            raise UnsupportedModel(f"{path.name} is no plain file")
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118, it is no mapping
                if name in found:
                    raise UnsupportedModel(f"{name} is both in {found[name].file.name} and in {path.name}")
                part = file.get_slice(name)
                found[name] = TensorHeader(path, part.get_dtype(), tuple(part.get_shape()))
    return found


def _files(directory: Path) -> list[Path]:
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file() or not index.is_file():
        return [whole]
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        if outside := [name for name in names if Path(name).name != name]:
            raise UnsupportedModel(f"{index.name} names a file that is not beside it: {printable(outside[0])[:200]}")
        return [directory / name for name in names]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(f"{index.name} does not name the files of weights: {error}") from error
