"""Tests clients that nobody here wrote, each in a script of its own, against a split cluster.

A case is a file in scripts/ (Python) or node/ (JavaScript). It is given the address and a model's name, and fails if it
exits with an error. Each asks for a stream too, and is run again where comments stand in it (`--http-keepalive-s`).
A Python script says in a line `# needs: a, b` what it imports: it runs in Baton's own environment if that is there,
else in the one that `make clients` makes (requirements/clients.txt), else it is skipped.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.support import ROOT
from tests.support.cluster import Cluster, running_cluster
from tests.support.commented_streams import commented_streams
from tests.support.http_client import HTTP, address
from tests.support.models import tiny_model
from tests.support.tool_models import HERMES_TEMPLATE
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.asyncio(loop_scope="module")

HERE = Path(__file__).parent
OWN_ENVIRONMENT = Path(os.environ.get("BATON_CLIENTS_PYTHON", ROOT / "out" / "clients-venv" / "bin" / "python"))
NODE_MODULES = HERE / "node" / "node_modules"
WITHIN_S = 180.0


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    model = tiny_model("llama", tmp_path_factory.mktemp("clients"))
    (model / "chat_template.jinja").write_text(HERMES_TEMPLATE)
    flags = {**HTTP, "reasoning_parser": ("none",)}
    async with running_cluster(model, [PREFILL, DECODE], router=flags, kv_blocks=400) as cluster:
        yield cluster


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def quiet(cluster: Cluster) -> AsyncIterator[None]:
    yield
    await cluster.idle()


def python_for(script: Path) -> str | Path:
    """Returns an interpreter that has what the script needs, or skips the test and says why."""
    needs = re.search(r"^# needs: (.+)$", script.read_text(), re.MULTILINE)
    assert needs is not None, f"{script.name} does not say what it needs"
    modules = needs[1].split(", ")
    if all(importlib.util.find_spec(module) for module in modules):
        return sys.executable
    if not OWN_ENVIRONMENT.exists():
        pytest.skip(f"{needs[1]} are not installed here, and there is no {OWN_ENVIRONMENT}: make clients")
    found = subprocess.run([OWN_ENVIRONMENT, "-c", f"import {needs[1]}"], capture_output=True, text=True, check=False)
    if found.returncode != 0:
        pytest.skip(f"{OWN_ENVIRONMENT} lacks some of {needs[1]}: {found.stderr.strip().splitlines()[-1]}")
    return OWN_ENVIRONMENT


async def run(base: str, *command: str | Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        *command,
        f"{base}/v1",
        "tiny-llama",
        env=environment | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(WITHIN_S):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()


IN_PYTHON = pytest.mark.parametrize("script", sorted((HERE / "scripts").glob("*.py")), ids=lambda path: path.stem)
IN_NODE = pytest.mark.parametrize("script", sorted((HERE / "node").glob("*.mjs")), ids=lambda path: path.stem)


@IN_PYTHON
async def test_python(cluster: Cluster, script: Path) -> None:
    await run(address(cluster), python_for(script), script)


@IN_PYTHON
async def test_python_ignores_comments_in_streams(cluster: Cluster, script: Path) -> None:
    await run_with_comments(cluster, python_for(script), script)


@IN_NODE
async def test_node(cluster: Cluster, script: Path) -> None:
    await run(address(cluster), node(), script)


@IN_NODE
async def test_node_ignores_comments_in_streams(cluster: Cluster, script: Path) -> None:
    await run_with_comments(cluster, node(), script)


async def run_with_comments(cluster: Cluster, *command: str | Path) -> None:
    async with commented_streams(address(cluster)) as (base, streams):
        await run(base, *command)
    assert streams.num_comments, "the script asks for no stream"


def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("there is no node")
    if not NODE_MODULES.is_dir():
        pytest.skip(f"there is no {NODE_MODULES}: make clients")
    return found
