"""The examples, run as they are, against a real router and workers on a tiny model."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pool, json_format, message_factory
from grpc_health.v1 import health_pb2  # noqa: F401  (its descriptors)

from baton.v1 import control_pb2, inference_pb2_grpc  # noqa: F401
from services.core.errors import NoWorker
from services.router.front.grpc.servicer import FULL_NAME
from services.rpc.channels import dial
from services.rpc.serving import GrpcServer
from tests.support.cluster import Cluster, running_cluster
from tests.support.models import tiny_model
from tests.support.processes import ROOT
from tests.support.workers import DECODE, PREFILL

pytestmark = pytest.mark.process

EXAMPLES = ROOT / "examples"
UNREACHABLE = ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ECONNRESET", "ETIMEDOUT", "ENETUNREACH", "ENOTCACHED")
LONG = ("--max-tokens", "900", "--ignore-eos")
"""Takes a tiny model seconds."""


@dataclass
class Ran:
    status: int
    out: str
    err: str


async def run(*command: str | Path) -> Ran:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "client"), "NO_COLOR": "1"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, env=environment, stdout=pipe, stderr=pipe)
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> list[str | Path]:
    """Returns the Node example with what its lock file names, in a folder beside the protos."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("there is no node, or no npm")
    root = tmp_path_factory.mktemp("node")
    shutil.copytree(ROOT / "protos", root / "protos")
    folder = root / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    command = ["npm", "ci", "--prefer-offline", "--no-audit", "--no-fund", "--ignore-scripts", "--fetch-retries", "1"]
    process = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=150, check=False)
    if process.returncode != 0 and any(reason in process.stderr for reason in UNREACHABLE):
        pytest.skip(f"npm reaches no registry: {process.stderr.strip().splitlines()[-1]}")
    assert process.returncode == 0, process.stderr
    return ["node", folder / "client.mjs"]


@pytest.fixture(params=["python", "node"])
def client(request: pytest.FixtureRequest) -> list[str | Path]:
    if request.param == "python":
        return [sys.executable, EXAMPLES / "python" / "client.py"]
    return request.getfixturevalue("node")


@contextlib.asynccontextmanager
async def served(model: Path) -> AsyncIterator[tuple[Cluster, list[str]]]:
    """Serves a cluster; at its end nothing may be left of any request."""
    async with running_cluster(model, [PREFILL, DECODE]) as cluster:
        yield cluster, ["--target", f"127.0.0.1:{cluster.router.port}"]


async def test_an_answer_streams(client: list[str | Path], model: Path) -> None:
    async with served(model) as (_, target):
        ran = await run(*client, *target, "--prompt", "Pass the baton.", "--max-tokens", "12", "--ignore-eos")
    assert ran.status == 0, ran.err
    assert ran.err == ""
    first, *_, last = ran.out.splitlines()
    assert re.fullmatch(r"\[[0-9a-z-]+: \d+ tokens in\]", first)
    assert re.fullmatch(r"\[12 tokens, length; first token after \d+ ms, in all \d+ ms; w0 -> w1\]", last)


async def test_a_deadline_ends_it_everywhere(client: list[str | Path], model: Path) -> None:
    async with served(model) as (_, target):
        ran = await run(*client, *target, "--prompt", "Count.", *LONG, "--timeout", "0.4")
    assert ran.status == 1
    assert ran.err.strip().startswith("DEADLINE_EXCEEDED: ")


async def test_hanging_up_ends_it_everywhere(client: list[str | Path], model: Path) -> None:
    async with served(model) as (cluster, target):
        ran = await run(*client, *target, "--prompt", "Count.", *LONG, "--cancel-after", "3")
        await cluster.idle()
    assert ran.status == 0, ran.err
    assert ran.out.splitlines()[-1] == "[cancelled after 3 messages]"


async def test_errors_are_told(client: list[str | Path], model: Path) -> None:
    async with served(model) as (_, target):
        ran = await run(*client, *target, "--prompt", "Hot.", "--temperature=-1")
    assert ran.status == 1
    assert ran.err.strip().startswith("INVALID_ARGUMENT: ")
    assert "temperature" in ran.err


async def test_an_answer_is_json_under_a_schema(client: list[str | Path], model: Path) -> None:
    *interpreter, program = client
    program = Path(program)
    text = ["--text", "Paris."] if program.suffix == ".mjs" else ["Paris."]
    async with served(model) as (_, target):
        ran = await run(*interpreter, program.with_stem("structured"), *target, *text)
    assert ran.status == 0, ran.err
    assert re.search(r"city.*kind.*(village|town|city).*millions", ran.out, re.DOTALL)


class Busy(inference_pb2_grpc.InferenceServiceServicer):
    """Has no worker for the first two calls, and then one: the real router's."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self.calls = itertools.count(1)
        self.num_calls = 0

    async def GenerateStream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.num_calls = next(self.calls)
        if self.num_calls <= 2:
            raise NoWorker("none is ready yet")
        async for message in self._stub.GenerateStream(request):
            yield message


async def test_what_was_refused_before_it_began_is_tried_again(client: list[str | Path], model: Path) -> None:
    async with served(model) as (cluster, _), dial(f"127.0.0.1:{cluster.router.port}") as channel:
        busy, server = Busy(inference_pb2_grpc.InferenceServiceStub(channel)), GrpcServer()
        server.add(FULL_NAME, inference_pb2_grpc.add_InferenceServiceServicer_to_server, busy)
        await server.start()
        ran = await run(*client, "--target", server.address, "--prompt", "Again.", "--max-tokens", "4", "--ignore-eos")
        await server.stop()
    assert ran.status == 0, ran.err
    assert "[4 tokens, length; " in ran.out
    assert busy.num_calls == 3


@pytest.mark.skipif(shutil.which("grpcurl") is None, reason="there is no grpcurl")
async def test_the_grpcurl_lines(model: Path) -> None:
    async with served(model) as (cluster, _):
        ran = await run(EXAMPLES / "grpcurl.sh", f"127.0.0.1:{cluster.router.port}")
    assert ran.status == 0, ran.err
    for piece in ("baton.v1.InferenceService\n", '"status": "SERVING"', '"completion": {', '"top": ['):
        assert piece in ran.out, piece


def test_the_grpcurl_lines_say_what_the_protos_know() -> None:
    """This needs no grpcurl: the methods exist, and the bodies are their requests."""
    script = (EXAMPLES / "grpcurl.sh").read_text().replace("\\\n", " ")
    calls = re.findall(r"^grpcurl -plaintext(.*?)(?:-d '(.*?)' *)?\"\$TARGET\" (\S+)/(\w+)$", script, re.M | re.S)
    assert len(calls) == 5
    pool = descriptor_pool.Default()
    for _, body, service, method in calls:
        request = pool.FindServiceByName(service).FindMethodByName(method).input_type
        json_format.ParseDict(json.loads(body or "{}"), message_factory.GetMessageClass(request)())


def test_the_lock_file_names_the_pinned_versions_and_no_host() -> None:
    package, lock = (
        json.loads((EXAMPLES / "node" / name).read_text()) for name in ("package.json", "package-lock.json")
    )
    for name, version in package["dependencies"].items():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
    for name, entry in lock["packages"].items():
        assert "resolved" not in entry
        assert not name or entry["integrity"].startswith("sha512-")
