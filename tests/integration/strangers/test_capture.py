"""Looks for prompts, answers, tokens, keys and KV in all that passes between a cluster's processes and its clients.

Without TLS each of them is found: the scanner can find them. With TLS none is.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import ssl
from collections.abc import Iterable, Mapping
from pathlib import Path

import grpc
import psutil
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.certificates import written
from tests.support.models import tiny_model
from tests.support.proxy import Proxy
from tests.support.real_cluster import READY_WITHIN_S, RealCluster, Status, real_cluster
from tests.support.tenants import TenantsFile
from tests.support.trusted import CLUSTER_TOKEN

pytestmark = pytest.mark.process

PROMPT = "Der Reiher zählt sieben silberne Schlüssel unter dem Leuchtturm, " * 6
ENGINE = ("--dtype", "float32", "--threads", "1", "--kv-blocks", "96")
WORKERS = {
    "prefill-0": (*ENGINE, "--transport", "tcp"),
    "decode-0": (*ENGINE, "--transport", "tcp"),
    # What it keeps of prompts it is handed over gRPC.
    "store-0": ("--transport", "grpc", "--kvtransfer-bytes", "64MiB"),
}
_WINDOW, _MOST_WINDOWS, _LEAST_VALUES = 64, 200, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize("has_tls", [False, True], ids=["in the clear", "TLS"])
async def test_what_passes(model: Path, tmp_path: Path, has_tls: bool) -> None:
    tenants = TenantsFile(tmp_path)
    tenants.write(shop={})
    folder = tmp_path / "temp"
    folder.mkdir()
    tls = written(tmp_path / "certificates") if has_tls else None
    async with real_cluster(
        model,
        folder,
        list(WORKERS),
        routers=[("--tenants", str(tenants.path))],
        flags_of=WORKERS,
        records=True,
        tls=tls,
    ) as cluster:
        secrets = await use(cluster, tls, tenants.keys["shop"])
        await cluster.router.until(keeps, "the store has fetched what the prompts have left in caches", READY_WITHIN_S)
        assert num_recorded(cluster) >= len(WORKERS), "this shows that connections are seen"
        secrets["KV"] = windows_of(cluster["prefill-0"].pid)
        recorders = cluster.recorders
        assert found(secrets, recorders.values()) == (set() if has_tls else set(secrets))
        for name in ("prefill-0", "prefill-0-kv"):  # over gRPC, and over sockets
            passed = num_found(secrets["KV"], [recorders[name]])
            assert passed == 0 if has_tls else passed >= 10, name
            num_bytes = sum(map(len, recorders[name].streams))
            assert num_bytes > len(secrets["KV"]) * _WINDOW, "as much as in the clear came this way"


def num_recorded(cluster: RealCluster) -> int:
    """Returns how many connections the processes have. Asserts that they have none but to recorders."""
    ours = {each.port for each in cluster.recorders.values()}
    here = {each.laddr.port for each in psutil.Process(os.getpid()).net_connections(kind="inet")}
    num_seen = 0
    for pid in cluster.pids():
        for each in psutil.Process(pid).net_connections(kind="inet"):
            if each.status == psutil.CONN_ESTABLISHED:
                num_seen += 1
                assert each.raddr.port in ours | here, each  # it dialled a recorder, or a recorder dialled it
    return num_seen


def keeps(status: Status) -> bool:
    return any(each.worker.worker_id == "store-0" and each.load.blocks_cached for each in status.workers)


async def use(cluster: RealCluster, tls: Path | None, key: str) -> dict[str, list[bytes]]:
    """Asks for answers over gRPC and HTTP. Returns the secrets of that, in the forms in which they may pass."""
    metadata = (("authorization", f"Bearer {key}"),)
    request = inference_pb2.GenerateRequest(
        text=PROMPT,
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=24, ignore_eos=True),
        response=inference_pb2.ResponseOptions(echo_token_ids=True),
    )
    async with public_channel(cluster, tls) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.Generate(request, timeout=60.0, metadata=metadata)
        async for _ in stub.GenerateStream(request, timeout=60.0, metadata=metadata):
            pass
    body = await asyncio.to_thread(_complete, cluster, tls, key)
    text, over_http = answer.output.text, body["choices"][0]["text"]
    assert over_http == text
    ids = list(answer.prompt_info.token_ids)
    return {
        "prompt": _forms_of(PROMPT[:60]),
        "output": _forms_of(text),
        "prompt tokens": [varints(ids[start : start + 8]) for start in range(0, len(ids) - 8, 8)],
        "output tokens": [varints(answer.output.token_ids)],
        "API key": [key.encode(), key.split("_", 2)[2].encode()],
        "cluster token": [CLUSTER_TOKEN.encode()],
    }


def public_channel(cluster: RealCluster, tls: Path | None) -> grpc.aio.Channel:
    address = f"127.0.0.1:{cluster.recorders['public'].port}"
    if tls is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials((tls / "ca.pem").read_bytes()))


def _complete(cluster: RealCluster, tls: Path | None, key: str) -> dict[str, list[dict[str, str]]]:
    port = cluster.recorders["http"].port
    if tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    else:
        context = ssl.create_default_context(cafile=str(tls / "ca.pem"))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60.0, context=context)
    asked = {"model": "tiny-llama", "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(asked, ensure_ascii=False).encode(), headers)
    response = connection.getresponse()
    body = json.load(response)
    connection.close()
    assert response.status == 200, body
    return body  # type: ignore[no-any-return]


def _forms_of(text: str) -> list[bytes]:
    """Returns the text as messages and as JSON have it."""
    return [text.encode(), *(json.dumps(text, ensure_ascii=ascii)[1:-1].encode() for ascii in (False, True))]


def windows_of(pid: int) -> list[bytes]:
    """Returns windows of what the blocks in the process's pool have, as many bytes as one key or value of a head."""
    windows: list[bytes] = []
    for fd in os.listdir(f"/proc/{pid}/fd"):
        path = f"/proc/{pid}/fd/{fd}"
        if "memfd:baton-kv" in os.readlink(path):
            data = Path(path).read_bytes()
            parts = {data[start : start + _WINDOW] for start in range(0, len(data), _WINDOW)}
            windows += [part for part in parts if len(set(part)) >= _LEAST_VALUES]
    assert len(windows) >= _MOST_WINDOWS, "the pool was not found"
    return windows[:: len(windows) // _MOST_WINDOWS]


def varints(numbers: Iterable[int]) -> bytes:
    """Returns the numbers as a packed field of a protobuf message has them."""
    packed = bytearray()
    for number in numbers:
        while number > 127:
            packed.append(number & 127 | 128)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def num_found(forms: Iterable[bytes], recorders: Iterable[Proxy]) -> int:
    """Returns how many of the forms passed."""
    streams = [stream for recorder in recorders for stream in recorder.streams]
    return sum(any(form in stream for stream in streams) for form in forms)


def found(secrets: Mapping[str, Iterable[bytes]], recorders: Iterable[Proxy]) -> set[str]:
    """Returns the names of the secrets of which some form passed."""
    everywhere = list(recorders)
    return {name for name, forms in secrets.items() if num_found(forms, everywhere)}
