"""Reads deploy/docker-compose.yml as data: its variables filled in, its services' own configurations loaded.

Owns: what `${NAME:-default}` means to both docker-compose 1.29 and docker compose v2. Never: an engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from services.cli.arguments import Parser
from services.core import config as configuration
from services.router.config import RouterConfig
from services.store.config import StoreConfig
from services.worker.config import WorkerConfig
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
COMPOSE_FILE = DEPLOY / "docker-compose.yml"
TLS_FILE = DEPLOY / "docker-compose.tls.yml"
CONFIG_OF: dict[str, type] = {
    "router": RouterConfig,
    "prefill": WorkerConfig,
    "decode": WorkerConfig,
    "mixed": WorkerConfig,
    "kvtransfer": StoreConfig,
}

_VARIABLE = re.compile(r"\$\{(?P<name>[A-Z0-9_]+)(?::-(?P<default>[^}]*))?\}")
_IMAGE_ENV = re.compile(r"^\s+(?:ENV )?((?:BATON|HF)_[A-Z_]+)=(\S+)", re.M)


def variables(text: str) -> dict[str, set[str]]:
    """Returns every variable of the file, with the defaults that it is given."""
    found: dict[str, set[str]] = {}
    for match in _VARIABLE.finditer(text):
        found.setdefault(match["name"], set()).add(match["default"])
    return found


def load(environ: Mapping[str, str] | None = None, file: Path = COMPOSE_FILE) -> dict[str, Any]:
    """Returns the file with its variables filled in from `environ`, anchors and merges resolved."""
    given = environ or {}
    text = _VARIABLE.sub(lambda match: given.get(match["name"]) or match["default"], file.read_text())
    document: dict[str, Any] = yaml.safe_load(text)
    return document


def services(environ: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = load(environ)["services"]
    return found


def services_with_tls() -> dict[str, dict[str, Any]]:
    """Returns the services with the file for TLS on top, as compose merges what that has."""
    found = services()
    for name, over in load(file=TLS_FILE)["services"].items():
        service = found.setdefault(name, {})
        for key, value in over.items():
            if key in ("environment", "depends_on"):
                service[key] = {**service.get(key, {}), **value}
            elif key == "volumes":
                service[key] = [*service.get(key, []), *value]
            else:
                service[key] = value
    return found


def env_file(path: Path) -> dict[str, str]:
    """Returns what docker compose reads from an --env-file: NAME=VALUE lines and comments."""
    values: dict[str, str] = {}
    for line in path.read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            name, _, value = line.partition("=")
            assert name not in values, f"{path.name}: {name} is set twice"
            values[name] = value
    return values


def default_profiles() -> set[str]:
    """Returns the profiles that are active when neither a flag nor the shell names any."""
    return set(filter(None, env_file(DEPLOY / ".env").get("COMPOSE_PROFILES", "").split(",")))


def num_workers(services: Mapping[str, dict[str, Any]], profiles: set[str]) -> Iterator[tuple[str, str, int]]:
    """Yields (service, role, how many) of every worker that these profiles start."""
    for name, service in services.items():
        if service.get("command", [""])[0] in ("prefill", "decode", "mixed") and (
            "profiles" not in service or profiles & set(service["profiles"])
        ):
            yield name, service["command"][0], int(service["scale"])


def image_environment() -> dict[str, str]:
    """Returns what deploy/Dockerfile sets for every container."""
    runtime = (DEPLOY / "Dockerfile").read_text().partition(" AS runtime\n")[2].partition("\nFROM ")[0]
    return dict(_IMAGE_ENV.findall(runtime))


def configuration_of(service: Mapping[str, Any]) -> Any:
    """The service's own config, loaded as its process does: from the image's variables, the file's, and the command."""
    role, *flags = service["command"]
    config_type = CONFIG_OF[role]
    parser = Parser(prog=role)
    configuration.add_arguments(parser, config_type)
    environ = {**image_environment(), **{name: _text(value) for name, value in service["environment"].items()}}
    return configuration.load(config_type, parser.parse_args(flags), environ)


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
