"""Tests that without the cluster token nobody gets anything from the control plane, on any port; clients and probes
need none.

The RPCs are those of the descriptors: a new one is tried here by itself, and refused unless it is named as open.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc

import baton.v1
from services.core.errors import Unauthenticated
from services.rpc.authentication import credentials
from services.rpc.status import from_call
from tests.support.calls import ask_on
from tests.support.cluster import Cluster, running_cluster
from tests.support.models import tiny_model
from tests.support.patience import HANG_S
from tests.support.trusted import CLUSTER_TOKEN
from tests.support.workers import DECODE, MIXED, PREFILL

pytestmark = pytest.mark.asyncio(loop_scope="module")

Code = grpc.StatusCode
Metadata = Sequence[tuple[str, str]]
MALFORMED = b"\xff\xff\xff"
FOR_ANYONE = {"baton.v1.InferenceService"}


def services() -> Iterator[Any]:
    """Yields descriptors of every service in the package."""
    for module in pkgutil.iter_modules(baton.v1.__path__):
        if module.name.endswith("_pb2"):
            generated = importlib.import_module(f"baton.v1.{module.name}")
            yield from generated.DESCRIPTOR.services_by_name.values()


CLOSED = [
    f"/{service.full_name}/{method.name}"
    for service in services()
    if service.full_name not in FOR_ANYONE
    for method in service.methods
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("models"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, [PREFILL, DECODE, MIXED]) as cluster:
        yield cluster


def doors(cluster: Cluster) -> dict[str, str]:
    """Returns every gRPC port of the cluster."""
    router = {"public": cluster.router.address, "control": cluster.router.control_address}
    return router | {worker.worker_id: worker.address for worker in cluster.workers}


async def ask(address: str, method: str, metadata: Metadata = (), data: bytes = b"") -> grpc.aio.AioRpcError | None:
    """Returns how a call of a stranger ends; None if all is well."""
    async with grpc.aio.insecure_channel(address) as channel:
        return await ask_on(channel, method, metadata, data)


async def test_what_is_closed() -> None:
    assert {method.rpartition("/")[2] for method in CLOSED} >= {
        "Register", "Drain", "GetStatus", "Session", "GetModelText", "Fetch", "Release",
    }  # fmt: skip


async def test_a_stranger_gets_nothing_on_any_port(cluster: Cluster) -> None:
    served = set()
    for door, address in doors(cluster).items():
        for method in CLOSED:
            error = await ask(address, method)
            assert error is not None, f"{method} on {door} answers a stranger"
            assert error.code() in (Code.UNAUTHENTICATED, Code.UNIMPLEMENTED), f"{method} on {door}: {error.code()}"
            if error.code() is Code.UNAUTHENTICATED:
                served.add(method)
    assert served == set(CLOSED), "each is served somewhere, or nothing was tried"


@pytest.mark.parametrize(
    "metadata",
    [
        credentials("another-token-of-16"),
        credentials(CLUSTER_TOKEN + "x"),
        credentials(CLUSTER_TOKEN[:-1]),
        [("authorization", CLUSTER_TOKEN)],
        [("authorization", f"Basic {CLUSTER_TOKEN}")],
        [("authorization", "")],
        [("x-cluster-token", f"Bearer {CLUSTER_TOKEN}")],
        [*credentials(CLUSTER_TOKEN), *credentials("another-token-of-16")],
    ],
)
async def test_a_wrong_token_or_the_token_in_a_wrong_place(cluster: Cluster, metadata: Metadata) -> None:
    served = {door: [m for m in CLOSED if await is_served(a, m)] for door, a in doors(cluster).items()}
    assert {method for methods in served.values() for method in methods} == set(CLOSED)
    for door, methods in served.items():
        for method in methods:
            error = await ask(doors(cluster)[door], method, metadata)
            assert error is not None, f"{method} on {door}"
            refusal = from_call(error)
            assert type(refusal) is Unauthenticated
            assert CLUSTER_TOKEN not in str(refusal)


async def is_served(address: str, method: str) -> bool:
    error = await ask(address, method, credentials(CLUSTER_TOKEN), MALFORMED)
    return error is None or error.code() is not Code.UNIMPLEMENTED


async def test_with_the_token_all_of_it_is_there(cluster: Cluster) -> None:
    """This shows that the refusals above were for want of the token."""
    served = [m for m in CLOSED for address in doors(cluster).values() if await is_served(address, m)]
    assert set(served) == set(CLOSED)


async def test_nothing_is_read_of_what_a_stranger_sends(cluster: Cluster) -> None:
    """A refusal comes before the first message: whoever sends none waits for nothing, and many bytes are no memory."""
    for address in doors(cluster).values():
        async with grpc.aio.insecure_channel(address) as channel:
            for method in CLOSED:
                call = channel.stream_stream(method)(timeout=HANG_S)
                assert await call.code() in (Code.UNAUTHENTICATED, Code.UNIMPLEMENTED)


async def test_health_needs_no_token_on_any_port(cluster: Cluster) -> None:
    for address in doors(cluster).values():
        async with grpc.aio.insecure_channel(address) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
