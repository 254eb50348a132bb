"""Rules of deploy/Dockerfile, without building it."""

from __future__ import annotations

import re
import subprocess
import tomllib

from tests.deploy.compose import DEPLOY

ROOT = DEPLOY.parent
TEXT = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    re.sub(r"\\\n\s*", " ", line)
    for line in re.split(r"\n(?=[A-Z]+ )", re.sub(r"^#.*\n", "", TEXT, flags=re.M))
    if line.strip()
]
STAGES = [number for number, line in enumerate(INSTRUCTIONS) if line.startswith("FROM ")]
BUILDER, FINAL = INSTRUCTIONS[STAGES[0] : STAGES[1]], INSTRUCTIONS[STAGES[1] :]


def test_both_stages_stand_on_the_base_image() -> None:
    assert INSTRUCTIONS[0].strip() == "ARG BASE_IMAGE=python:3.11-slim"
    assert [INSTRUCTIONS[number].split()[1] for number in STAGES] == ["${BASE_IMAGE}", "${BASE_IMAGE}"]


def test_no_compiler_in_the_final_stage() -> None:
    assert any("gcc" in line for line in BUILDER)
    for line in FINAL:
        assert not re.search(r"\b(apt-get|apt|gcc|g\+\+|clang|make|build-essential)\b", line), line
    copies = [line for line in FINAL if line.startswith("COPY")]
    assert [line.split() for line in copies] == [["COPY", "--from=builder", "/opt/baton", "/opt/baton"]]


def test_it_does_not_run_as_root() -> None:
    users = [line.split()[1] for line in FINAL if line.startswith("USER ")]
    assert users == ["baton"]
    after = FINAL[FINAL.index("USER baton") :]
    assert not any(line.startswith("RUN ") for line in after)
    assert re.search(r"useradd --uid 10001 ", TEXT)


def test_the_user_is_the_one_the_sockets_belong_to() -> None:
    assert "uid=10001,gid=10001" in (DEPLOY / "docker-compose.yml").read_text()


def test_health_is_asked_of_baton() -> None:
    (check,) = [line for line in FINAL if line.startswith("HEALTHCHECK ")]
    assert "baton health --target 127.0.0.1:$BATON_PORT" in check


def test_the_cache_is_a_volume() -> None:
    assert "BATON_HOME=/var/lib/baton" in TEXT
    assert "VOLUME /var/lib/baton" in FINAL


def test_what_is_installed_is_pinned() -> None:
    """All of it: pip itself applies the constraints to whatever a later line installs."""
    assert "PIP_CONSTRAINT=/build/constraints.txt" in TEXT
    pinned = {
        re.split("==", line)[0].lower().replace("_", "-")
        for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    names = {re.split(r"[\[<>=~ ]", line)[0].lower().replace("_", "-") for line in needed}
    assert names <= pinned, names - pinned


def test_variants_are_checked() -> None:
    assert "ARG VARIANT=cpu" in BUILDER
    assert any("cpu | cuda)" in line for line in BUILDER)
    assert 'ARG TORCH_INDEX=""' in BUILDER


def test_the_context_holds_what_is_copied_and_little_else() -> None:
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = {part for line in BUILDER if line.startswith("COPY ") for part in line.split()[1:-1]}
    assert sources <= admitted
    assert admitted - sources == {"deploy/wheels"}
    for source in sources:
        assert (ROOT / source).exists(), source


def test_local_wheels_are_not_committed() -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "deploy/wheels"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert tracked.stdout.split() == ["deploy/wheels/.gitignore"]
