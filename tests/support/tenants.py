"""Writes tenants files with keys that tests know, and runs routers with them.

Owns: the keys. Never: what tests expect of a tenant.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx2

from baton.v1 import inference_pb2_grpc
from services.router.tenants.keys import key_of, new_key
from tests.support.cluster import CONFIG, Cluster


@contextlib.asynccontextmanager
async def as_a_client(cluster: Any) -> AsyncIterator[None]:
    """Has the cluster's stub for inference call without the cluster token, as clients do."""
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        cluster.inference = inference_pb2_grpc.InferenceServiceStub(channel)
        yield


@contextlib.asynccontextmanager
async def http_client(cluster: Any) -> AsyncIterator[httpx2.AsyncClient]:
    """Yields a client of the router's HTTP port."""
    address = f"http://127.0.0.1:{cluster.router.http_port}"
    async with httpx2.AsyncClient(base_url=address, timeout=30.0, trust_env=False) as http:
        yield http


@contextlib.asynccontextmanager
async def serving(model: str, file: TenantsFile, **config: Any) -> AsyncIterator[Cluster]:
    """Yields a router with these tenants on both fronts, called by clients; at the end everything must be idle."""
    cluster = Cluster(replace(CONFIG, model=model, tenants=str(file.path), http_port=0, **config))
    await cluster.start()
    async with as_a_client(cluster):
        yield cluster
        await cluster.idle()
    await cluster.stop()


Metadata = tuple[tuple[str, str], ...]


class TenantsFile:
    """Keeps a tenants file and the keys in it, one for each tenant."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tenants.yaml"
        self.keys: dict[str, str] = {}

    def write(self, **tenants: dict[str, Any]) -> None:
        """Replaces the file by one with these tenants, in one step as editors do. JSON is YAML."""
        for name in tenants:
            self.keys.setdefault(name, new_key())
        entries = {name: {"keys": [self.entry(name)], **fields} for name, fields in tenants.items()}
        self.write_text(json.dumps({"tenants": entries}))

    def write_text(self, text: str) -> None:
        draft = self.path.with_suffix(".draft")
        draft.write_text(text)
        os.replace(draft, self.path)

    def entry(self, name: str) -> dict[str, str]:
        key = key_of(self.keys[name])
        return {"id": key.key_id, "sha256": key.digest.hex()}

    def metadata(self, name: str) -> Metadata:
        """Returns the metadata of a gRPC call of that tenant."""
        return (("authorization", f"Bearer {self.keys[name]}"),)

    def headers(self, name: str) -> dict[str, str]:
        """Returns the headers of an HTTP request of that tenant."""
        return {"authorization": f"Bearer {self.keys[name]}"}
