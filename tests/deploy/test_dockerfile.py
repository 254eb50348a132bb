"""Tests the rules of deploy/Dockerfile, without building it."""

from __future__ import annotations

import re
import subprocess
import tomllib

from tests.support.compose import DEPLOY

ROOT = DEPLOY.parent
TEXT = (DEPLOY / "Dockerfile").read_text()
INSTRUCTIONS = [
    re.sub(r"\\\n\s*", " ", line)
    for line in re.split(r"\n(?=[A-Z]+ )", re.sub(r"^#.*\n", "", TEXT, flags=re.M))
    if line.strip()
]
STARTS = [number for number, line in enumerate(INSTRUCTIONS) if line.startswith("FROM ")]
STAGES = {
    INSTRUCTIONS[start].partition(" AS ")[2].strip() or "worker": INSTRUCTIONS[start:end]
    for start, end in zip(STARTS, [*STARTS[1:], None], strict=True)
}
"""The last one has no name: it is what is built when none is asked for."""
BUILDERS = ["dependencies", "distributions", "router-builder", "vllm-builder", "worker-builder"]
FINAL = [*STAGES["runtime"], *STAGES["router"], *STAGES["vllm"], *STAGES["worker"]]


def test_the_stages_and_what_each_stands_on() -> None:
    assert INSTRUCTIONS[0].strip() == "ARG BASE_IMAGE=python:3.11-slim"
    assert {name: lines[0].split()[1] for name, lines in STAGES.items()} == {
        "dependencies": "${BASE_IMAGE}",
        "distributions": "dependencies",
        "router-builder": "dependencies",
        "vllm-builder": "dependencies",
        "worker-builder": "dependencies",
        "runtime": "${BASE_IMAGE}",
        "router": "runtime",
        "vllm": "runtime",
        "worker": "runtime",
    }
    assert list(STAGES)[-1] == "worker"


def test_no_compiler_in_the_images() -> None:
    assert any("gcc" in line for line in STAGES["worker-builder"])
    for line in FINAL:
        assert not re.search(r"\b(apt-get|apt|gcc|g\+\+|clang|make|build-essential)\b", line), line
    for name in ("router", "vllm", "worker"):
        (copied,) = [line.split() for line in STAGES[name] if line.startswith("COPY")]
        assert copied == ["COPY", f"--from={name}-builder", "/opt/baton", "/opt/baton"]
    assert not any(line.startswith("COPY") for line in STAGES["runtime"])


def test_the_routers_image_has_nothing_of_the_extra() -> None:
    """The stage that makes its venv never names the worker's requirements, nor a compiler: this is seen in the file."""
    for name in ("dependencies", "router-builder"):
        installs = [line for line in STAGES[name] if "pip install" in line]
        assert installs
        for line in installs:
            assert re.search(
                r"pip install (--requirement runtime\.txt|--no-deps --no-index /build/dist/\*\.whl)$", line.strip()
            )
    assert any("--requirement worker.txt ${TORCH_INDEX}" in line for line in STAGES["worker-builder"])
    assert not any("gcc" in line for name in ("dependencies", "router-builder") for line in STAGES[name])


def test_they_do_not_run_as_root() -> None:
    assert [line for line in STAGES["runtime"] if line.startswith("USER ")] == ["USER baton"]
    assert [line for line in STAGES["vllm"] if line.startswith("USER ")] == ["USER root", "USER baton"]
    for name in ("runtime", "router", "vllm", "worker"):
        stage = STAGES[name]
        after = stage[len(stage) - stage[::-1].index("USER baton") :] if "USER baton" in stage else stage
        assert not any(line.startswith(("RUN ", "USER ")) for line in after), name
    assert re.search(r"useradd --uid 10001 ", TEXT)


def test_the_user_is_the_one_the_sockets_belong_to() -> None:
    assert "uid=10001,gid=10001" in (DEPLOY / "docker-compose.yml").read_text()


def test_vllms_python_is_the_base_images() -> None:
    (kept,) = [line for line in STAGES["vllm"] if line.startswith("RUN ")]
    assert 'exec %s "$@"' in kept
    assert "> /usr/local/bin/vllm-python" in kept
    assert "ENV BATON_VLLM_PYTHON=/usr/local/bin/vllm-python" in STAGES["vllm"]
    last = next(number for number, line in enumerate(STAGES["vllm"]) if line.startswith("COPY "))
    assert STAGES["vllm"].index(kept) < last, "before Baton's own Python is there, which comes first in PATH"


def test_health_is_asked_of_baton() -> None:
    (check,) = [line for line in FINAL if line.startswith("HEALTHCHECK ")]
    assert "baton health --target 127.0.0.1:$BATON_PORT" in check


def test_the_cache_is_a_volume() -> None:
    assert "BATON_HOME=/var/lib/baton" in TEXT
    assert "VOLUME /var/lib/baton" in FINAL


def test_what_is_installed_is_pinned() -> None:
    """Every package is pinned: pip itself applies the constraints to whatever a later line installs."""
    assert "PIP_CONSTRAINT=/build/constraints.txt" in TEXT
    pinned = {
        re.split("==", line)[0].lower().replace("_", "-")
        for line in (ROOT / "requirements" / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    needed: list[str] = []
    for path in ("pyproject.toml", "client/pyproject.toml"):
        file = tomllib.loads((ROOT / path).read_text())
        needed += [*file["project"]["dependencies"], *file["build-system"]["requires"]]
        for extra in ("worker", "worker-vllm", "redis", "s3"):
            needed += file["project"].get("optional-dependencies", {}).get(extra, [])
    names = {re.split(r"[\[<>=~ ]", line)[0].lower().replace("_", "-") for line in needed}
    assert names - pinned == {"baton-client"}


def test_variants_are_checked() -> None:
    builder = STAGES["worker-builder"]
    assert "ARG VARIANT=cpu" in builder
    assert any("cpu | cuda)" in line for line in builder)
    assert 'ARG TORCH_INDEX=""' in builder


def test_the_context_holds_what_is_copied_and_little_else() -> None:
    admitted = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    lines = [line for name in BUILDERS for line in STAGES[name]]
    sources = {part for line in lines if line.startswith("COPY ") for part in line.split()[1:-1]}
    assert sources - admitted == {"client/pyproject.toml"}
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
