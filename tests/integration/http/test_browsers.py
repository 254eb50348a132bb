"""Tests what a page in somebody's browser could ask of a router on the same machine, and is refused."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from services.cli.arguments import Parser
from services.core import config as configuration
from services.core.addresses import bare_host, is_loopback
from services.core.errors import ConfigError
from services.router.config import RouterConfig
from services.router.front.http.app import guarded
from tests.support.cluster import Cluster, running_cluster
from tests.support.http_client import HTTP, bare_client
from tests.support.models import tiny_model
from tests.support.workers import MIXED

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = b'{"prompt": [9, 9], "max_tokens": 2}'
COMPLETIONS = "/v1/completions"
APP = "https://app.example"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("browsers"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, [MIXED], router=HTTP) as cluster:
        yield cluster


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def opened(model: Path) -> AsyncIterator[Cluster]:
    flags = {**HTTP, "http_cors_origin": (APP,), "http_allowed_host": ("baton.example",)}
    async with running_cluster(model, [MIXED], router=flags) as cluster:
        yield cluster


async def ask(cluster: Cluster, method: str, path: str, headers: dict[str, str], body: bytes = b"") -> Any:
    async with bare_client(cluster) as client:
        return await client.request(method, path, content=body, headers=headers)


def error_of(answer: Any) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


JSON = ["application/json", "application/json; charset=utf-8", "Application/JSON;charset=UTF-8", "application/ld+json"]
OTHERS = [
    *["", "application/x-www-form-urlencoded", "text/plain", "text/plain;application/json", "multipart/form-data"],
    *["application/jsonp", "application/json,text/plain", "application", "*/*", "text/json"],
]


@pytest.mark.parametrize("kind", JSON)
async def test_json_is_taken(cluster: Cluster, kind: str) -> None:
    answer = await ask(cluster, "POST", COMPLETIONS, {"content-type": kind}, BODY)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_what_a_page_can_send_without_asking_is_refused(cluster: Cluster, path: str, kind: str) -> None:
    """A page can send what `curl -d` sends without a header, whose default is a form."""
    answer = await ask(cluster, "POST", path, {"content-type": kind} if kind else {}, BODY)
    assert answer.status_code == 415
    error = error_of(answer)
    assert (error["type"], error["code"]) == ("invalid_request_error", "unsupported_media_type")
    assert "application/json" in error["message"]


async def test_a_compressed_body_is_refused(cluster: Cluster) -> None:
    headers = {"content-type": "application/json", "content-encoding": "gzip"}
    answer = await ask(cluster, "POST", COMPLETIONS, headers, gzip.compress(BODY))
    assert answer.status_code == 415
    assert error_of(answer)["code"] == "unsupported_content_encoding"
    assert answer.headers["accept-encoding"] == "identity"  # RFC 9110, 15.5.16
    for encoding, status in (("Identity", 200), ("identity, gzip", 415), ("", 200)):
        headers["content-encoding"] = encoding
        assert (await ask(cluster, "POST", COMPLETIONS, headers, BODY)).status_code == status


@pytest.mark.parametrize(
    "host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:1", "[::1]:8000", "localhost."]
)
async def test_names_of_loopback(cluster: Cluster, host: str) -> None:
    assert (await ask(cluster, "GET", "/v1/models", {"host": host})).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil", "x"])
@pytest.mark.parametrize("path", ["/v1/models", "/metrics", "/health"])
async def test_other_names_are_refused_on_loopback(cluster: Cluster, path: str, host: str) -> None:
    answer = await ask(cluster, "GET", path, {"host": host})
    assert answer.status_code == 403
    error = error_of(answer)
    assert error["code"] == "unknown_host"
    assert "--http-allowed-host" in error["message"]


async def test_names_that_were_configured(opened: Cluster) -> None:
    assert (await ask(opened, "GET", "/v1/models", {"host": "Baton.Example:443"})).status_code == 200
    assert (await ask(opened, "GET", "/v1/models", {"host": "evil.example"})).status_code == 403


async def test_other_addresses_answer_to_any_name() -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["path"])

    scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"whatever.example")]}
    await guarded(app, "0.0.0.0")(scope, None, None)  # type: ignore[arg-type]
    assert seen == ["/"]


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/completions/", "/health/", "/health/live/", "//v1/models"])
async def test_no_path_is_another_ones(cluster: Cluster, path: str) -> None:
    """A redirect would name the host as the client wrote it."""
    answer = await ask(cluster, "GET", path, {})
    assert answer.status_code == 404
    error_of(answer)


PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,authorization"}


async def test_no_origin_is_let_in_by_itself(cluster: Cluster) -> None:
    preflight = await ask(cluster, "OPTIONS", COMPLETIONS, {"origin": APP, **PREFLIGHT})
    assert preflight.status_code == 405
    answer = await ask(cluster, "GET", "/v1/models", {"origin": APP})
    for each in (preflight, answer):
        assert not [name for name in each.headers if name.startswith("access-control")]


async def test_origins_that_were_configured(opened: Cluster) -> None:
    preflight = await ask(opened, "OPTIONS", COMPLETIONS, {"origin": APP, **PREFLIGHT})
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == APP
    assert "authorization" in preflight.headers["access-control-allow-headers"]
    answer = await ask(opened, "POST", COMPLETIONS, {"origin": APP, "content-type": "application/json"}, BODY)
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, APP)
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    for headers in ({"origin": "https://evil.example", **PREFLIGHT}, {"origin": "null", **PREFLIGHT}):
        refused = await ask(opened, "OPTIONS", COMPLETIONS, headers)
        assert refused.status_code == 400
        assert "access-control-allow-origin" not in refused.headers


@pytest.mark.parametrize(
    "origin", ["app.example", "https://app.example/", "https://app.example/x", "", "null", "ftp://x"]
)
async def test_an_origin_that_is_none_names_the_flag(origin: str) -> None:
    parser = Parser()
    configuration.add_arguments(parser, RouterConfig)
    with pytest.raises(ConfigError, match=r"^--http-cors-origin: "):
        configuration.load(RouterConfig, parser.parse_args([f"--http-cors-origin={origin}"]), {})


async def test_hosts_as_they_are_written() -> None:
    assert [bare_host(text) for text in ("A.b:1", "[::1]:80", "::1", "a.", "", "[")] == [
        "a.b",
        "::1",
        "::1",
        "a",
        "",
        "",
    ]
    assert is_loopback("127.8.8.8")
    assert is_loopback("::1")
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("10.0.0.1")
