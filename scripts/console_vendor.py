"""Brings the console's libraries: `python scripts/console_vendor.py` fetches them from npm and copies what is used.

Owns: which packages, of which version, and which of their files. A package is fetched by `npm pack` and refused unless
it has the SHA-512 that is written here. What was copied is recorded beside it (`vendor.json`: package, version, licence
and the SHA-512 of each file), and `--check` compares without a network.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import hashlib
import json
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECORD = "vendor.json"


@dataclasses.dataclass(frozen=True)
class Package:
    """Names a package of npm, the integrity that the registry published for it, and the files wanted of it."""

    name: str
    version: str
    licence: str
    integrity: str
    folder: str
    files: dict[str, str]
    """Of each file in the package, the name it gets."""


SHIPPED = "services/router/console/static/vendor"
TESTED = "tests/browser/vendor"

PACKAGES = (
    # preact is in its `standalone` build, with the hooks: one module, which imports nothing.
    Package(
        "htm",
        "3.1.1",
        "Apache-2.0",
        "sha512-983Vyg8NwUE7JkZ6NmOqpCZ+sh1bKv2iYTlUkzlWmA5JD2acKoxd4KVxbMmxX/85mtfdnDmTFoNKcg5DGAvxNQ==",
        SHIPPED,
        {"preact/standalone.module.js": "htm-preact.js", "LICENSE": "LICENSE.htm"},
    ),
    # For its licence: that of what the build above contains.
    Package(
        "preact",
        "10.5.13",
        "MIT",
        "sha512-q/vlKIGNwzTLu+jCcvywgGrt+H/1P/oIRSD6mV4ln3hmlC+Aa34C7yfPI4+5bzW8pONyVXYS7SvXosy2dKKtWQ==",
        SHIPPED,
        {"LICENSE": "LICENSE.preact"},
    ),
    Package(
        "uplot",
        "1.6.32",
        "MIT",
        "sha512-KIMVnG68zvu5XXUbC4LQEPnhwOxBuLyW1AHtpm6IKTXImkbLgkMy+jabjLgSLMasNuGGzQm/ep3tOkyTxpiQIw==",
        SHIPPED,
        {"dist/uPlot.esm.js": "uplot.js", "dist/uPlot.min.css": "uplot.css", "LICENSE": "LICENSE.uplot"},
    ),
    # Tests look with it for what keeps people from using the pages. It does not ship.
    Package(
        "axe-core",
        "4.14.1",
        "MPL-2.0",
        "sha512-FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ==",
        TESTED,
        {"axe.min.js": "axe.min.js", "LICENSE": "LICENSE.axe-core"},
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Fetches the console's libraries, or compares them with their pins.")
    parser.add_argument("--check", action="store_true", help="compare what is there with what is pinned; no network")
    if parser.parse_args().check:
        wrong = list(differences(ROOT))
        print("\n".join(wrong) or f"{len(PACKAGES)} packages are as they are pinned")
        return 1 if wrong else 0
    for folder in _folders():
        (ROOT / folder).mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        _bring(package)
        print(f"{package.name} {package.version}: {', '.join(package.files.values())}")
    for folder in _folders():
        (ROOT / folder / RECORD).write_text(json.dumps(_record(ROOT, folder), indent=2) + "\n", encoding="utf-8")
    return 0


def differences(root: Path) -> Iterator[str]:
    """Yields what differs between the files under `root` and the pins, in words."""
    for folder in _folders():
        try:
            recorded = json.loads((root / folder / RECORD).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            yield f"{folder}/{RECORD}: {error}"
            continue
        pins = {each.name: (each.version, each.licence, each.integrity) for each in PACKAGES if each.folder == folder}
        if {name: (of["version"], of["licence"], of["integrity"]) for name, of in recorded.items()} != pins:
            yield f"{folder}/{RECORD}: it was made for other versions; run {Path(__file__).name} again"
        expected = {name: digest for of in recorded.values() for name, digest in of["files"].items()}
        found = {path.name: _integrity(path.read_bytes()) for path in (root / folder).iterdir() if path.name != RECORD}
        for name in sorted(expected.keys() | found.keys()):
            if expected.get(name) != found.get(name):
                how = "is missing" if name not in found else "is not pinned" if name not in expected else "has changed"
                yield f"{folder}/{name} {how}"


def _bring(package: Package) -> None:
    with tempfile.TemporaryDirectory() as place:
        subprocess.run(
            ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
            cwd=place,
            check=True,
            stdout=subprocess.DEVNULL,
            timeout=120,
        )
        (archive,) = Path(place).iterdir()
        found = _integrity(archive.read_bytes())
        if found != package.integrity:
            raise SystemExit(
                f"{package.name} {package.version} is {found}, and not what is pinned: {package.integrity}"
            )
        with tarfile.open(archive) as members:
            for source, name in package.files.items():
                member = members.extractfile(f"package/{source}")
                assert member is not None, f"{package.name} has no file {source}"
                (ROOT / package.folder / name).write_bytes(member.read())


def _record(root: Path, folder: str) -> dict[str, Any]:
    return {
        package.name: {
            "version": package.version,
            "licence": package.licence,
            "integrity": package.integrity,
            "files": {name: _integrity((root / folder / name).read_bytes()) for name in package.files.values()},
        }
        for package in PACKAGES
        if package.folder == folder
    }


def _folders() -> list[str]:
    return list(dict.fromkeys(package.folder for package in PACKAGES))


def _integrity(content: bytes) -> str:
    """Returns the SHA-512 as npm writes it."""
    return "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode("ascii")


if __name__ == "__main__":
    sys.exit(main())
