"""Tests that images install what was tried: every package that Baton names is pinned."""

from __future__ import annotations

import contextlib
import tomllib
from importlib.metadata import PackageNotFoundError, distribution

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support import ROOT


def test_what_is_installed_is_pinned() -> None:
    assert {canonicalize_name(each.name) for each in _needed()} - _pinned() == {"baton-client"}


def test_what_an_older_python_needs_beside_it_is_pinned() -> None:
    """Some packages need more on the first releases of Python 3.11, as a distribution's image has them."""
    todo, needed = _needed(), dict[str, set[str]]()
    while todo:
        wanted = todo.pop()
        name = canonicalize_name(wanted.name)
        if name in needed and wanted.extras <= needed[name]:
            continue
        needed[name] = needed.get(name, set()) | wanted.extras
        with contextlib.suppress(PackageNotFoundError):
            for each in map(Requirement, distribution(name).requires or ()):
                if each.marker is None or any(
                    each.marker.evaluate({"extra": extra, "python_version": "3.11", "python_full_version": "3.11.0"})
                    for extra in ("", *wanted.extras)
                ):
                    todo += [each] if name != "torch" else []  # whose CUDA builds name their libraries' versions
    assert set(needed) - _pinned() == {"baton-client"}


def _pinned() -> set[str]:
    lines = (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
    return {canonicalize_name(line.partition("==")[0]) for line in lines if "==" in line}


def _needed() -> list[Requirement]:
    """Returns what Baton's distributions name, in the extras that images have."""
    needed: list[str] = []
    for path in ("pyproject.toml", "client/pyproject.toml"):
        file = tomllib.loads((ROOT / path).read_text())
        needed += [*file["project"]["dependencies"], *file["build-system"]["requires"]]
        for extra in ("worker", "worker-vllm", "redis", "s3"):
            needed += file["project"].get("optional-dependencies", {}).get(extra, [])
    return [Requirement(each) for each in needed]
