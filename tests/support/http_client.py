"""Provides clients of a cluster's HTTP: the official package, and bare requests for what it hides.

Owns: how they connect, and that they end with the test. Never: what a test expects.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai

from tests.support.cluster import Cluster

HTTP = {"http_port": 0}
"""Flags of a router that has it."""
TIMEOUTS = ["x-request-timeout", "x-envoy-expected-rq-timeout-ms"]
"""Headers that set a request's deadline: seconds, milliseconds."""


def address(cluster: Cluster) -> str:
    return f"http://127.0.0.1:{cluster.router.http_port}"


@contextlib.asynccontextmanager
async def openai_client(cluster: Cluster, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    """It does not try again by itself, unless told to."""
    options = {"base_url": f"{address(cluster)}/v1", "api_key": "none", "max_retries": 0, **options}
    async with openai.AsyncOpenAI(**options) as client:
        yield client


@contextlib.asynccontextmanager
async def bare_client(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=address(cluster), timeout=60.0, trust_env=False) as client:
        yield client


def raw_request(path: str, asked: Any) -> bytes:
    """Returns a request's bytes, for clients that do what no library would."""
    body = json.dumps(asked).encode()
    headers = f"host: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"POST {path} HTTP/1.1\r\n{headers}\r\n".encode() + body


def events(body: str) -> list[Any]:
    """Returns what stands in each event of an event stream; the last is the string [DONE] if all went well."""
    assert body.endswith("\n\n")
    lines = body.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    texts = [line.removeprefix("data: ") for line in lines]
    return [text if text == "[DONE]" else json.loads(text) for text in texts]
