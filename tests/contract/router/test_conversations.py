"""Tests that a client names its conversation over HTTP, by a header or in the body, and stays where its cache is."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx2
import pytest

from services.router.front.http.generation import SESSION
from services.rpc.names import Attr, Span
from tests.support.cluster import CONFIG, Cluster
from tests.support.http_client import bare_client

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 8},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 8},
    "/v1/responses": {"input": "hello", "max_output_tokens": 8},
}


@pytest.fixture
async def cluster(model: str) -> AsyncIterator[Cluster]:
    cluster = Cluster(replace(CONFIG, model=model, http_port=0, policy=("sticky",)))
    await cluster.start()
    yield cluster
    await cluster.idle()
    await cluster.stop()


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[httpx2.AsyncClient]:
    async with bare_client(cluster) as http:
        yield http


def conversations(cluster: Cluster) -> list[Any]:
    roots = [span for span in cluster.spans.get_finished_spans() if span.name == Span.REQUEST]
    return [(root.attributes or {}).get(Attr.CONVERSATION_ID) for root in roots]


@pytest.mark.parametrize("path", BODIES)
async def test_the_body_comes_before_the_header(cluster: Cluster, pair: Any, http: Any, path: str) -> None:
    for fields, headers in (({}, {}), ({}, {SESSION: "h"}), ({"session": "b"}, {}), ({"session": "b"}, {SESSION: "h"})):
        assert (await http.post(path, json=BODIES[path] | fields, headers=headers)).status_code == 200
    assert conversations(cluster) == [None, "h", "b", "b"]


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("text", ["x" * 129, "tab\there"])
async def test_it_is_bounded_as_over_grpc(cluster: Cluster, http: Any, path: str, text: str) -> None:
    in_header = await http.post(path, json=BODIES[path], headers={SESSION: text})
    in_body = await http.post(path, json=BODIES[path] | {"session": text})
    assert (in_header.status_code, in_header.json()["error"]["param"]) == (400, SESSION)
    assert (in_body.status_code, in_body.json()["error"]["param"]) == (400, "session")


async def test_a_conversation_stays_where_it_is(cluster: Cluster, http: Any) -> None:
    workers = [await cluster.add("mixed", worker_id=name) for name in ("a", "b", "c")]
    for number in range(12):
        for _ in range(2):
            answer = await http.post(
                "/v1/completions", json=BODIES["/v1/completions"], headers={SESSION: f"of {number}"}
            )
            assert answer.status_code == 200
        taken = [len(worker.commands) for worker in workers]
        assert all(count % 2 == 0 for count in taken), "both turns went to one worker"
    assert min(taken) > 0, "conversations are spread"
