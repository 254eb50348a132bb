"""Tests, at a running router, what a tenant's caps make of calls that ask for nothing, or for more than could ever be
let in, and whose the requests are that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest

from baton.v1 import types_pb2
from services.router.front.http.completions import DEFAULT_MAX_TOKENS
from services.router.telemetry.usage import RequestUsage
from tests.support.cluster import Cluster, request
from tests.support.scripted_worker import TOKENIZER
from tests.support.tenants import TenantsFile

COMPLETIONS = "/v1/completions"
NUM_PROMPT = len(TOKENIZER.encode("hello").ids)
NUM_OUTPUT = 4
BOTH = 2 * (NUM_PROMPT + NUM_OUTPUT)
"""The tokens of two prompts and their outputs."""


@pytest.fixture
def file(tmp_path: Path) -> TenantsFile:
    file = TenantsFile(tmp_path)
    file.write(
        free={},
        capped={"limits": {"max_output_tokens": 3}},
        brief={"limits": {"tokens_per_min": 6_000_000, "burst_tokens": NUM_PROMPT + 5}},
        exactly={"limits": {"tokens_per_min": 6, "burst_tokens": BOTH}},
        partly={"limits": {"tokens_per_min": 6, "burst_tokens": BOTH}},
        hardly={"limits": {"tokens_per_min": 6, "burst_tokens": BOTH - 1}},
    )
    return file


@pytest.mark.parametrize(("tenant", "most"), [("free", DEFAULT_MAX_TOKENS), ("capped", 3), ("brief", 5)])
async def test_a_completion_that_asks_for_nothing_gets_no_more_than_its_tenant_may(
    pair: Any, http: httpx2.AsyncClient, file: TenantsFile, tenant: str, most: int
) -> None:
    """OpenAI's default is the router's, so it must not be refused as if the client had asked for too much."""
    reply = await http.post(COMPLETIONS, json={"prompt": "hello"}, headers=file.headers(tenant))
    assert reply.status_code == 200, reply.text
    assert pair[0].commands[0].stopping.max_tokens == most
    asked = {"prompt": "hello", "max_tokens": most + 1}
    reply = await http.post(COMPLETIONS, json=asked, headers=file.headers(tenant))
    assert reply.status_code == (200 if tenant == "free" else 400), "what a client does ask for is refused"


async def test_prompts_that_together_exceed_the_burst_are_a_mistake(
    pair: Any, http: httpx2.AsyncClient, file: TenantsFile
) -> None:
    """To try that again is of no use, whatever is left now; what just fits is let in."""
    body = {"prompt": ["hello", "hello"], "max_tokens": NUM_OUTPUT}
    for _ in range(2):
        reply = await http.post(COMPLETIONS, json=body, headers=file.headers("hardly"))
        assert reply.status_code == 400, reply.text
        assert reply.json()["error"]["param"] in ("prompt[0]", "prompt[1]")
        assert "burst_tokens" in reply.json()["error"]["message"]
    one = {"prompt": "hello", "max_tokens": NUM_OUTPUT}
    assert (await http.post(COMPLETIONS, json=one, headers=file.headers("hardly"))).status_code == 200
    assert (await http.post(COMPLETIONS, json=body, headers=file.headers("hardly"))).status_code == 400, "empty as full"
    assert (await http.post(COMPLETIONS, json=body, headers=file.headers("exactly"))).status_code == 200
    reply = await http.post(COMPLETIONS, json=body, headers=file.headers("exactly"))
    assert reply.status_code == 429, "later it may be let in"
    assert (await http.post(COMPLETIONS, json=one, headers=file.headers("partly"))).status_code == 200
    reply = await http.post(COMPLETIONS, json=body, headers=file.headers("partly"))
    assert reply.status_code == 429, "there is enough for one of them"
    assert len(pair[0].commands) == 4, "of a call that is refused no prompt begins"


async def test_messages_that_cannot_be_read_are_their_senders(cluster: Cluster, file: TenantsFile) -> None:
    told: list[RequestUsage] = []
    cluster.router._inference._intake._usage_sinks = [told.append]
    async with grpc.aio.insecure_channel(cluster.router.address) as channel:
        for method in ("Generate", "GenerateStream"):
            path = f"/baton.v1.InferenceService/{method}"
            call = channel.unary_stream(path) if method == "GenerateStream" else channel.unary_unary(path)
            for metadata in (file.metadata("free"), ()):
                code = await call(b"\xff\xff", metadata=metadata).code()
                assert code is (grpc.StatusCode.INVALID_ARGUMENT if metadata else grpc.StatusCode.UNAUTHENTICATED)
    assert [(usage.tenant, usage.model, usage.outcome) for usage in told] == [("free", "", "malformed_message")] * 2
    stopping = types_pb2.StoppingParams(max_tokens=4)
    call = cluster.inference.Generate(request(stopping=stopping, model="nowhere"), metadata=file.metadata("free"))
    assert await call.code() is grpc.StatusCode.NOT_FOUND
    assert len(told) == 3, "one that was read is counted once"
