"""Looks for prompts, answers, tokens, keys and KV in all that passes between a cluster's processes and its clients.

Without TLS each of them is found: the scanner can find them. With TLS none is.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import ssl
from pathlib import Path

import grpc
import pytest

from baton.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.certificates import written
from tests.support.models import tiny_model
from tests.support.patience import Patience
from tests.support.recorded_cluster import RecordedCluster, recorded_cluster
from tests.support.recorder import found, num_found, varints
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
_WITHIN_S = 60.0


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
    flags = ("--split", "always", "--tenants", str(tenants.path))
    async with recorded_cluster(model, folder, WORKERS, *flags, tls=tls) as cluster:
        secrets = await use(cluster, tenants.keys["shop"])
        await until_kept(cluster)
        cluster.require_recorded()
        assert cluster.num_seen >= len(WORKERS), "this shows that connections are seen"
        secrets["KV"] = windows_of(cluster.children["prefill-0"].pid)
        recorders = cluster.recorders
        assert found(secrets, recorders.values()) == (set() if has_tls else set(secrets))
        for name in ("prefill-0", "prefill-0-kv"):  # over gRPC, and over sockets
            passed = num_found(secrets["KV"], [recorders[name]])
            assert passed == 0 if has_tls else passed >= 10, name
            assert recorders[name].num_bytes > len(secrets["KV"]) * _WINDOW, "as much as in the clear came this way"


async def use(cluster: RecordedCluster, key: str) -> dict[str, list[bytes]]:
    """Asks for answers over gRPC and HTTP. Returns the secrets of that, in the forms in which they may pass."""
    metadata = (("authorization", f"Bearer {key}"),)
    request = inference_pb2.GenerateRequest(
        text=PROMPT,
        sampling=types_pb2.SamplingParams(temperature=0.0),
        stopping=types_pb2.StoppingParams(max_tokens=24, ignore_eos=True),
        response=inference_pb2.ResponseOptions(echo_token_ids=True),
    )
    async with public_channel(cluster) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        answer = await stub.Generate(request, timeout=60.0, metadata=metadata)
        async for _ in stub.GenerateStream(request, timeout=60.0, metadata=metadata):
            pass
    body = await asyncio.to_thread(_complete, cluster, key)
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


def public_channel(cluster: RecordedCluster) -> grpc.aio.Channel:
    address = f"127.0.0.1:{cluster.recorders['public'].port}"
    if cluster.tls is None:
        return grpc.aio.insecure_channel(address)
    return grpc.aio.secure_channel(address, grpc.ssl_channel_credentials((cluster.tls / "ca.pem").read_bytes()))


def _complete(cluster: RecordedCluster, key: str) -> dict[str, list[dict[str, str]]]:
    port = cluster.recorders["http"].port
    if cluster.tls is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60.0)
    else:
        context = ssl.create_default_context(cafile=str(cluster.tls / "ca.pem"))
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60.0, context=context)
    asked = {"model": cluster.model.name, "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
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


async def until_kept(cluster: RecordedCluster) -> None:
    """Waits until the store has fetched what the prompts have left in the workers' caches."""
    patience = Patience(_WITHIN_S)
    while not any(
        each.worker.worker_id.startswith("store") and each.load.blocks_cached
        for each in (await cluster.status()).workers
    ):
        assert not patience.is_over(), "the store keeps nothing"
        await asyncio.sleep(0.1)


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
