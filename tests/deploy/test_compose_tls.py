"""Tests that docker-compose.tls.yml leaves nothing in the clear, and what it makes at the first start."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.router.tenants.keys import key_of
from services.router.tenants.tenants_file import read_tenants
from tests.support import compose
from tests.support.processes import BATON, environment

SERVICES = compose.services_with_tls()
OURS = {name: each for name, each in SERVICES.items() if each["image"].startswith("baton:")}
CLUSTER = {name: each for name, each in OURS.items() if each["command"][0] in compose.CONFIG_OF}
CREDENTIALS = "/run/credentials"


def test_the_services_of_both_files_are_the_same_but_for_one() -> None:
    assert set(SERVICES) - set(compose.services()) == {"credentials"}
    assert set(OURS) - set(CLUSTER) == {"model", "credentials"}, "neither listens"


@pytest.mark.parametrize("name", sorted(CLUSTER))
def test_every_process_of_the_cluster_has_the_certificate_of_its_role(name: str) -> None:
    service = CLUSTER[name]
    config = compose.configuration_of(service)
    role = {"router": "router", "kvtransfer": "store"}.get(service["command"][0], "worker")
    assert config.cluster_auth == "mtls"
    files = (config.tls_cert, config.tls_key, config.tls_ca)
    assert files == tuple(f"{CREDENTIALS}/{file}" for file in (f"{role}.pem", f"{role}.key", "ca.pem"))
    assert f"credentials:{CREDENTIALS}:ro" in service["volumes"]
    assert service["depends_on"]["credentials"] == {"condition": "service_completed_successfully"}
    assert not getattr(config, "allow_plain_kv", False)
    assert not config.allow_plain_token


def test_the_router_asks_for_keys() -> None:
    assert compose.configuration_of(OURS["router"]).tenants == f"{CREDENTIALS}/tenants.yaml"


def test_only_one_container_writes_the_credentials_and_it_reaches_nobody() -> None:
    mounts = {name: volume for name, each in OURS.items() for volume in each["volumes"] if CREDENTIALS in volume}
    assert {name for name, volume in mounts.items() if not volume.endswith(":ro")} == {"credentials"}
    service = OURS["credentials"]
    assert service["network_mode"] == "none"
    assert service["cap_drop"] == ["ALL"]
    assert service["read_only"] is True
    assert "no-new-privileges:true" in service["security_opt"]
    assert CREDENTIALS in (compose.DEPLOY / "Dockerfile").read_text(), "the volume's first owner is who writes it"


@pytest.mark.process
@pytest.mark.parametrize("command", [["docker", "compose"], ["docker-compose"]], ids=" ".join)
def test_compose_itself_takes_both_files(command: list[str]) -> None:
    if shutil.which(command[0]) is None or subprocess.run([*command, "version"], capture_output=True).returncode:
        pytest.skip(f"{' '.join(command)} is not on this machine")
    files = [part for file in (compose.COMPOSE_FILE, compose.TLS_FILE) for part in ("--file", str(file))]
    environ = {**os.environ, "COMPOSE_PROFILES": "cpu,gpu,vllm,store,observability"}
    result = subprocess.run([*command, *files, "config", "--quiet"], env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.process
def test_what_is_made_at_the_first_start_opens_two_tenants_and_stays(tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    folder.mkdir()
    run(tmp_path, folder)
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    tenants = read_tenants(made["tenants.yaml"], "tenants.yaml")
    assert set(tenants) == {"one", "two"}
    for name, tenant in tenants.items():
        key = made[f"{name}.api-key"].decode().strip()
        assert [each.key_id for each in tenant.keys] == [key_of(key).key_id]
    assert {f"{role}.key" for role in ("router", "worker", "store", "operator")} <= set(made)
    assert not {name for name in made if (folder / name).stat().st_mode & 0o077 and not name.endswith(".pem")}
    run(tmp_path, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == made


def run(tmp_path: Path, folder: Path) -> None:
    """Runs what the container runs, in another folder."""
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    baton = programs / "baton"
    baton.write_text(f'#!/bin/sh\nexec {" ".join(BATON)} "$@"\n')
    baton.chmod(0o755)
    service: dict[str, Any] = OURS["credentials"]
    script = service["command"][0].replace("$$", "$").replace(CREDENTIALS, str(folder))
    assert not re.search(r"\$\{", script)
    environ = {**environment(tmp_path), "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    shell = [*service["entrypoint"], script]
    result = subprocess.run(shell, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
