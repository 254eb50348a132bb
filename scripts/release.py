"""Completes a release in the folder into which scripts/wheels.py has built the wheels; it publishes nothing.

Run as `python scripts/release.py FOLDER`. It adds the source distribution, the images as archives (or says that they
are left out), LICENCES.txt with what is installed along, and SHA256SUMS of all that is there.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
_VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
_IMAGES = {"cpu": (), "router": ("--target", "router")}
"""Tags of the images, with what the build is told beyond deploy/Dockerfile's defaults."""
_FROM_ENVIRONMENT = ("--build-arg", "BASE_IMAGE", "--build-arg", "TORCH_INDEX")
"""The build arguments that the environment may set, as for `docker compose build`."""
_ALL = "baton-serving[worker,redis,s3,nixl,plot]"


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder)],
        cwd=ROOT,
        check=True,
    )
    _save_images(folder)
    (folder / "LICENCES.txt").write_text(_licences())
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{_sha256(path)}  {path.name}\n" for path in files]
    (folder / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")
    return 0


def _save_images(folder: Path) -> None:
    docker = shutil.which("docker")
    asked = docker and subprocess.run([docker, "info"], capture_output=True, text=True, check=False)
    if not docker or not asked or asked.returncode:
        why = asked.stderr.strip().splitlines()[-1] if asked and asked.stderr.strip() else "there is no docker"
        print(f"the images are LEFT OUT: {why}", file=sys.stderr)
        return
    for kind, options in _IMAGES.items():
        tag = f"baton:{_VERSION}-{kind}"
        build = [docker, "build", "--file", "deploy/Dockerfile", "--tag", tag, *_FROM_ENVIRONMENT, *options, "."]
        subprocess.run(build, cwd=ROOT, env={**os.environ, "DOCKER_BUILDKIT": "1"}, check=True)
        archive = folder / f"baton-{_VERSION}-{kind}-image.tar.gz"
        with (
            subprocess.Popen([docker, "save", tag], stdout=subprocess.PIPE) as save,
            gzip.open(archive, "wb", compresslevel=6) as file,
        ):
            assert save.stdout is not None
            shutil.copyfileobj(save.stdout, file)
        if save.returncode:
            raise SystemExit(f"docker save {tag} failed")


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _licences() -> str:
    """Returns a line for each package that is installed along, and for each library in the console's pages."""
    lines = [f"{name} {version}: {licence}" for name, (version, licence) in sorted(_installed_along(_ALL).items())]
    pages = json.loads((ROOT / "services/router/console/static/vendor/vendor.json").read_text())
    lines += [f"{name} {each['version']}: {each['licence']} (in the console's pages)" for name, each in pages.items()]
    return f"What {_ALL} needs, in the versions installed where this was made, under which licence:\n\n" + "".join(
        f"{line}\n" for line in lines
    )


def _installed_along(requirement: str) -> dict[str, tuple[str, str]]:
    """Returns the version and licence of each distribution that the requirement brings here, itself included."""
    found: dict[str, tuple[str, str]] = {}
    todo, seen = [Requirement(requirement)], set[tuple[str, str]]()
    while todo:
        wanted = todo.pop()
        name = wanted.name.lower().replace("_", "-")
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            found[name] = ("", "not installed here")
            continue
        found[name] = (installed.version, licence_of(installed))
        for extra in {"", *wanted.extras} - {extra for each, extra in seen if each == name}:
            seen.add((name, extra))
            needed = map(Requirement, installed.requires or ())
            todo += [each for each in needed if not each.marker or each.marker.evaluate({"extra": extra})]
    return found


def licence_of(installed: Distribution) -> str:
    """Returns the licence as the package's metadata name it: as an expression, in its classifiers, or in a line."""
    said, classifiers = installed.metadata.json, installed.metadata.get_all("Classifier") or []
    classified = [each.split(" :: ")[-1] for each in classifiers if each.startswith("License")]
    line, _, _ = str(said.get("license", "")).strip().partition("\n")
    return str(said.get("license_expression") or ", ".join(classified) or line or "UNKNOWN")


if __name__ == "__main__":
    sys.exit(main())
