"""Tells whether a file has changed, without reading it."""

from __future__ import annotations

import os

FileStamp = tuple[int, ...]


def stamp_of(file: str) -> FileStamp | None:
    """Returns what changes when the file does; None if there is none."""
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
