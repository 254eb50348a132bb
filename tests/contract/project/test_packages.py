"""The two distributions as they are installed: what each holds, what each needs, and what runs without the rest."""

from __future__ import annotations

import asyncio
import email
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from baton_client import Client
from tests.support.cluster import CONFIG, Cluster
from tests.support.hidden import with_only, without
from tests.support.processes import PYTHON_PATH, ROOT
from tests.support.scripted_worker import TEXT
from tests.support.trusted import CLUSTER_TOKEN

pytestmark = pytest.mark.process

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHIN_S = 120.0


def name_of(requirement: str) -> str:
    return re.split(r"[\[<>=~!; ]", requirement)[0].lower().replace("_", "-")


WORKER = {name_of(each) for each in PROJECT["optional-dependencies"]["worker"]}
"""The distributions that only workers need; each is also the name of the package that it installs."""


def build(source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    built = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "client", tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def serving_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, tmp_path_factory.mktemp("serving"))


def files(wheel: Path) -> set[str]:
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def metadata(wheel: Path) -> email.message.Message:
    archive = zipfile.ZipFile(wheel)
    (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    return email.message_from_bytes(archive.read(name))


def needed(wheel: Path, extra: str = "") -> set[str]:
    """Returns the names of the distributions that come along, without an extra or because of this one."""
    wanted = f"extra == '{extra}'" if extra else ""
    found = [each.partition(";") for each in metadata(wheel).get_all("Requires-Dist", [])]
    return {name_of(requirement) for requirement, _, marker in found if marker.strip() == wanted}


def test_each_stub_is_installed_by_exactly_one_of_the_two(client_wheel: Path, serving_wheel: Path) -> None:
    client, serving = files(client_wheel), files(serving_wheel)
    assert client & serving == set()
    stubs = {str(path.relative_to(ROOT / "gen")) for path in (ROOT / "gen" / "baton").rglob("*.py*")}
    stubs = {name for name in stubs if "__pycache__" not in name} | {"baton/v1/py.typed"}
    assert {name for name in client | serving if name.startswith("baton/")} == stubs
    assert {name.partition("/")[0] for name in client} == {"baton", "baton_client"}
    assert {name.partition("/")[0] for name in serving} == {"baton", "services"}
    assert "baton_client/py.typed" in client


def test_what_each_needs(client_wheel: Path, serving_wheel: Path) -> None:
    assert needed(client_wheel) == {"grpcio", "protobuf"}
    assert not needed(serving_wheel) & WORKER
    assert needed(serving_wheel, "worker") == WORKER
    assert needed(serving_wheel, "dev") >= WORKER | {"pytest"}
    pinned = f"baton-client=={metadata(client_wheel)['Version']}"
    assert pinned in metadata(serving_wheel).get_all("Requires-Dist", [])
    assert metadata(client_wheel)["Requires-Python"] == metadata(serving_wheel)["Requires-Python"]


CLIENT = """
import asyncio, pkgutil, importlib
import baton.v1, baton_client
for name in ("torch", "transformers", "services", "google.rpc.status_pb2"):
    try:
        importlib.import_module(name)
    except ModuleNotFoundError:
        continue
    raise AssertionError(name)
modules = [each.name for part in (baton.v1, baton_client)
           for each in pkgutil.iter_modules([path for path in part.__path__ if path.startswith(installed)],
                                            part.__name__ + ".")]
assert all(importlib.import_module(name).__file__.startswith(installed) for name in modules)
assert {"baton.v1.inference_pb2_grpc", "baton.v1.types_pb2", "baton_client.aio"} <= set(modules), modules

from baton.v1.inference_pb2 import GenerateRequest
from baton_client import AsyncClient, Client, InvalidArgument

with Client(target) as client:
    print("".join(event.chunk.text for event in client.generate_stream(GenerateRequest(text="hi"), timeout_s=60)))

async def main():
    async with AsyncClient(target) as client:
        print((await client.generate(GenerateRequest(text="hi"), timeout_s=60)).output.text)
        try:
            await client.generate(GenerateRequest(text="hi", priority=1000), timeout_s=60)
        except InvalidArgument as error:
            print(error.reason, error.violations[0].field)

asyncio.run(main())
"""


@pytest.fixture
async def target(model: str, client_wheel: Path) -> AsyncIterator[str]:
    """Yields the address of a router whose workers may be silent for as long as other processes take to start."""
    cluster = Cluster(replace(CONFIG, model=model, silence_s=WITHIN_S))
    await cluster.start()
    await cluster.add("mixed")
    yield cluster.router.address
    await cluster.idle()
    await cluster.stop()


async def test_the_client_runs_with_grpcio_and_protobuf_alone(client_wheel: Path, target: str, tmp_path: Path) -> None:
    """Its wheel, installed by pip, is used against a real router in a process that has nothing else of Baton's."""
    install = ["-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(tmp_path)]
    await ran(*install, "--disable-pip-version-check", str(client_wheel))
    only = with_only({"grpc", "google.protobuf", "google._upb", "typing_extensions", "baton", "baton_client"})
    start = f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\ninstalled = {str(tmp_path)!r}\n{only}"
    said = await ran("-I", "-c", f"{start}\ntarget = {target!r}\n{CLIENT}")
    assert said.splitlines() == [TEXT, TEXT, "INVALID_PARAMETER priority"]


async def ran(*arguments: str) -> str:
    """Returns what a process of Python's printed."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, *arguments, stdout=pipe, stderr=pipe)
    async with asyncio.timeout(WITHIN_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


EVERY_MODULE = """
import importlib, pkgutil
import services.cli, services.router, services.rpc
for part in (services.cli, services.router, services.rpc):
    for each in pkgutil.walk_packages(part.__path__, part.__name__ + "."):
        if each.name not in ("services.cli.mixed",):
            importlib.import_module(each.name)
print(sorted(hide & set(sys.modules)))
"""


def environment() -> dict[str, str]:
    ours = {"PYTHONPATH": PYTHON_PATH, "BATON_CLUSTER_TOKEN": CLUSTER_TOKEN}
    return {name: value for name, value in os.environ.items() if not name.startswith("BATON_")} | ours


def test_router_and_commands_import_without_the_extra() -> None:
    """All modules are imported but one: a mixed worker is a worker."""
    code = f"hide = {WORKER}\n{without(WORKER)}\n{EVERY_MODULE}"
    process = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert process.stdout == "[]\n"


def bare(*arguments: str) -> list[str]:
    """Runs `baton ARGUMENTS` without the extra."""
    command = f"from services.cli.main import main; sys.exit(main({list(arguments)}))"
    return [sys.executable, "-c", f"{without(WORKER)}\n{command}"]


def test_a_router_serves_without_the_extra(model: str) -> None:
    ports = ("--port", "0", "--control-port", "0", "--http-port", "0", "--drain-s", "0")
    command = bare("router", "--model", model, *ports)
    process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        address = next(match[1] for line in lines if (match := re.search(r"listening on ([\d.:]+),", line)))
        with Client(address) as client:
            (served,) = client.list_models(timeout_s=WITHIN_S)
        assert (served.id, served.ready) == (Path(model).name, False)
    finally:
        process.terminate()
        _, err = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, err


@pytest.mark.parametrize(
    ("arguments", "purpose"),
    [
        (("prefill",), "a worker"),
        (("up", "--port", "0"), "a worker"),
        (("models", "pull"), "converting smollm2-135m-instruct"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_needs_the_extra_says_so(arguments: tuple[str, ...], purpose: str, tmp_path: Path) -> None:
    environ = environment() | {"BATON_HOME": str(tmp_path)}
    process = subprocess.run(bare(*arguments), env=environ, capture_output=True, text=True, timeout=WITHIN_S)
    reason = f"{purpose} needs torch, which is not installed: pip install 'baton-serving[worker]'"
    assert process.stderr == f"baton {arguments[0]}: error: {reason}\n"
    assert process.returncode == 1
    assert list(tmp_path.iterdir()) == []
